"""SkyReels-V2: Wan's denoiser, also with one noise level for each frame (diffusion forcing)."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
from diffusers import UniPCMultistepScheduler

from . import Case
from . import components as parts
from .components_video import clip, offline_ftfy, umt5
from .wan import FRAMES, GUIDANCE, IMAGE_DIM, PARAMS, transformer, vision, wan_vae


def _build(name: str, more: Any = dict, **config: Any) -> Any:
    components = umt5(
        vae=wan_vae(),
        scheduler=UniPCMultistepScheduler(flow_shift=8.0, use_flow_sigmas=True, prediction_type="flow_prediction"),
        transformer=transformer("SkyReelsV2Transformer3DModel", **config),
    )
    return offline_ftfy(getattr(diffusers, name))(**components, **more())


_case = partial(Case, modality="video", params=PARAMS, guidance_scale=GUIDANCE)
_forcing = {**PARAMS, "base_num_frames": FRAMES}

CASES = [
    _case(pipeline="SkyReelsV2Pipeline", kind="text", build=partial(_build, "SkyReelsV2Pipeline")),
    _case(
        pipeline="SkyReelsV2ImageToVideoPipeline",
        kind="image-to-video",
        build=partial(_build, "SkyReelsV2ImageToVideoPipeline", vision, in_channels=36, image_dim=IMAGE_DIM),
        inputs=lambda i: {"image": parts.picture(i, 16)},
    ),
    _case(
        pipeline="SkyReelsV2DiffusionForcingPipeline",
        kind="text",
        build=partial(_build, "SkyReelsV2DiffusionForcingPipeline"),
        params=_forcing,
    ),
    _case(
        pipeline="SkyReelsV2DiffusionForcingImageToVideoPipeline",
        kind="image-to-video",
        build=partial(_build, "SkyReelsV2DiffusionForcingImageToVideoPipeline"),
        params=_forcing,
        inputs=lambda i: {"image": parts.picture(i, 16)},
    ),
    _case(
        pipeline="SkyReelsV2DiffusionForcingVideoToVideoPipeline",
        kind="video-to-video",
        build=partial(_build, "SkyReelsV2DiffusionForcingVideoToVideoPipeline"),
        params={**PARAMS, "num_frames": 17, "base_num_frames": 9, "overlap_history": 5},
        inputs=lambda i: {"video": clip(i, 9)},
    ),
]
