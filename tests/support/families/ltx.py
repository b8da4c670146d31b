"""LTX Video: from text, pictures, conditions and latents."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
from diffusers import FlowMatchEulerDiscreteScheduler

from . import Case
from . import components as parts
from .components_video import clip, lively, t5

SIZE = 32
FRAMES = 9
LATENT = 8
PARAMS = {"height": SIZE, "width": SIZE, "num_frames": FRAMES, "max_sequence_length": 16}
GUIDANCE = (None, None, 1.0, None)


def ltx_vae(patch_size: int = 1) -> Any:
    """Return the autoencoder: 4× in time, and 4 × `patch_size` in space."""
    ones = (1, 1, 1, 1, 1)
    scaling = (True, True, False, False)
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=LATENT,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=ones,
        decoder_layers_per_block=ones,
        spatio_temporal_scaling=scaling,
        decoder_spatio_temporal_scaling=scaling,
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1, 1, 1, 1),
        patch_size=patch_size,
    )
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    return lively(vae)


def _ltx(name: str, **scheduling: Any) -> Any:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=LATENT,
        out_channels=LATENT,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=2,
        caption_channels=32,
    )
    scheduler = scheduling.get("scheduler") or FlowMatchEulerDiscreteScheduler()
    components = t5(transformer=lively(transformer), vae=ltx_vae(), scheduler=scheduler)
    return getattr(diffusers, name)(**components)


def _long() -> Any:
    return _ltx("LTXI2VLongMultiPromptPipeline", scheduler=diffusers.LTXEulerAncestralRFScheduler())


def _latent_upsample() -> Any:
    upsampler = diffusers.pipelines.ltx.LTXLatentUpsamplerModel(
        in_channels=LATENT, mid_channels=32, num_blocks_per_stage=1
    )
    return diffusers.LTXLatentUpsamplePipeline(vae=ltx_vae(), latent_upsampler=lively(upsampler))


_case = partial(Case, modality="video", params=PARAMS, guidance_scale=GUIDANCE)

CASES = [
    _case(pipeline="LTXPipeline", kind="text", build=partial(_ltx, "LTXPipeline")),
    _case(
        pipeline="LTXImageToVideoPipeline",
        kind="image-to-video",
        build=partial(_ltx, "LTXImageToVideoPipeline"),
        inputs=lambda i: {"image": parts.picture(i, SIZE)},
    ),
    _case(
        pipeline="LTXConditionPipeline",
        kind="image-to-video",
        build=partial(_ltx, "LTXConditionPipeline"),
        inputs=lambda i: {"image": parts.picture(i, SIZE)},
    ),
    _case(
        pipeline="LTXI2VLongMultiPromptPipeline",
        kind="image-to-video",
        build=_long,
        params={**PARAMS, "seed": None, "decode_horizontal_tiles": 1, "decode_vertical_tiles": 1},
        inputs=lambda i: {"cond_image": parts.picture(i, SIZE)},
        guidance_scale=(None, 3.0, 1.0, 3.0),
    ),
    Case(
        pipeline="LTXLatentUpsamplePipeline",
        modality="video",
        kind="upscale",
        build=_latent_upsample,
        params={"height": SIZE, "width": SIZE},
        inputs=lambda i: {"video": clip(i, 5, SIZE)},
        has_prompt=False,
    ),
]
