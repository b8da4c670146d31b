"""Transformers over packed latents that came after FLUX.1: Chroma, Bria, Ovis-Image, LongCat-Image, VisualCloze."""

from __future__ import annotations

from typing import Any

import diffusers

from . import components as c
from .flux import FILL_PARTS, SQUARE, TOKEN, flow_match, image, inpaint
from .qwen_image import shrunk
from .stable_diffusion import MIXED

TEXT = {"max_sequence_length": 32}
LARGE = {"height": 64, "width": 64}
VALUES = {
    "patch_size": 1,
    "in_channels": TOKEN,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}
T5 = {
    "scheduler": lambda: flow_match(use_dynamic_shifting=True),
    "vae": lambda: c.vae(16),
    "text_encoder": c.t5_encoder,
    "tokenizer": c.t5_tokenizer,
}


def _chroma() -> Any:
    approximator = {"approximator_num_channels": 16, "approximator_hidden_dim": 32, "approximator_layers": 1}
    model = diffusers.ChromaTransformer2DModel(**VALUES, **approximator).eval()
    model.register_to_config(guidance_embeds=False)  # which the pipeline for inpainting asks for
    return model


def _fibo_vae() -> Any:
    return diffusers.AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        temperal_downsample=[False, True, True],
        z_dim=16,
        is_residual=True,
    ).eval()


def _fibo() -> Any:
    values = VALUES | {"in_channels": 16, "joint_attention_dim": 64, "text_encoder_dim": 32}
    return diffusers.BriaFiboTransformer2DModel(**values).eval()


CHROMA = {**T5, "transformer": _chroma}
BRIA = {**T5, "transformer": lambda: diffusers.BriaTransformer2DModel(**VALUES).eval()}
FIBO = {
    "scheduler": flow_match,
    "vae": _fibo_vae,
    "text_encoder": lambda: c.language_model("SmolLM3ForCausalLM", vocab_size=128008),  # empty texts are token 128000
    "tokenizer": c.qwen_tokenizer,
    "transformer": _fibo,
}
OVIS = {
    **T5,
    "text_encoder": lambda: c.language_model("Qwen3Model"),
    "tokenizer": c.qwen_tokenizer,
    "transformer": lambda: diffusers.OvisImageTransformer2DModel(**VALUES, out_channels=TOKEN).eval(),
}
LONGCAT = {
    **T5,
    "text_encoder": c.qwen_vl,
    "tokenizer": c.qwen_tokenizer,
    "text_processor": lambda: c.qwen_vl_processor("Qwen2VLProcessor"),
    "transformer": lambda: diffusers.LongCatImageTransformer2DModel(**VALUES, pooled_projection_dim=32).eval(),
}
CLOZE = {**FILL_PARTS, "resolution": lambda: 32}


def _edit_prompt(i: int) -> dict[str, Any]:
    return {"image": c.picture(i, 64), "prompt": f'{{"edit_instruction": "{c.PROMPTS[i]}"}}'}


def _cloze(i: int) -> dict[str, Any]:
    """One row that shows the task, and one to be completed."""
    example = [c.picture(i, 32), c.picture(i + 20, 32)]
    return {
        "image": [example, [c.picture(i + 40, 32), None]],
        "task_prompt": "From [IMAGE1] to [IMAGE2].",
        "content_prompt": c.PROMPTS[i],
    }


def _case(name: str, kind: str, parts: Any, *inputs: Any, **params: Any) -> Any:
    return c.image_case(name, kind, parts, *inputs, params=params, guidance_scale=MIXED)


LONGCAT_EDIT = "longcat_image.pipeline_longcat_image_edit"
CASES = [
    _case("ChromaPipeline", "text", CHROMA, **SQUARE, **TEXT),
    _case("ChromaImg2ImgPipeline", "image-to-image", CHROMA, image, strength=0.8, **SQUARE, **TEXT),
    _case("ChromaInpaintPipeline", "inpaint", CHROMA, inpaint, strength=0.8, **SQUARE, **TEXT),
    _case("BriaPipeline", "text", BRIA, **SQUARE, **TEXT),
    _case("BriaFiboPipeline", "text", FIBO, **LARGE, **TEXT),
    c.image_case(
        "BriaFiboEditPipeline",
        "edit",
        FIBO,
        _edit_prompt,
        params=LARGE | TEXT | {"_auto_resize": False},
        guidance_scale=MIXED,
        has_prompt=False,
    ),
    _case("OvisImagePipeline", "text", OVIS, **SQUARE, max_sequence_length=256),
    _case("LongCatImagePipeline", "text", LONGCAT, enable_prompt_rewrite=False, **SQUARE),
    shrunk(_case("LongCatImageEditPipeline", "edit", LONGCAT, image), LONGCAT_EDIT),
    c.image_case("VisualClozeGenerationPipeline", "edit", CLOZE, _cloze, params=TEXT, has_prompt=False),
    c.image_case(
        "VisualClozePipeline",
        "edit",
        CLOZE,
        _cloze,
        params=TEXT | {"upsampling_height": 64, "upsampling_width": 64},
        has_prompt=False,
    ),
]
