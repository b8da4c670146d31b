"""Kolors, Z-Image Omni, OmniGen, GLM-Image, HunyuanImage's refiner: they need something before they run here."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from . import Case, z_image
from . import components as c
from . import stable_diffusion_xl as sdxl
from .components_video import lively
from .flux import SQUARE, flow_match, image
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


# --- Z-Image Omni, which needs bfloat16 if it is given pictures ------------------------------------------------------

OMNI = {**z_image.PARTS, "transformer": lambda: z_image.transformer(siglip_feat_dim=32)}


# --- OmniGen ----------------------------------------------------------------------------------------------------------


def _omnigen_class() -> Any:
    """The pipeline's class, made to work without torchvision, which it needs for pictures only."""
    from types import SimpleNamespace

    from diffusers.pipelines.omnigen import pipeline_omnigen, processor_omnigen

    if not hasattr(processor_omnigen, "transforms"):
        nothing = lambda *args, **kwargs: None  # noqa: E731
        processor_omnigen.transforms = SimpleNamespace(
            Compose=nothing, Lambda=nothing, ToTensor=nothing, Normalize=nothing
        )
        pipeline_omnigen.OmniGenMultiModalProcessor = processor_omnigen.OmniGenMultiModalProcessor
    return pipeline_omnigen.OmniGenPipeline


def _omnigen() -> Any:
    factors = [1.0] * 4
    model = diffusers.OmniGenTransformer2DModel(
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        num_layers=1,
        in_channels=4,
        time_step_dim=4,
        vocab_size=c.VOCAB,
        pad_token_id=0,
        rope_scaling={"long_factor": factors, "short_factor": factors},
    )
    return lively(model)


OMNIGEN = {
    "transformer": _omnigen,
    "scheduler": lambda: flow_match(invert_sigmas=True, num_train_timesteps=1),
    "vae": lambda: c.vae(blocks=4),
    "tokenizer": c.llama_tokenizer,
}


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
    "transformer": lambda: hunyuan(
        in_channels=16, out_channels=8, text_embed_2_dim=None, patch_size=(1, 1, 1), rope_axes_dim=(2, 2, 4)
    ),
}


# --- GLM-Image, whose language model is left out: a request brings its tokens ----------------------------------------


def _glm_image() -> Any:
    model = diffusers.GlmImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        text_embed_dim=32,
        time_embed_dim=16,
        condition_dim=8,
        prior_vq_quantizer_codebook_size=128,
    )
    return lively(model)


GLM_IMAGE = {
    "tokenizer": c.byt5_tokenizer,
    "text_encoder": c.t5_encoder,
    "vae": lambda: c.vae(blocks=4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
    "transformer": _glm_image,
    "scheduler": flow_match,
}


def _tokens(i: int) -> dict[str, Any]:
    """The tokens of a picture of 64x64."""
    return {"prior_token_ids": (c.noise(i, 1, 16) * 1000).long() % 128}


CASES = [
    _kolors("kolors.pipeline_kolors", "KolorsPipeline", "text", **SQUARE),
    _kolors("kolors.pipeline_kolors_img2img", "KolorsImg2ImgPipeline", "image-to-image", image, strength=0.8),
    _kolors("pag.pipeline_pag_kolors", "KolorsPAGPipeline", "text", **SQUARE),
    c.image_case(
        "ZImageOmniPipeline",
        "text",
        OMNI,
        params=SQUARE | {"max_sequence_length": 128},
        guidance_scale=(None, None, 0.0, None),
    ),
    c.image_case(_omnigen_class(), "text", OMNIGEN, params={"height": 64, "width": 64}, guidance_scale=MIXED),
    c.image_case(
        "GlmImagePipeline", "text", GLM_IMAGE, _tokens, params={"height": 64, "width": 64}, guidance_scale=MIXED
    ),
    c.image_case("HunyuanImageRefinerPipeline", "image-to-image", REFINER, image, params=SQUARE),
]
