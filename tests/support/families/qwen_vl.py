"""Pipelines whose text encoder is a Qwen3-VL, and two with Mistral: Krea, Nucleus, Joy, DreamLite, Ideogram, …"""

from __future__ import annotations

import dataclasses
from typing import Any

import diffusers

from . import Case, flux, qwen_image
from . import components as c
from .components_video import lively
from .flux import SQUARE, flow_match, image
from .stable_diffusion import MIXED

VL = "Qwen3VLForConditionalGeneration"


def _case(name: str, kind: str, parts: Any, *inputs: Any, guidance: Any = MIXED, **params: Any) -> Case:
    return c.image_case(name, kind, parts, *inputs, params=params, guidance_scale=guidance)


def _krea() -> Any:
    model = diffusers.Krea2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        timestep_embed_dim=8,
        text_hidden_dim=32,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 2, 2),
    )
    return lively(model, 2.0)


KREA = {
    "scheduler": lambda: flow_match(use_dynamic_shifting=True),
    "vae": qwen_image.vae,
    "text_encoder": lambda: c.qwen_vl("Qwen3VLModel"),
    "tokenizer": c.qwen_tokenizer,
    "transformer": _krea,
    "text_encoder_select_layers": lambda: (1, 2),
}


def _nucleus() -> Any:
    return lively(
        diffusers.NucleusMoEImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(8, 4, 4),
            num_experts=4,
            moe_intermediate_dim=32,
            dense_moe_strategy="leave_first_block_dense",
            capacity_factors=[2.0, 2.0],
        )
    )


NUCLEUS = {
    "scheduler": flow_match,
    "vae": qwen_image.vae,
    "text_encoder": lambda: c.qwen_vl(VL),
    "processor": lambda: c.qwen_vl_processor("Qwen3VLProcessor"),
    "transformer": _nucleus,
}


def _joy_vae() -> Any:
    model = diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return c.certain(model).eval()


def _joy(kind: str) -> Any:
    values = {"patch_size": [1, 2, 2], "in_channels": 16, "hidden_size": 32, "num_attention_heads": 2, "text_dim": 32}
    return lively(getattr(diffusers, kind)(**values, num_layers=1, rope_dim_list=[4, 6, 6]), 2.0)


JOY = {
    "scheduler": flow_match,
    "vae": _joy_vae,
    "text_encoder": lambda: c.qwen_vl(VL),
    "tokenizer": c.qwen_tokenizer,
    "processor": lambda: c.qwen_vl_processor("Qwen3VLProcessor"),
    "transformer": lambda: _joy("JoyImageEditTransformer3DModel"),
}
JOY_PLUS = {**JOY, "transformer": lambda: _joy("JoyImageEditPlusTransformer3DModel")}


# --- DreamLite ------------------------------------------------------------------------------------------------------


def _dreamlite_unet() -> Any:
    return diffusers.DreamLiteUNetModel(
        sample_size=16,
        down_block_types=("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
        up_block_types=("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"),
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=32,
        attention_head_dim=8,
        use_linear_projection=True,
        ff_mult=2,
    ).eval()


def _tiny_vae() -> Any:
    return diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    ).eval()


DREAMLITE = {
    "text_encoder": lambda: c.qwen_vl(VL),
    "tokenizer": c.qwen_tokenizer,
    "processor": lambda: c.qwen_vl_processor("Qwen3VLProcessor"),
    "vae": _tiny_vae,
    "unet": _dreamlite_unet,
    "scheduler": flow_match,
}


# --- Ernie-Image, Ideogram 4, Bria Fibo 2, Qwen-Image 2.1 ----------------------------------------------------------


def _ernie() -> Any:
    model = diffusers.ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=1,
        ffn_hidden_size=32,
        in_channels=64,
        out_channels=64,
        text_in_dim=32,
        rope_axes_dim=(8, 4, 4),
    )
    return c.awaken(model).eval()


ERNIE = {
    "transformer": _ernie,
    "vae": flux.vae_2,
    "text_encoder": lambda: c.language_model("MistralModel"),
    "tokenizer": lambda: c.qwen_tokenizer(begins=True),
    "scheduler": lambda: flow_match(shift=3.0),
}


