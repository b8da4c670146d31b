"""Newer transformers, each its own family: HiDream, PRX, HunyuanImage."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from . import Case
from . import components as c
from .components_video import lively, offline_ftfy
from .flux import SQUARE, flow_match
from .stable_diffusion import MIXED

LARGE = {"height": 64, "width": 64}


def _case(name: str | type, kind: str, parts: Any, *inputs: Any, guidance: Any = MIXED, **params: Any) -> Case:
    return c.image_case(name, kind, parts, *inputs, params=params, guidance_scale=guidance)


# --- HiDream --------------------------------------------------------------------------------------------------------


def _hidream() -> Any:
    model = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=[32, 32],
        text_emb_dim=64,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(16, 16),
        llama_layers=[0, 1],
    )
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):  # made without values
            parameter.data.normal_()
    return model.eval()


HIDREAM = {
    "scheduler": lambda: flow_match(shift=3.0),
    "vae": lambda: c.vae(16),
    "text_encoder": c.clip_text_projected,
    "tokenizer": c.clip_tokenizer,
    "text_encoder_2": c.clip_text_projected,
    "tokenizer_2": c.clip_tokenizer,
    "text_encoder_3": c.t5_encoder,
    "tokenizer_3": c.t5_tokenizer,
    "text_encoder_4": lambda: c.language_model("LlamaForCausalLM"),
    "tokenizer_4": c.llama_tokenizer,
    "transformer": _hidream,
}


# --- PRX ------------------------------------------------------------------------------------------------------------


def _t5_gemma() -> Any:
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    values = c.decoder_values() | {"layer_types": ["full_attention"] * 2, "attn_implementation": "eager"}
    config = transformers.T5GemmaConfig(encoder=values, decoder=values, is_encoder_decoder=False)
    return T5GemmaEncoder(config.encoder).eval()


def _prx(**values: Any) -> Any:
    settings = {
        "context_in_dim": 32,
        "hidden_size": 16,
        "mlp_ratio": 2.0,
        "num_heads": 2,
        "depth": 1,
        "axes_dim": [4, 4],
    }
    return lively(diffusers.PRXTransformer2DModel(**(settings | values)))


PRX = {
    "transformer": lambda: _prx(in_channels=16),
    "scheduler": flow_match,
    "text_encoder": _t5_gemma,
    "tokenizer": c.gemma_tokenizer,
    "vae": lambda: c.vae(16),
}
PRX_PIXEL = {
    "transformer": lambda: _prx(in_channels=3, patch_size=4, bottleneck_size=8, resolution_embeds=True),
    "scheduler": flow_match,
    "text_encoder": lambda: c.language_model("Qwen3Model"),
    "tokenizer": c.qwen_tokenizer,
    "prompt_max_tokens": lambda: 32,
}


# --- HunyuanImage ---------------------------------------------------------------------------------------------------


def _hunyuan_vae() -> Any:
    model = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32, 32, 32),
        layers_per_block=1,
        spatial_compression_ratio=8,
        sample_size=64,
        scaling_factor=0.5,
    )
    return model.eval()


def hunyuan(**values: Any) -> Any:
    """HunyuanImageTransformer2DModel."""
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "patch_size": (1, 1),
        "text_embed_dim": 32,
        "text_embed_2_dim": 32,
        "rope_axes_dim": (4, 4),
    }
    return lively(diffusers.HunyuanImageTransformer2DModel(**(settings | values)), 2.0)


def _guider() -> Any:
    from diffusers.guiders import AdaptiveProjectedMixGuidance

    return AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=2)


HUNYUAN = {
    "scheduler": lambda: flow_match(shift=7.0),
    "vae": _hunyuan_vae,
    "text_encoder": c.qwen_vl,
    "tokenizer": c.qwen_tokenizer,
    "text_encoder_2": c.t5_encoder,
    "tokenizer_2": c.byt5_tokenizer,
    "transformer": hunyuan,
    "guider": _guider,
    "ocr_guider": _guider,
}


CASES = [
    c.with_attributes(
        _case("HiDreamImagePipeline", "text", HIDREAM, max_sequence_length=32, **SQUARE), default_sample_size=16
    ),
    _case(
        offline_ftfy(diffusers.PRXPipeline),
        "text",
        PRX,
        use_resolution_binning=False,
        skip_text_cleaning=True,
        tokenizer_max_length=32,
        **SQUARE,
    ),
    _case(offline_ftfy(diffusers.PRXPixelPipeline), "text", PRX_PIXEL, use_resolution_binning=False, **SQUARE),
    _case("HunyuanImagePipeline", "text", HUNYUAN, guidance=(None,) * 4, **LARGE),
]
