"""Wan: text, picture, video, controls and animation to video."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from . import Case
from . import components as parts
from .components_video import clip, lively, mask_clip, offline_ftfy, umt5

FRAMES = 9
PARAMS = {"height": 16, "width": 16, "num_frames": FRAMES, "max_sequence_length": 16}
GUIDANCE = (None, None, 1.0, None)
IMAGE_DIM = 8
BLOCKS = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "out_channels": 16,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 32,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 32,
}


def wan_vae() -> AutoencoderKLWan:
    """Return the autoencoder of Wan 2.1: 8× in space, 4× in time."""
    return lively(
        AutoencoderKLWan(
            base_dim=3,
            z_dim=16,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        )
    )


def transformer(kind: str = "WanTransformer3DModel", in_channels: int = 16, **config: Any) -> Any:
    """Return a denoiser of the Wan line."""
    config = {"num_layers": 2, **BLOCKS, **config}
    return lively(getattr(diffusers, kind)(in_channels=in_channels, **config))


def flow_unipc() -> UniPCMultistepScheduler:
    """Return the multistep scheduler that Wan ships with."""
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def _text(**more: Any) -> dict[str, Any]:
    return umt5(**{"vae": wan_vae(), "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0), **more})


def vision() -> dict[str, Any]:
    """Return an image encoder with its processor."""
    return {"image_encoder": parts.clip_vision(IMAGE_DIM, size=16), "image_processor": parts.clip_image_processor(16)}


def _two_experts() -> Any:
    return diffusers.WanPipeline(
        **_text(scheduler=flow_unipc()),
        transformer=transformer(),
        transformer_2=transformer(),
        boundary_ratio=0.9,
    )


def _one_expert() -> Any:
    return offline_ftfy(diffusers.WanPipeline)(**_text(), transformer=transformer())


def _expanded_timesteps() -> Any:
    vae = AutoencoderKLWan(
        base_dim=3,
        z_dim=48,
        in_channels=12,
        out_channels=12,
        is_residual=True,
        patch_size=2,
        latents_mean=[0.0] * 48,
        latents_std=[1.0] * 48,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        scale_factor_spatial=16,
        temperal_downsample=[False, True, True],
    )
    return offline_ftfy(diffusers.WanPipeline)(
        **_text(scheduler=flow_unipc(), vae=lively(vae)),
        transformer=transformer(in_channels=48, out_channels=48),
        expand_timesteps=True,
    )


def _image_to_video() -> Any:
    return offline_ftfy(diffusers.WanImageToVideoPipeline)(
        **_text(), **vision(), transformer=transformer(in_channels=36, image_dim=IMAGE_DIM)
    )


def _video_to_video() -> Any:
    return offline_ftfy(diffusers.WanVideoToVideoPipeline)(**_text(scheduler=flow_unipc()), transformer=transformer())


def _vace() -> Any:
    denoiser = transformer("WanVACETransformer3DModel", num_layers=3, vace_layers=[0, 2], vace_in_channels=96)
    return offline_ftfy(diffusers.WanVACEPipeline)(**_text(), transformer=denoiser)


def _animate() -> Any:
    denoiser = transformer(
        "WanAnimateTransformer3DModel",
        in_channels=36,
        latent_channels=16,
        image_dim=IMAGE_DIM,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=8,
        face_encoder_hidden_dim=8,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )
    return offline_ftfy(diffusers.WanAnimatePipeline)(**_text(), **vision(), transformer=denoiser)


_case = partial(Case, modality="video", params=PARAMS, guidance_scale=GUIDANCE)

CASES = [
    _case(pipeline="WanPipeline", kind="text", build=_two_experts),
    _case(
        pipeline="WanImageToVideoPipeline",
        kind="image-to-video",
        build=_image_to_video,
        inputs=lambda i: {"image": parts.picture(i, 16)},
    ),
    _case(
        pipeline="WanVideoToVideoPipeline",
        kind="video-to-video",
        build=_video_to_video,
        params={key: PARAMS[key] for key in ("height", "width", "max_sequence_length")},
        inputs=lambda i: {"video": clip(i, FRAMES)},
    ),
    _case(
        pipeline="WanVACEPipeline",
        kind="controlnet",
        build=_vace,
        inputs=lambda i: {"video": clip(i, FRAMES), "mask": mask_clip(i, FRAMES)},
    ),
    _case(
        pipeline="WanAnimatePipeline",
        kind="animate",
        build=_animate,
        params={"height": 16, "width": 16, "max_sequence_length": 16, "segment_frame_length": FRAMES},
        inputs=lambda i: {
            "image": parts.picture(i, 16),
            "pose_video": clip(i, FRAMES),
            "face_video": clip(i, FRAMES, salt=1),
        },
        guidance_scale=(None, 3.0, 1.0, 3.0),
    ),
]

# Further settings of classes above: `CASES` has each class once.
VARIANTS = [
    _case(pipeline="WanPipeline", kind="text", build=_expanded_timesteps, params={**PARAMS, "height": 32, "width": 32}),
    _case(pipeline="WanPipeline", kind="text", build=_one_expert),
]
