"""AnimateDiff and what grew from it: a motion adapter in a Stable Diffusion UNet."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
from diffusers import DDIMScheduler

from . import Case
from . import components as parts
from .components_video import clip, lively

SIZE = 16
FRAMES = 5
TEXT = 32
CHANNELS = (16, 32)
PARAMS = {"height": SIZE, "width": SIZE, "num_frames": FRAMES}
GUIDANCE = (None, None, 1.0, None)
UNET = parts.unet_values(TEXT)


def motion_adapter(**config: Any) -> Any:
    """Return the motion modules for the UNet of `components`."""
    return lively(
        diffusers.MotionAdapter(
            block_out_channels=CHANNELS,
            motion_layers_per_block=1,
            motion_num_attention_heads=2,
            motion_norm_num_groups=8,
            motion_max_seq_length=16,
            **config,
        )
    )


def ddim() -> DDIMScheduler:
    """Return the scheduler that motion adapters are used with."""
    return DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="linear", clip_sample=False)


def text_and_vae() -> dict[str, Any]:
    """Return the parts that Stable Diffusion 1 has besides the UNet."""
    return {
        "text_encoder": parts.clip_text(TEXT),
        "tokenizer": parts.clip_tokenizer(),
        "vae": lively(parts.vae()),
        "scheduler": ddim(),
    }


def _build(name: str, **more: Any) -> Any:
    made = {key: make() for key, make in more.items()}
    components = {"unet": lively(parts.unet(TEXT)), "motion_adapter": motion_adapter()}
    return getattr(diffusers, name)(**text_and_vae() | components | made)


def _xl() -> Any:
    unet = parts.unet(
        2 * TEXT,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + TEXT,
        transformer_layers_per_block=(1, 1),
        use_linear_projection=True,
    )
    components = {
        "unet": lively(unet),
        "motion_adapter": motion_adapter(use_motion_mid_block=False),
        "text_encoder_2": parts.clip_text_projected(TEXT),
        "tokenizer_2": parts.clip_tokenizer(),
    }
    return diffusers.AnimateDiffSDXLPipeline(**text_and_vae() | components)


def _sparse_control() -> Any:
    control = {key: value for key, value in UNET.items() if key not in ("down_block_types", "attention_head_dim")}
    return parts.awaken(
        diffusers.SparseControlNetModel(
            **control,
            attention_head_dim=2,
            down_block_types=("DownBlockMotion", "CrossAttnDownBlockMotion"),
            conditioning_channels=4,
            motion_num_attention_heads=2,
            use_simplified_condition_embedding=True,
        )
    ).eval()


def _pia_adapter() -> Any:
    return motion_adapter(conv_in_channels=9)


def _controls(index: int) -> dict[str, Any]:
    return {"conditioning_frames": clip(index, FRAMES, SIZE, salt=1)}


_case = partial(Case, modality="video", params=PARAMS, guidance_scale=GUIDANCE)

CASES = [
    _case(pipeline="AnimateDiffPipeline", kind="text", build=partial(_build, "AnimateDiffPipeline")),
    _case(pipeline="AnimateDiffSDXLPipeline", kind="text", build=_xl),
    _case(pipeline="AnimateDiffPAGPipeline", kind="text", build=partial(_build, "AnimateDiffPAGPipeline")),
    _case(
        pipeline="AnimateDiffControlNetPipeline",
        kind="controlnet",
        build=partial(_build, "AnimateDiffControlNetPipeline", controlnet=partial(parts.controlnet, TEXT)),
        inputs=_controls,
    ),
    _case(
        pipeline="AnimateDiffSparseControlNetPipeline",
        kind="controlnet",
        build=partial(_build, "AnimateDiffSparseControlNetPipeline", controlnet=_sparse_control),
        params={**PARAMS, "controlnet_frame_indices": [0, 2]},
        inputs=lambda i: {"conditioning_frames": clip(i, 2, SIZE)},
    ),
    _case(
        pipeline="AnimateDiffVideoToVideoPipeline",
        kind="video-to-video",
        build=partial(_build, "AnimateDiffVideoToVideoPipeline"),
        params={"height": SIZE, "width": SIZE, "strength": 0.8},
        inputs=lambda i: {"video": clip(i, FRAMES, SIZE)},
    ),
    _case(
        pipeline="AnimateDiffVideoToVideoControlNetPipeline",
        kind="controlnet",
        build=partial(_build, "AnimateDiffVideoToVideoControlNetPipeline", controlnet=partial(parts.controlnet, TEXT)),
        params={"height": SIZE, "width": SIZE, "strength": 0.8},
        inputs=lambda i: {"video": clip(i, FRAMES, SIZE), **_controls(i)},
    ),
    _case(
        pipeline="PIAPipeline",
        kind="image-to-video",
        build=partial(_build, "PIAPipeline", motion_adapter=_pia_adapter),
        inputs=lambda i: {"image": parts.picture(i, SIZE)},
    ),
]
