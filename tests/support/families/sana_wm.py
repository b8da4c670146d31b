"""Sana-WM: a video along a camera's path."""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
from diffusers import FlowMatchEulerDiscreteScheduler

from . import Case
from . import components as parts
from .components_video import lively
from .ltx2 import ltx2_vae

SIZE, FRAMES, TEXT = 32, 5, 16


def _build() -> Any:
    transformer = diffusers.SanaWMTransformer3DModel(
        in_channels=4,
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        linear_head_dim=16,
        softmax_every_n=2,
        chunk_plucker_channels=12,
        chunk_plucker_post_attn_blocks=2,
        image_size=SIZE,
        caption_channels=TEXT,
        fp32_attention=True,
        mixed_precision="fp32",
    )
    return diffusers.SanaWMPipeline(
        tokenizer=parts.gemma_tokenizer(),
        text_encoder=parts.language_model("Gemma2Model", TEXT),
        vae=ltx2_vae(),
        transformer=lively(transformer, 1.2),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _path(index: int) -> Any:
    """Return the poses of a camera that moves; its direction depends on the index."""
    poses = np.tile(np.eye(4, dtype=np.float32), (FRAMES, 1, 1))
    poses[:, index % 3, 3] = np.linspace(0, 1, FRAMES)
    return poses


CASES = [
    Case(
        pipeline="SanaWMPipeline",
        modality="video",
        kind="image-to-video",
        build=_build,
        params={
            "height": SIZE,
            "width": SIZE,
            "num_frames": FRAMES,
            "max_sequence_length": 64,
            "chi_prompt": ["A video:"],
            "intrinsics": [24.0, 24.0, 16.0, 16.0],
        },
        inputs=lambda i: {"image": parts.picture(i, SIZE), "c2w": _path(i)},
        guidance_scale=(None, None, 1.0, None),
    ),
]