def _ideogram() -> Any:
    return diffusers.Ideogram4Transformer2DModel(
        in_channels=64,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        intermediate_size=32,
        adaln_dim=16,
        llm_features_dim=13 * 32,  # 13 layers of the text encoder
        mrope_section=(4, 2, 2),
    ).eval()


IDEOGRAM = {
    "scheduler": flow_match,
    "vae": flux.vae_2,
    "text_encoder": lambda: c.qwen_vl("Qwen3VLModel", layers=36),
    "tokenizer": c.qwen_tokenizer,
    "transformer": _ideogram,
    "unconditional_transformer": _ideogram,
}


def _fibo_2() -> Any:
    return diffusers.BriaFibo2Transformer2DModel(
        in_channels=16,
        patch_size=2,
        dim=32,
        n_layers=6,
        n_refiner_layers=1,
        n_heads=2,
        cap_feat_dim=96,  # three layers of the text encoder
        injection_layer_ids=(1, 2, 3, 4, 5),
        perceiver_num_layers=1,
        min_num_gist_tokens=8,
        max_num_gist_tokens=16,
        gist_step=8,
        gist_min_text_len=8,
        gist_max_text_len=64,
        axes_dims=(8, 4, 4),
        axes_lens=(512, 64, 64),
    ).eval()


FIBO_2 = {
    "transformer": _fibo_2,
    "scheduler": lambda: flow_match(use_dynamic_shifting=True),
    "vae": flux.vae_2,
    "text_encoder": lambda: c.qwen_vl(VL, layers=36),
    "processor": lambda: c.qwen_vl_processor("Qwen3VLProcessor"),
}


def _vae_21() -> Any:
    return diffusers.AutoencoderKLQwenImage21(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=16,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * 16,
        latents_std=[1.0] * 16,
        scale_factor_spatial=2,
        scale_factor_temporal=1,
    ).eval()


QWEN_21 = {
    "scheduler": lambda: flow_match(use_dynamic_shifting=True),
    "vae": _vae_21,
    "text_encoder": lambda: c.qwen_vl(VL),
    "processor": lambda: c.qwen_vl_processor("Qwen3VLProcessor"),
    "transformer": lambda: lively(
        diffusers.QwenImage21Transformer2DModel(
            in_channels=16,
            out_channels=16,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=32,
            axes_dims_rope=(8, 4, 4),
        ),
        2.0,
    ),
}


def _two_images(i: int) -> dict[str, Any]:
    return {"images": [c.picture(i, 64), c.picture(i + 20, 64)]}


def _small_buckets(case: Case, processor: str) -> Case:
    """Let a Joy pipeline know a size of 64x64, which is the only one it then chooses."""

    def build() -> Any:
        from diffusers.pipelines.joyimage import image_processor

        image_processor.BUCKETS.setdefault(64, [(64, 64)])
        pipe = case.build()
        getattr(pipe, processor).register_to_config(basesize=64)
        return pipe

    return dataclasses.replace(case, build=build)


IDEOGRAM_GUIDANCE = (4.0, 4.0, 1.0, 4.0)
IDEOGRAM_PARAMS = SQUARE | {"guidance_schedule": None, "max_sequence_length": 128}
CASES = [
    _case("Krea2Pipeline", "text", KREA, max_sequence_length=512, **SQUARE),
    _case("NucleusMoEImagePipeline", "text", NUCLEUS, return_index=-1, **SQUARE),
    _small_buckets(_case("JoyImageEditPipeline", "edit", JOY, image), "vae_image_processor"),
    _small_buckets(_case("JoyImageEditPlusPipeline", "edit", JOY_PLUS, _two_images, **SQUARE), "image_processor"),
    _case("DreamLitePipeline", "text", DREAMLITE, **SQUARE),
    _case("DreamLiteMobilePipeline", "text", DREAMLITE, guidance=(None,) * 4, **SQUARE),
    _case("ErnieImagePipeline", "text", ERNIE, **SQUARE),
    _case("Ideogram4Pipeline", "text", IDEOGRAM, guidance=IDEOGRAM_GUIDANCE, **IDEOGRAM_PARAMS),
    _case("BriaFibo2Pipeline", "text", FIBO_2, **SQUARE),
    # It takes it for granted that its autoencoder makes pictures 16 times smaller.
    _case("QwenImage21Pipeline", "text", QWEN_21, guidance=(None,) * 4, height=256, width=256),
]
