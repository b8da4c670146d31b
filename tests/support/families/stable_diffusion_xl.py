"""Stable Diffusion XL: a UNet that also gets the pooled text and the picture's size, two CLIP text encoders."""

from __future__ import annotations

from typing import Any

from . import Case
from . import components as c
from .stable_diffusion import MIXED, SQUARE, euler, image, inpaint

CONDITION = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 80,  # six sizes of 8 features, and the pooled text of 32
    "transformer_layers_per_block": (1, 2),
    "use_linear_projection": True,
}
CONTEXT = 64  # both text encoders' features, one after the other


def unet(**values: Any) -> Any:
    """UNet2DConditionModel with the conditions of Stable Diffusion XL."""
    return c.unet(CONTEXT, **(CONDITION | values))


PARTS = {
    "vae": lambda: c.vae(scaling_factor=0.13025),
    "text_encoder": c.clip_text,
    "tokenizer": c.clip_tokenizer,
    "text_encoder_2": c.clip_text_projected,
    "tokenizer_2": lambda: c.clip_tokenizer("!"),
    "unet": unet,
    "scheduler": euler,
    "image_encoder": c.clip_vision,
    "feature_extractor": c.clip_image_processor,
    "add_watermarker": lambda: False,
}


def _case(name: str, kind: str, inputs: Any = lambda i: {}, channels: int = 4, **params: Any) -> Case:
    return Case(
        pipeline=name,
        modality="image",
        kind=kind,
        build=c.builder(name, PARTS, unet=lambda: unet(channels=channels)),
        inputs=inputs,
        params=params,
        steps=c.steps_of(kind, params),
        guidance_scale=MIXED,
    )


CASES = [
    _case("StableDiffusionXLPipeline", "text", **SQUARE),
    _case("StableDiffusionXLImg2ImgPipeline", "image-to-image", image, strength=0.8),
    _case("StableDiffusionXLInpaintPipeline", "inpaint", inpaint, 9, **SQUARE),
    _case("StableDiffusionXLInstructPix2PixPipeline", "edit", image, 8, **SQUARE),
    _case("StableDiffusionXLPAGPipeline", "text", **SQUARE),
    _case("StableDiffusionXLPAGImg2ImgPipeline", "image-to-image", image, strength=0.8),
    _case("StableDiffusionXLPAGInpaintPipeline", "inpaint", inpaint, **SQUARE),
]
