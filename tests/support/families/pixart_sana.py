"""PixArt, Sana, Lumina, AuraFlow, HunyuanDiT, CogView, DiT: transformers over latents, with one text encoder or two."""

from __future__ import annotations

from typing import Any

import diffusers

from . import components as c
from .components_video import lively
from .flux import SQUARE, control, flow_match, image
from .stable_diffusion import BETAS, MIXED

LARGE = {"height": 64, "width": 64}  # for pipelines that take it for granted that latents are 8 times smaller
SIZED = SQUARE | {"use_resolution_binning": False}
TEXT = {"max_sequence_length": 32}


def _case(name: str, kind: str, parts: Any, *inputs: Any, make: Any = None, **params: Any) -> Any:
    return c.image_case(name, kind, parts, *inputs, params=params, make=make, guidance_scale=MIXED)


# --- PixArt ---------------------------------------------------------------------------------------------------------


def _pixart() -> Any:
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        cross_attention_dim=16,
        caption_channels=32,
        sample_size=16,
        use_additional_conditions=False,
    ).eval()


PIXART = {
    "tokenizer": c.t5_tokenizer,
    "text_encoder": c.t5_encoder,
    "vae": c.vae,
    "transformer": _pixart,
    "scheduler": lambda: diffusers.DPMSolverMultistepScheduler(**BETAS),
}


# --- Sana -----------------------------------------------------------------------------------------------------------

SANA_VALUES = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": 32,
    "sample_size": 16,
}


def _sana_vae() -> Any:
    blocks = ("ResBlock", "EfficientViTBlock")
    return diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=4,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        scaling_factor=0.41407,
    ).eval()


def _sana(**values: Any) -> Any:
    return diffusers.SanaTransformer2DModel(**(SANA_VALUES | values)).eval()


SANA = {
    "tokenizer": c.gemma_tokenizer,
    "text_encoder": lambda: c.language_model("Gemma2Model"),
    "vae": _sana_vae,
    "transformer": _sana,
    "scheduler": lambda: flow_match(shift=3.0),
    "controlnet": lambda: c.awaken(diffusers.SanaControlNetModel(**(SANA_VALUES | {"num_layers": 1}))).eval(),
}
SPRINT = {
    "transformer": lambda: _sana(guidance_embeds=True, qk_norm="rms_norm_across_heads"),
    "scheduler": diffusers.SCMScheduler,
}
SANA_PARAMS = SIZED | TEXT | {"complex_human_instruction": None}
# Sprint's time between two steps can be chosen for two steps only.
SPRINT_PARAMS = SANA_PARAMS | {"intermediate_timesteps": None}


# --- Lumina and AuraFlow --------------------------------------------------------------------------------------------

LUMINA = {
    "tokenizer": c.gemma_tokenizer,
    "text_encoder": lambda: c.language_model("GemmaModel"),
    "vae": lambda: c.vae(blocks=4),
    "scheduler": flow_match,
    "transformer": lambda: diffusers.LuminaNextDiT2DModel(
        sample_size=16,
        hidden_size=16,
        num_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        cross_attention_dim=32,
    ).eval(),
}
LUMINA_2 = {
    **LUMINA,
    "text_encoder": lambda: c.language_model("Gemma2Model"),
    "vae": lambda: c.vae(16, blocks=4),
    "transformer": lambda: diffusers.Lumina2Transformer2DModel(
        sample_size=16,
        hidden_size=24,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 4, 4),
        axes_lens=(300, 32, 32),
        cap_feat_dim=32,
    ).eval(),
}


def _aura() -> Any:
    model = diffusers.AuraFlowTransformer2DModel(
        sample_size=16,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pos_embed_max_size=256,
    )
    return lively(model, 3.0).eval()  # else its text would hardly matter


AURA = {
    "tokenizer": c.t5_tokenizer,
    "text_encoder": c.umt5_encoder,
    "vae": c.vae,
    "scheduler": lambda: flow_match(shift=1.73),
    "transformer": _aura,
}


# --- HunyuanDiT -----------------------------------------------------------------------------------------------------

