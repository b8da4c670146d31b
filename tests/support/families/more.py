"""Kolors and the refiner of HunyuanImage: pipelines with a part that nothing else has."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from . import Case
from . import components as c
from . import stable_diffusion_xl as sdxl
from .flux import SQUARE, image
from .recent import HUNYUAN, hunyuan
from .stable_diffusion import MIXED

# --- Kolors ---------------------------------------------------------------------------------------------------------


class _PositionTokenizer(transformers.Qwen2Tokenizer):
    """Also tells the tokens' places, as ChatGLM's tokenizer does, which needs sentencepiece."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Tokenize."""
        made = super().__call__(*args, **kwargs)
        made["position_ids"] = (made["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        return made


def _glm_tokenizer() -> Any:
    return c.qwen_tokenizer("left", begins=True, kind=_PositionTokenizer)


def _glm() -> Any:
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel

    config = ChatGLMConfig(
        num_layers=2,
        padded_vocab_size=c.VOCAB,
        hidden_size=32,
        ffn_hidden_size=64,
        kv_channels=16,
        num_attention_heads=2,
        seq_length=256,
        multi_query_attention=True,
        add_qkv_bias=True,
        original_rope=True,
    )
    model = ChatGLMModel(config).float()
    for parameter in model.parameters():  # made without values
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.2)
        else:
            parameter.data.fill_(1.0)
    return model.eval()


KOLORS = {
    **sdxl.PARTS,
    "text_encoder": _glm,
    "tokenizer": _glm_tokenizer,
    "unet": lambda: c.unet(32, **sdxl.CONDITION, encoder_hid_dim=32, encoder_hid_dim_type="text_proj"),
}


def _kolors(module: str, name: str, kind: str, *inputs: Any, **params: Any) -> Case:
    """A case of a class that `diffusers` only shows where sentencepiece is installed."""
    import importlib

    found = getattr(importlib.import_module(f"diffusers.pipelines.{module}"), name)
    settings = {"max_sequence_length": 32} | params
    return c.image_case(found, kind, KOLORS, *inputs, params=settings, guidance_scale=MIXED)


# --- HunyuanImage's refiner -----------------------------------------------------------------------------------------


def _refiner_vae() -> Any:
    return diffusers.AutoencoderKLHunyuanImageRefiner(
        latent_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        spatial_compression_ratio=2,
        temporal_compression_ratio=1,
    ).eval()


REFINER = {
    **HUNYUAN,
    "vae": _refiner_vae,
    "transformer": lambda: hunyuan(in_channels=16, out_channels=8, text_embed_2_dim=None, patch_size=(1, 1, 1), rope_axes_dim=(2, 2, 4)),
}


CASES = [
    _kolors("kolors.pipeline_kolors", "KolorsPipeline", "text", **SQUARE),
    _kolors("kolors.pipeline_kolors_img2img", "KolorsImg2ImgPipeline", "image-to-image", image, strength=0.8),
    _kolors("pag.pipeline_pag_kolors", "KolorsPAGPipeline", "text", **SQUARE),
    c.image_case("HunyuanImageRefinerPipeline", "image-to-image", REFINER, image, params=SQUARE),
]
