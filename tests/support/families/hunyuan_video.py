"""HunyuanVideo and 1.5, with SkyReels and FramePack: text and picture to video."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
from diffusers import FlowMatchEulerDiscreteScheduler

from . import Case
from . import components as parts
from .components_video import lively, llava, negative

SIZE = 16
FRAMES = 9
TEXT, POOLED, LATENT = 16, 8, 4
TEMPLATE = {"template": "{}", "crop_start": 0}
PARAMS = {"height": SIZE, "width": SIZE, "num_frames": FRAMES, "max_sequence_length": 16, "prompt_template": TEMPLATE}
GUIDED = {"true_cfg_scale": 3.0}


def hunyuan_vae(latent: int = LATENT, blocks: int = 4) -> Any:
    """Return the autoencoder: 8× in space, 4× in time."""
    return lively(
        diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=latent,
            down_block_types=("HunyuanVideoDownBlock3D",) * blocks,
            up_block_types=("HunyuanVideoUpBlock3D",) * blocks,
            block_out_channels=(8,) * blocks,
            layers_per_block=1,
            norm_num_groups=4,
        )
    )


def _build(
    name: str,
    *,
    transformer: str = "HunyuanVideoTransformer3DModel",
    in_channels: int = LATENT,
    more: Any = dict,
    **config: Any,
) -> Any:
    settings = {
        "in_channels": in_channels,
        "out_channels": LATENT,
        "num_attention_heads": 2,
        "attention_head_dim": 10,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "patch_size": 1,
        "text_embed_dim": TEXT,
        "pooled_projection_dim": POOLED,
        "rope_axes_dim": (2, 4, 4),
    }
    components = {
        "text_encoder": parts.language_model("LlamaModel", TEXT, layers=3),
        "tokenizer": parts.llama_tokenizer(),
        "text_encoder_2": parts.clip_text(POOLED),
        "tokenizer_2": parts.clip_tokenizer(),
        "transformer": lively(getattr(diffusers, transformer)(**settings | config)),
        "vae": hunyuan_vae(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0),
    }
    return getattr(diffusers, name)(**components | more())


def _image_encoder() -> dict[str, Any]:
    return {"feature_extractor": parts.siglip_image_processor(), "image_encoder": parts.siglip_vision(8)}


def _llava() -> dict[str, Any]:
    return {"text_encoder": llava(TEXT), "image_processor": parts.clip_image_processor()}


def _v15(name: str, task: str, more: Any = dict) -> Any:
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=2 * LATENT + 1,
        out_channels=LATENT,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=1,
        text_embed_dim=TEXT,
        text_embed_2_dim=32,
        image_embed_dim=8,
        rope_axes_dim=(2, 2, 4),
        target_size=SIZE,
        task_type=task,
    )
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=LATENT,
        block_out_channels=(16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
        downsample_match_channel=False,
        upsample_match_channel=False,
    )
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    components = {
        "text_encoder": parts.language_model("Qwen2_5_VLTextModel", TEXT, layers=3, rope_parameters=rope),
        "tokenizer": parts.qwen_tokenizer(),
        "text_encoder_2": parts.t5_encoder(32),
        "tokenizer_2": parts.byt5_tokenizer(),
        "transformer": lively(transformer),
        "vae": lively(vae),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=3.0),
    }
    pipeline = getattr(diffusers, name)(**components | more())
    # Its instruction would be hundreds of our tokens, which are bytes.
    pipeline.system_message, pipeline.prompt_template_encode_start_idx = "Describe the video.", 32
    pipeline.tokenizer_max_length, pipeline.tokenizer_2_max_length = 64, 32
    pipeline.vision_num_semantic_tokens = 16
    return pipeline


_case = partial(Case, modality="video", params=PARAMS)

CASES = [
    _case(
        pipeline="HunyuanVideoPipeline",
        kind="text",
        build=partial(_build, "HunyuanVideoPipeline", guidance_embeds=True),
        params={**PARAMS, **GUIDED},
        inputs=negative,
        guidance_scale=(None, 3.0, 1.0, None),
    ),
    _case(
        pipeline="HunyuanVideoImageToVideoPipeline",
        kind="image-to-video",
        build=partial(
            _build,
            "HunyuanVideoImageToVideoPipeline",
            in_channels=2 * LATENT + 1,
            more=_llava,
            image_condition_type="latent_concat",
        ),
        params={
            **PARAMS,
            **GUIDED,
            "max_sequence_length": 32,
            "prompt_template": {**TEMPLATE, "image_emb_len": 16, "image_emb_start": 5, "image_emb_end": 21},
        },
        inputs=lambda i: {"image": parts.picture(i, SIZE), **negative(i)},
    ),
    _case(
        pipeline="HunyuanSkyreelsImageToVideoPipeline",
        kind="image-to-video",
        build=partial(_build, "HunyuanSkyreelsImageToVideoPipeline", in_channels=2 * LATENT, guidance_embeds=True),
        inputs=lambda i: {"image": parts.picture(i, SIZE)},
        guidance_scale=(None, None, 1.0, None),
    ),
    _case(
        pipeline="HunyuanVideoFramepackPipeline",
        kind="image-to-video",
        build=partial(
            _build,
            "HunyuanVideoFramepackPipeline",
            transformer="HunyuanVideoFramepackTransformer3DModel",
            more=_image_encoder,
            patch_size=2,
            guidance_embeds=True,
            has_image_proj=True,
            image_proj_dim=8,
            has_clean_x_embedder=True,
        ),
        params={**PARAMS, **GUIDED, "height": 32, "width": 32, "latent_window_size": 3},
        inputs=lambda i: {"image": parts.picture(i, 32), **negative(i)},
    ),
    _case(
        pipeline="HunyuanVideo15Pipeline",
        kind="text",
        build=partial(_v15, "HunyuanVideo15Pipeline", "t2v"),
        params={"height": SIZE, "width": SIZE, "num_frames": FRAMES},
    ),
    _case(
        pipeline="HunyuanVideo15ImageToVideoPipeline",
        kind="image-to-video",
        build=partial(_v15, "HunyuanVideo15ImageToVideoPipeline", "i2v", _image_encoder),
        params={"num_frames": FRAMES},
        inputs=lambda i: {"image": parts.picture(i, SIZE)},
    ),
]