HUNYUAN_VALUES = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 8,
    "hidden_size": 16,
    "cross_attention_dim": 32,
    "cross_attention_dim_t5": 32,
    "pooled_projection_dim": 16,
}
HUNYUAN = {
    "vae": lambda: c.vae(blocks=4),
    "text_encoder": c.bert,
    "tokenizer": c.bert_tokenizer,
    "text_encoder_2": c.t5_encoder,
    "tokenizer_2": c.t5_tokenizer,
    "transformer": lambda: diffusers.HunyuanDiT2DModel(**HUNYUAN_VALUES, num_layers=4).eval(),
    "controlnet": lambda: c.awaken(
        diffusers.HunyuanDiT2DControlNetModel(**HUNYUAN_VALUES, transformer_num_layers=4)
    ).eval(),
    "scheduler": lambda: diffusers.DDPMScheduler(**BETAS, prediction_type="v_prediction"),
    "pag_applied_layers": lambda: ["blocks.1"],
}


HUNYUAN_PARAMS = LARGE | {"use_resolution_binning": False}


def large_control(i: int) -> dict[str, Any]:
    """A picture of 64x64 for a side network."""
    return {"control_image": c.picture(i + 20, 64)}


# --- CogView --------------------------------------------------------------------------------------------------------

COGVIEW_VALUES = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "text_embed_dim": 32,
    "time_embed_dim": 8,
    "condition_dim": 4,
    "pos_embed_max_size": 16,
    "sample_size": 16,
}
COGVIEW_3 = {
    "tokenizer": c.t5_tokenizer,
    "text_encoder": c.t5_encoder,
    "vae": c.vae,
    "transformer": lambda: diffusers.CogView3PlusTransformer2DModel(**COGVIEW_VALUES).eval(),
    "scheduler": lambda: diffusers.CogVideoXDDIMScheduler(),
}


def _cogview_4(**values: Any) -> Any:
    return diffusers.CogView4Transformer2DModel(**(COGVIEW_VALUES | {"rope_axes_dim": (16, 16)} | values)).eval()


COGVIEW_4 = {
    "tokenizer": lambda: c.qwen_tokenizer("left", begins=True),
    "text_encoder": lambda: c.language_model("GlmModel"),
    "vae": c.vae,
    "transformer": _cogview_4,
    "scheduler": lambda: flow_match(
        use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
    ),
}


def _dit() -> Any:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=1000,
    ).eval()


CASES = [
    _case("PixArtAlphaPipeline", "text", PIXART, clean_caption=False, **SIZED, **TEXT),
    _case("PixArtSigmaPipeline", "text", PIXART, clean_caption=False, **SIZED, **TEXT),
    _case("PixArtSigmaPAGPipeline", "text", PIXART, clean_caption=False, **SIZED, **TEXT),
    _case("SanaPipeline", "text", SANA, **SANA_PARAMS),
    _case("SanaPAGPipeline", "text", SANA, **SANA_PARAMS),
    _case("SanaControlNetPipeline", "controlnet", SANA, control, **SANA_PARAMS),
    _case("SanaSprintPipeline", "text", SANA, make=SPRINT, **SPRINT_PARAMS),
    _case("SanaSprintImg2ImgPipeline", "image-to-image", SANA, image, make=SPRINT, strength=0.8, **SPRINT_PARAMS),
    _case("LuminaPipeline", "text", LUMINA, clean_caption=False, **LARGE, **TEXT),
    _case("Lumina2Pipeline", "text", LUMINA_2, **LARGE, max_sequence_length=256),
    _case("AuraFlowPipeline", "text", AURA, **SQUARE, **TEXT),
    _case("HunyuanDiTPipeline", "text", HUNYUAN, **HUNYUAN_PARAMS),
    # Without guidance its rows do not agree with those of its size conditions, in diffusers itself.
    c.image_case("HunyuanDiTPAGPipeline", "text", HUNYUAN, params=HUNYUAN_PARAMS),
    _case("HunyuanDiTControlNetPipeline", "controlnet", HUNYUAN, large_control, **HUNYUAN_PARAMS),
    _case("CogView3PlusPipeline", "text", COGVIEW_3, **SQUARE, **TEXT),
    _case("CogView4Pipeline", "text", COGVIEW_4, **SQUARE, **TEXT),
    _case(
        "CogView4ControlPipeline",
        "control",
        COGVIEW_4,
        control,
        make={"transformer": lambda: _cogview_4(in_channels=8)},
        **SQUARE,
        **TEXT,
    ),
    c.image_case(
        "DiTPipeline",
        "class",
        {"transformer": _dit, "vae": c.vae, "scheduler": lambda: diffusers.DDIMScheduler()},
        lambda i: {"class_labels": [7 + 100 * i]},
        params={},
        guidance_scale=MIXED,
        has_prompt=False,
    ),
]
