"""Stable Diffusion 3: a transformer with three text encoders and flow matching."""

from __future__ import annotations

from typing import Any

import diffusers

from . import Case
from . import components as c
from .flux import SQUARE, control, flow_match, image, inpaint

VALUES = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 32,  # 16 of each CLIP encoder
    "pos_embed_max_size": 16,
}


def _text_encoder() -> Any:
    return c.clip_text_projected(16, projection=16)


def _controlnet(**values: Any) -> Any:
    return c.awaken(diffusers.SD3ControlNetModel(**(VALUES | {"num_layers": 1} | values))).eval()


PARTS = {
    "transformer": lambda: diffusers.SD3Transformer2DModel(**VALUES, qk_norm="rms_norm").eval(),
    "scheduler": lambda: flow_match(shift=3.0),
    "vae": lambda: c.vae(16),
    "text_encoder": _text_encoder,
    "tokenizer": c.clip_tokenizer,
    "text_encoder_2": _text_encoder,
    "tokenizer_2": lambda: c.clip_tokenizer("!"),
    "text_encoder_3": c.t5_encoder,
    "tokenizer_3": c.t5_tokenizer,
    "controlnet": _controlnet,
}


def _control_mask(i: int) -> dict[str, Any]:
    return control(i) | {"control_mask": c.mask(i, 32)}


def _case(name: str, kind: str, inputs: Any = lambda i: {}, **params: Any) -> Case:
    inpaint_net = {"controlnet": lambda: _controlnet(extra_conditioning_channels=1)}
    return Case(
        pipeline=name,
        modality="image",
        kind=kind,
        build=c.builder(name, PARTS, **(inpaint_net if "ControlNetInpainting" in name else {})),
        params=SQUARE | {"max_sequence_length": 32} | params,
        inputs=inputs,
        steps=c.steps_of(kind, params),
        guidance_scale=(None, None, 1.0, None),
    )


CASES = [
    _case("StableDiffusion3Pipeline", "text"),
    _case("StableDiffusion3Img2ImgPipeline", "image-to-image", image, strength=0.8),
    _case("StableDiffusion3InpaintPipeline", "inpaint", inpaint, strength=0.8),
    _case("StableDiffusion3PAGPipeline", "text"),
    _case("StableDiffusion3PAGImg2ImgPipeline", "image-to-image", image, strength=0.8),
    _case("StableDiffusion3ControlNetPipeline", "controlnet", control),
    _case("StableDiffusion3ControlNetInpaintingPipeline", "controlnet inpaint", _control_mask),
]
