"""What is built from parts of Stable Diffusion for another purpose, and early models that others did not follow."""

from __future__ import annotations

from typing import Any

import diffusers

from . import Case
from . import components as c
from .stable_diffusion import BETAS, MIXED, PARTS, SQUARE, ddim, image, inpaint

# --- Marigold -------------------------------------------------------------------------------------------------------


def _marigold(name: str, latents: int = 1, **values: Any) -> Case:
    parts = {
        **PARTS,
        "unet": lambda: c.unet(channels=4 + 4 * latents, out_channels=4 * latents),
        "scheduler": lambda: ddim(prediction_type="v_prediction"),
        "default_denoising_steps": lambda: 2,
        "default_processing_resolution": lambda: 0,
        **{key: lambda value=value: value for key, value in values.items()},
    }
    return c.image_case(name, "estimate", parts, image, params={"processing_resolution": 0}, has_prompt=False)


# --- Paint by Example, and old Stable Diffusion ---------------------------------------------------------------------


def _example_encoder() -> Any:
    encoder_class = c.part_of("paint_by_example", "PaintByExampleImageEncoder")
    return c.awaken(encoder_class(c.clip_vision().config, proj_size=32)).eval()


EXAMPLE = {
    "vae": c.vae,
    "image_encoder": _example_encoder,
    "unet": lambda: c.unet(channels=9),
    "scheduler": ddim,
    "feature_extractor": c.clip_image_processor,
}


def _roberta_series() -> Any:
    config_class = c.part_of("alt_diffusion.modeling_roberta_series", "RobertaSeriesConfig")
    model_class = c.part_of("alt_diffusion.modeling_roberta_series", "RobertaSeriesModelWithTransformation")
    config = config_class(
        vocab_size=c.VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        project_dim=32,
        max_position_embeddings=96,
        initializer_range=0.2,
        pad_token_id=1,
    )
    return model_class(config).eval()


ALT = {**PARTS, "text_encoder": _roberta_series, "tokenizer": c.xlm_roberta_tokenizer}


# --- UniDiffuser ----------------------------------------------------------------------------------------------------


def _unidiffuser() -> Any:
    return c.part_of("unidiffuser", "UniDiffuserModel")(
        text_dim=32,
        clip_img_dim=32,
        num_text_tokens=77,
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=16,
        patch_size=2,
        activation_fn="gelu",
        num_embeds_ada_norm=1000,
        norm_type="layer_norm",
        block_type="unidiffuser",
        ff_final_dropout=False,
    ).eval()


def _text_decoder() -> Any:
    return c.part_of("unidiffuser", "UniDiffuserTextDecoder")(
        prefix_length=77,
        prefix_inner_dim=32,
        prefix_hidden_dim=32,
        vocab_size=c.VOCAB,
        n_positions=128,
        n_embd=32,
        n_layer=1,
        n_head=2,
        activation_function="gelu",
    ).eval()


UNIDIFFUSER = {
    "vae": c.vae,
    "text_encoder": c.clip_text,
    "image_encoder": c.clip_vision,
    "clip_image_processor": c.clip_image_processor,
    "clip_tokenizer": c.clip_tokenizer,
    "text_decoder": _text_decoder,
    "text_tokenizer": c.qwen_tokenizer,
    "unet": _unidiffuser,
    "scheduler": lambda: diffusers.DPMSolverMultistepScheduler(**BETAS, solver_order=3),
}


# --- VQ Diffusion ---------------------------------------------------------------------------------------------------


def _vq_transformer() -> Any:
    return diffusers.Transformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_vector_embeds=17,  # 16 and the mask
        num_embeds_ada_norm=16,
        sample_size=16,
        cross_attention_dim=32,
        norm_type="ada_norm",
        activation_fn="geglu-approximate",
        attention_bias=True,
    ).eval()


def _free_embeddings() -> Any:
    return c.part_of("vq_diffusion", "LearnedClassifierFreeSamplingEmbeddings")(learnable=False)


def _vq_vae() -> Any:
    return diffusers.VQModel(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        num_vq_embeddings=16,
        vq_embed_dim=4,
    ).eval()


VQ = {
    "vqvae": _vq_vae,
    "text_encoder": c.clip_text,
    "tokenizer": c.clip_tokenizer,
    "transformer": _vq_transformer,
    "scheduler": lambda: diffusers.VQDiffusionScheduler(num_vec_classes=17, num_train_timesteps=16),
    "learned_classifier_free_sampling_embeddings": _free_embeddings,
}


# Versatile Diffusion, as far as it needs no UNet for text.
VERSATILE = {
    **PARTS,
    "image_feature_extractor": c.clip_image_processor,
    "image_unet": c.unet,
}


def _example(i: int) -> dict[str, Any]:
    return {"example_image": c.picture(i + 20, 32)}


def _case(name: str, kind: str, parts: Any, *inputs: Any, prompt: bool = True, **params: Any) -> Case:
    return c.image_case(name, kind, parts, *inputs, params=params, guidance_scale=MIXED, has_prompt=prompt)


CASES = [
    _marigold("MarigoldDepthPipeline", prediction_type="depth", scale_invariant=True, shift_invariant=True),
    _marigold("MarigoldNormalsPipeline", prediction_type="normals", use_full_z_range=True),
    _marigold(
        "MarigoldIntrinsicsPipeline",
        2,
        prediction_type="intrinsics",
        target_properties={"target_names": ["albedo", "material"]},
    ),
    _case("PaintByExamplePipeline", "inpaint", EXAMPLE, inpaint, _example, prompt=False, **SQUARE),
    _case("StableDiffusionInpaintPipelineLegacy", "inpaint", PARTS, inpaint, strength=0.8),
    _case("AltDiffusionPipeline", "text", ALT, **SQUARE),
    _case("AltDiffusionImg2ImgPipeline", "image-to-image", ALT, image),
    _case("VersatileDiffusionImageVariationPipeline", "image-to-image", VERSATILE, image, prompt=False, **SQUARE),
    _case("UniDiffuserPipeline", "text", UNIDIFFUSER, **SQUARE),
    _case("VQDiffusionPipeline", "text", VQ),
]
