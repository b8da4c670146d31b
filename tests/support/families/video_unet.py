"""Video from UNets: Stable Video Diffusion, I2VGen-XL, ModelScope's text to video, and Text2Video-Zero."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers

from . import Case
from . import components as parts
from .animatediff import ddim, text_and_vae
from .components_video import clip, lively

SIZE = 16
FRAMES = 5
TEXT = 32
PARAMS = {"height": SIZE, "width": SIZE, "num_frames": FRAMES}
GUIDANCE = (None, None, 1.0, None)
LEVELS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8, "cross_attention_dim": TEXT}


def _stable_video() -> Any:
    unet = diffusers.UNetSpatioTemporalConditionModel(
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=TEXT,
        num_attention_heads=2,
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=3 * 8,
    )
    vae = diffusers.AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        layers_per_block=1,
    )
    scheduler = diffusers.EulerDiscreteScheduler(
        prediction_type="v_prediction",
        sigma_min=0.002,
        sigma_max=700.0,
        timestep_spacing="leading",
        timestep_type="continuous",
        use_karras_sigmas=True,
    )
    return diffusers.StableVideoDiffusionPipeline(
        vae=lively(vae),
        image_encoder=parts.clip_vision(TEXT, projection=TEXT, size=224),  # the pipeline resizes to this
        unet=lively(unet),
        scheduler=scheduler,
        feature_extractor=parts.clip_image_processor(),
    )


def _i2vgen() -> Any:
    unet = diffusers.models.unets.I2VGenXLUNet(
        **LEVELS,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        attention_head_dim=8,
    )
    return diffusers.I2VGenXLPipeline(
        **text_and_vae(),
        unet=lively(unet, 1.2),
        image_encoder=parts.clip_vision(TEXT, projection=TEXT),
        feature_extractor=parts.clip_image_processor(),
    )


def _modelscope(name: str) -> Any:
    unet = diffusers.UNet3DConditionModel(
        **LEVELS,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        attention_head_dim=8,
    )
    return getattr(diffusers, name)(**text_and_vae(), unet=lively(unet))


def _zero() -> Any:
    return diffusers.TextToVideoZeroPipeline(
        **text_and_vae(),
        unet=lively(parts.unet(TEXT)),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _zero_xl() -> Any:
    unet = parts.unet(
        2 * TEXT,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + TEXT,
        use_linear_projection=True,
    )
    return diffusers.TextToVideoZeroSDXLPipeline(
        **text_and_vae() | {"scheduler": ddim()},
        text_encoder_2=parts.clip_text_projected(TEXT),
        tokenizer_2=parts.clip_tokenizer(),
        unet=lively(unet),
    )


_case = partial(Case, modality="video", params=PARAMS, guidance_scale=GUIDANCE)
# The noise goes back from step t1 from the end to step t0 from the end, to move it between frames.
_zero_params = {"height": SIZE, "width": SIZE, "video_length": FRAMES, "t0": 0, "t1": 1}

CASES = [
    Case(
        pipeline="StableVideoDiffusionPipeline",
        modality="video",
        kind="image-to-video",
        build=_stable_video,
        params=PARAMS,
        inputs=lambda i: {"image": parts.picture(i, SIZE)},
        has_prompt=False,
    ),
    _case(
        pipeline="I2VGenXLPipeline",
        kind="image-to-video",
        build=_i2vgen,
        params={**PARAMS, "target_fps": 8, "clip_skip": None},  # its default reads what transformers 5 renamed
        inputs=lambda i: {"image": parts.picture(i, SIZE)},
    ),
    _case(pipeline="TextToVideoSDPipeline", kind="text", build=partial(_modelscope, "TextToVideoSDPipeline")),
    _case(
        pipeline="VideoToVideoSDPipeline",
        kind="video-to-video",
        build=partial(_modelscope, "VideoToVideoSDPipeline"),
        params={"strength": 0.8},
        inputs=lambda i: {"video": clip(i, FRAMES, SIZE)},
    ),
    _case(
        pipeline="TextToVideoZeroPipeline",
        kind="text",
        build=_zero,
        params=_zero_params,
        steps=(3, 4, 5, 4),
        guidance_scale=(None, 3.0, None, 3.0),
    ),
    _case(
        pipeline="TextToVideoZeroSDXLPipeline",
        kind="text",
        build=_zero_xl,
        params=_zero_params,
        steps=(3, 4, 5, 4),
        guidance_scale=(None, 3.0, None, 3.0),
    ),
]
