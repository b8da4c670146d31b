"""Video models that stand alone: Mochi, Allegro, Latte, EasyAnimate."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

from . import Case
from . import components as parts
from .components_video import clip, frames_tensor, lively, mask_clip, negative, t5

SIZE = 16
FRAMES = 5
TEXT = 32
LATENT = 4
PARAMS = {"height": SIZE, "width": SIZE, "num_frames": FRAMES}
GUIDANCE = (None, None, 1.0, None)


def _mochi() -> Any:
    transformer = diffusers.MochiTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=12,
        text_embed_dim=TEXT,
        time_embed_dim=8,
        max_sequence_length=16,
    )
    vae = diffusers.AutoencoderKLMochi(
        encoder_block_out_channels=(32,) * 4,
        decoder_block_out_channels=(32,) * 4,
        layers_per_block=(1,) * 5,
    )
    scheduler = FlowMatchEulerDiscreteScheduler()
    return diffusers.MochiPipeline(**t5(TEXT), transformer=lively(transformer), vae=lively(vae), scheduler=scheduler)


def _allegro() -> Any:
    transformer = diffusers.AllegroTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=LATENT,
        out_channels=LATENT,
        num_layers=2,
        cross_attention_dim=24,
        sample_width=4,
        sample_height=4,
        sample_frames=8,
        caption_channels=TEXT,
    )
    vae = diffusers.AutoencoderKLAllegro(
        down_block_types=("AllegroDownBlock3D",) * 4,
        up_block_types=("AllegroUpBlock3D",) * 4,
        block_out_channels=(8,) * 4,
        latent_channels=LATENT,
        layers_per_block=1,
        norm_num_groups=2,
    )
    vae.enable_tiling()  # it does not work without, and gives zeros for what is smaller than a tile
    vae.kernel, vae.stride = (8, 32, 32), (4, 16, 16)
    return diffusers.AllegroPipeline(
        **t5(TEXT), transformer=lively(transformer), vae=lively(vae), scheduler=DDIMScheduler()
    )


def _latte() -> Any:
    transformer = diffusers.LatteTransformer3DModel(
        sample_size=SIZE // 2,
        video_length=FRAMES,
        num_layers=1,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=TEXT,
        in_channels=LATENT,
        cross_attention_dim=16,
        out_channels=2 * LATENT,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
    )
    return diffusers.LattePipeline(
        **t5(TEXT), transformer=lively(transformer), vae=lively(parts.vae()), scheduler=DDIMScheduler()
    )


def _easy_animate(name: str, in_channels: int = LATENT, **config: Any) -> Any:
    transformer = diffusers.EasyAnimateTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=in_channels,
        out_channels=LATENT,
        time_embed_dim=8,
        text_embed_dim=TEXT,
        num_layers=2,
        mmdit_layers=2,
        sample_width=SIZE,
        sample_height=SIZE,
        patch_size=2,
        **config,
    )
    vae = diffusers.AutoencoderKLMagvit(
        down_block_types=("SpatialDownBlock3D", *("SpatialTemporalDownBlock3D",) * 3),
        up_block_types=("SpatialUpBlock3D", *("SpatialTemporalUpBlock3D",) * 3),
        block_out_channels=(8,) * 4,
        latent_channels=LATENT,
        layers_per_block=1,
        norm_num_groups=2,
        spatial_group_norm=False,
    )
    return getattr(diffusers, name)(
        tokenizer=parts.qwen_tokenizer(),
        text_encoder=parts.qwen_vl("Qwen2VLForConditionalGeneration", TEXT),
        transformer=lively(transformer),
        vae=lively(vae),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


_case = partial(Case, modality="video", params=PARAMS, guidance_scale=GUIDANCE)

CASES = [
    _case(
        pipeline="MochiPipeline",
        kind="text",
        build=_mochi,
        params={"height": 32, "width": 32, "num_frames": 7, "max_sequence_length": 16},
    ),
    _case(
        pipeline="AllegroPipeline",
        kind="text",
        build=_allegro,
        params={"height": 32, "width": 32, "num_frames": 8, "max_sequence_length": 16, "clean_caption": False},
    ),
    _case(
        pipeline="LattePipeline",
        kind="text",
        build=_latte,
        params={"height": SIZE, "width": SIZE, "video_length": FRAMES, "clean_caption": False},
    ),
    _case(
        pipeline="EasyAnimatePipeline",
        kind="text",
        build=partial(_easy_animate, "EasyAnimatePipeline"),
        inputs=negative,
    ),
    _case(
        pipeline="EasyAnimateInpaintPipeline",
        kind="inpaint",
        # The other way to bring the mask to the latents' size is broken in diffusers 0.42.1.
        build=partial(_easy_animate, "EasyAnimateInpaintPipeline", 3 * LATENT, resize_inpaint_mask_directly=False),
        inputs=lambda i: {
            **negative(i),
            "video": frames_tensor(clip(i, FRAMES, SIZE)),
            "mask_video": frames_tensor(mask_clip(i, FRAMES, SIZE)),
        },
    ),
]
