"""FLUX.1 and FLUX.2: transformers over packed latents (each token is 2x2 of them), with flow matching."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from . import Case
from . import components as c
from .components_video import lively

SIZE = 32
SQUARE = {"height": SIZE, "width": SIZE}
TEXT = {"max_sequence_length": 32}
TOKEN = 64  # features of a token: 2x2 latents of 16 channels
VALUES = {
    "patch_size": 1,
    "in_channels": TOKEN,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}


def transformer(**values: Any) -> Any:
    """FluxTransformer2DModel that is told the guidance, as FLUX.1 dev is."""
    return diffusers.FluxTransformer2DModel(**(VALUES | {"guidance_embeds": True} | values)).eval()


def _controlnet() -> Any:
    return c.awaken(diffusers.FluxControlNetModel(**VALUES, guidance_embeds=True)).eval()


def flow_match(**values: Any) -> Any:
    """FlowMatchEulerDiscreteScheduler."""
    return diffusers.FlowMatchEulerDiscreteScheduler(**values)


PARTS = {
    "scheduler": lambda: flow_match(use_dynamic_shifting=True, shift=3.0),
    "vae": lambda: c.vae(16),
    "text_encoder": c.clip_text,
    "tokenizer": c.clip_tokenizer,
    "text_encoder_2": c.t5_encoder,
    "tokenizer_2": c.t5_tokenizer,
    "transformer": transformer,
    "controlnet": _controlnet,
    "image_encoder": c.clip_vision,
    "feature_extractor": c.clip_image_processor,
}
CONTROL_PARTS = {**PARTS, "transformer": lambda: transformer(in_channels=2 * TOKEN, out_channels=TOKEN)}
# Beside the latents: the masked picture's, and for each token the mask's 4x4 pixels.
FILL_PARTS = {**PARTS, "transformer": lambda: transformer(in_channels=2 * TOKEN + 16, out_channels=TOKEN)}

OUT_LAYERS = (1, 2)  # whose features the text encoder of FLUX.2 gives, side by side
VALUES_2 = {
    "in_channels": 64,  # 2x2 latents of 16 channels
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "timestep_guidance_channels": 32,
    "axes_dims_rope": (4, 4, 4, 4),
}


def _transformer_2(**values: Any) -> Any:
    return lively(diffusers.Flux2Transformer2DModel(**(VALUES_2 | values)))


def vae_2() -> Any:
    """AutoencoderKLFlux2 that makes pictures half as large."""
    return diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        sample_size=32,
    ).eval()


def _mistral() -> Any:
    config = transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**c.decoder_values()),
        vision_config=transformers.PixtralVisionConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
        image_token_index=c.TOKEN_ID["<|image_pad|>"],
    )
    return transformers.Mistral3ForConditionalGeneration(config).eval()


PARTS_2 = {
    "scheduler": lambda: flow_match(use_dynamic_shifting=True),
    "vae": vae_2,
    "text_encoder": _mistral,
    "tokenizer": c.qwen_tokenizer,
    "transformer": _transformer_2,
}
KLEIN_PARTS = {
    **PARTS_2,
    "text_encoder": lambda: c.language_model("Qwen3ForCausalLM"),
    "transformer": lambda: _transformer_2(guidance_embeds=False),
}


def image(i: int) -> dict[str, Any]:
    """A picture to begin with."""
    return {"image": c.picture(i, SIZE)}


def inpaint(i: int) -> dict[str, Any]:
    """A picture and what is to be painted anew."""
    return {"image": c.picture(i, SIZE), "mask_image": c.mask(i, SIZE)}


def control(i: int) -> dict[str, Any]:
    """A picture for a side network."""
    return {"control_image": c.picture(i + 20, SIZE)}


def _large_image(i: int) -> dict[str, Any]:
    return {"image": c.picture(i, 64)}


def _reference(i: int) -> dict[str, Any]:
    return {"image_reference": c.picture(i + 40, SIZE)}


def _case(name: str, kind: str, *inputs: Any, parts: Any = PARTS, **params: Any) -> Case:
    """A case whose requests have what all functions of `inputs` give."""
    return Case(
        pipeline=name,
        modality="image",
        kind=kind,
        build=c.builder(name, parts),
        params=SQUARE | TEXT | params,
        inputs=lambda i: {key: value for function in inputs for key, value in function(i).items()},
        steps=c.steps_of(kind, params),
        guidance_scale=(None, 2.0, 1.0, None),
    )


def _case_2(name: str, kind: str, *inputs: Any, parts: Any = KLEIN_PARTS, guided: bool = True) -> Case:
    return Case(
        pipeline=name,
        modality="image",
        kind=kind,
        build=c.builder(name, parts),
        params=SQUARE | {"text_encoder_out_layers": OUT_LAYERS, "max_sequence_length": 512},
        inputs=lambda i: {key: value for function in inputs for key, value in function(i).items()},
        guidance_scale=(None, None, 1.0, None) if guided else (None,) * 4,
    )


KONTEXT = {"max_area": SIZE * SIZE, "_auto_resize": False}
CASES = [
    _case("FluxPipeline", "text"),
    _case("FluxImg2ImgPipeline", "image-to-image", image, strength=0.8),
    _case("FluxInpaintPipeline", "inpaint", inpaint, strength=0.8),
    _case("FluxFillPipeline", "inpaint", inpaint, parts=FILL_PARTS),
    _case("FluxKontextPipeline", "edit", image, **KONTEXT),
    _case("FluxKontextInpaintPipeline", "inpaint edit", inpaint, _reference, **KONTEXT),
    _case("FluxControlPipeline", "control", control, parts=CONTROL_PARTS),
    _case("FluxControlImg2ImgPipeline", "control image-to-image", image, control, parts=CONTROL_PARTS, strength=0.8),
    _case("FluxControlInpaintPipeline", "control inpaint", inpaint, control, parts=CONTROL_PARTS, strength=0.8),
    _case("FluxControlNetPipeline", "controlnet", control),
    _case("FluxControlNetImg2ImgPipeline", "controlnet image-to-image", image, control, strength=0.8),
    _case("FluxControlNetInpaintPipeline", "controlnet inpaint", inpaint, control, strength=0.8),
    _case_2("Flux2Pipeline", "text", parts=PARTS_2),
    _case_2("Flux2KleinPipeline", "text"),
    _case_2("Flux2KleinInpaintPipeline", "inpaint", inpaint),
    _case_2("Flux2KleinKVPipeline", "edit", _large_image, guided=False),
]
