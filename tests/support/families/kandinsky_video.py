"""Kandinsky 5 and 6: text and picture to video, in version 6 with sound."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
from diffusers import FlowMatchEulerDiscreteScheduler

from . import Case
from . import components as parts
from .components_video import clip, lively
from .hunyuan_video import hunyuan_vae

SIZE = 32
FRAMES = 5
TEXT, POOLED = 32, 16
PARAMS = {"height": SIZE, "width": SIZE, "num_frames": FRAMES}
GUIDANCE = (None, None, 1.0, None)
BLOCKS = {
    "in_text_dim": TEXT,
    "in_text_dim2": POOLED,
    "time_dim": 16,
    "model_dim": 16,
    "ff_dim": 32,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (2, 2, 4),
}


def _text() -> dict[str, Any]:
    return {
        "text_encoder": parts.qwen_vl(hidden=TEXT),
        "tokenizer": parts.qwen_vl_processor(),
        "text_encoder_2": parts.clip_text(POOLED),
        "tokenizer_2": parts.clip_tokenizer(),
    }


def _five(name: str, visual: bool = False) -> Any:
    transformer = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=16, out_visual_dim=16, visual_cond=visual, attention_type="regular", **BLOCKS
    )
    return getattr(diffusers, name)(
        **_text(),
        transformer=lively(transformer, 1.2),
        vae=hunyuan_vae(16),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def _six() -> Any:
    transformer = diffusers.Kandinsky6Transformer3DModel(
        in_visual_dim=16,
        out_visual_dim=16,
        in_audio_dim=4,
        out_audio_dim=4,
        visual_token_type_num_embeddings=2,
        **BLOCKS,
    )
    audio_vae = diffusers.MMAudioVAE(
        mel_bins=8,
        latent_channels=4,
        hidden_channels=16,
        channel_multipliers=(1, 2),
        layers_per_block=1,
        sample_rate=1600,
        n_fft=64,
        hop_length=16,
    )
    vocoder = diffusers.MMAudioVocoder(
        num_mels=8,
        upsample_initial_channel=16,
        upsample_rates=(4, 4),
        upsample_kernel_sizes=(8, 8),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3),),
    )
    return diffusers.Kandinsky6TI2VAPipeline(
        **_text(),
        transformer=lively(transformer),
        vae=hunyuan_vae(16),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        audio_vae=lively(audio_vae),
        vocoder=lively(vocoder),
    )


def _six_upscale() -> Any:
    transformer = diffusers.Kandinsky6SRTransformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        time_dim=16,
        model_dim=16,
        ff_dim=32,
        num_visual_blocks=2,
        axes_dims=(2, 2, 4),
        scale_factor=(1.0, 1.0, 1.0),
        nabla_window=(3, 3, 3),
        tile_sizes=((32, 32),),
    )
    vae = diffusers.Kandinsky6SRVAE(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        layers_per_block=1,
    )
    return diffusers.Kandinsky6SRPipeline(
        transformer=lively(transformer),
        vae=lively(vae),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        latent_upscaler=None,
    )


_case = partial(Case, modality="video", params=PARAMS, guidance_scale=GUIDANCE)

CASES = [
    _case(pipeline="Kandinsky5T2VPipeline", kind="text", build=partial(_five, "Kandinsky5T2VPipeline")),
    _case(
        pipeline="Kandinsky5I2VPipeline",
        kind="image-to-video",
        build=partial(_five, "Kandinsky5I2VPipeline", True),
        params={**PARAMS, "num_frames": 17},  # it takes the spread of the latents after the first
        inputs=lambda i: {"image": parts.picture(i, SIZE)},
    ),
    _case(
        pipeline="Kandinsky6TI2VAPipeline",
        modality="video+audio",
        kind="image-to-video",
        build=_six,
        inputs=lambda i: {"image": parts.picture(i, SIZE)},
    ),
    Case(
        pipeline="Kandinsky6SRPipeline",
        modality="video",
        kind="upscale",
        build=_six_upscale,
        params={"resolution_scale": 2},
        inputs=lambda i: {"video": clip(i, FRAMES, 16)},
        has_prompt=False,
    ),
]
