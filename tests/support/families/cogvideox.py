"""CogVideoX and ConsisID: text, picture, video and controls to video."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler
from diffusers.pipelines.consisid import pipeline_consisid as consisid

from . import Case
from . import components as parts
from .components_video import clip, lively, t5

SIZE = 32
FRAMES = 9
TOKENS = 16
LATENT = 4
PARAMS = {"height": SIZE, "width": SIZE, "max_sequence_length": TOKENS}
GUIDANCE = (None, None, 1.0, None)
# What CogVideoX and its descendants build their denoiser from.
BLOCKS = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "out_channels": LATENT,
    "time_embed_dim": 8,
    "text_embed_dim": 32,
    "num_layers": 2,
    "sample_width": SIZE // 8,
    "sample_height": SIZE // 8,
    "sample_frames": FRAMES,
    "patch_size": 2,
    "max_text_seq_length": TOKENS,
}


def cog_vae() -> Any:
    """Return the autoencoder: 8× in space, 4× in time."""
    return lively(
        diffusers.AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=LATENT,
            layers_per_block=1,
            norm_num_groups=2,
        )
    )


def _build(name: str, scheduler: Any = CogVideoXDDIMScheduler, in_channels: int = LATENT, **config: Any) -> Any:
    transformer = diffusers.CogVideoXTransformer3DModel(in_channels=in_channels, **BLOCKS, **config)
    components = t5(transformer=lively(transformer), vae=cog_vae(), scheduler=scheduler())
    return getattr(diffusers, name)(**components)


def _consisid() -> Any:
    face = {"LFE_id_dim": 8, "LFE_vit_dim": 8, "LFE_depth": 5, "LFE_dim_head": 8, "LFE_num_heads": 2}
    face |= {"LFE_num_id_token": 1, "LFE_num_querie": 1, "LFE_output_dim": 21, "LFE_ff_mult": 1, "LFE_num_scale": 1}
    transformer = diffusers.ConsisIDTransformer3DModel(
        in_channels=2 * LATENT,
        **BLOCKS,
        **_rotary,
        **face,
        is_train_face=True,
        cross_attn_interval=1,
        cross_attn_dim_head=8,
        cross_attn_num_heads=2,
    )
    # `diffusers` shows this class only where opencv is, which but its preparation of faces needs.
    return consisid.ConsisIDPipeline(
        **t5(transformer=lively(transformer), vae=cog_vae(), scheduler=CogVideoXDDIMScheduler())
    )


_rotary = {"use_rotary_positional_embeddings": True, "use_learned_positional_embeddings": True}
_case = partial(Case, modality="video", guidance_scale=GUIDANCE)

CASES = [
    _case(
        pipeline="CogVideoXPipeline",
        kind="text",
        build=partial(_build, "CogVideoXPipeline", CogVideoXDPMScheduler),
        params={**PARAMS, "num_frames": FRAMES},
    ),
    _case(
        pipeline="CogVideoXImageToVideoPipeline",
        kind="image-to-video",
        build=partial(_build, "CogVideoXImageToVideoPipeline", in_channels=2 * LATENT, **_rotary),
        params={**PARAMS, "num_frames": FRAMES},
        inputs=lambda i: {"image": parts.picture(i, SIZE)},
    ),
    _case(
        pipeline="CogVideoXVideoToVideoPipeline",
        kind="video-to-video",
        build=partial(_build, "CogVideoXVideoToVideoPipeline"),
        params={**PARAMS, "strength": 0.8},
        inputs=lambda i: {"video": clip(i, FRAMES, SIZE)},
    ),
    _case(
        pipeline="CogVideoXFunControlPipeline",
        kind="controlnet",
        build=partial(_build, "CogVideoXFunControlPipeline", in_channels=2 * LATENT),
        params=PARAMS,
        inputs=lambda i: {"control_video": clip(i, FRAMES, SIZE)},
    ),
    _case(
        pipeline="ConsisIDPipeline",
        kind="image-to-video",
        build=_consisid,
        params={**PARAMS, "num_frames": FRAMES},
        inputs=lambda i: {
            "image": parts.picture(i, SIZE),
            "id_vit_hidden": [parts.noise(i, 1, 2, 8)],
            "id_cond": parts.noise(i + 10, 1, 8),
        },
    ),
]
