"""Small pictures of a sample on its way, through the pipeline's own decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .outputs import to_uint8

MAX_LATENT_SIDE = 64
"""Latents are averaged down to at most this many cells a side before they are decoded: a preview is to be cheap."""


def can_preview(pipeline: Any) -> bool:
    """Whether the pipeline's latents are pictures (n, c, h, w) that its `vae` decodes as they are."""
    vae = getattr(pipeline, "vae", None)
    return (
        vae is not None
        and getattr(vae.config, "scaling_factor", None) is not None
        and hasattr(pipeline, "image_processor")
        and not hasattr(pipeline, "_unpack_latents")
    )


def decode_preview(pipeline: Any, sample: torch.Tensor) -> NDArray[np.uint8] | None:
    """Return a sample as uint8 (n, H, W, 3), or None if it is no picture latent.

    Called inside the request's greenlet: the decoding takes its turn like any other work.

    Args:
        sample: latents (n, c, h, w), scaled as the pipeline keeps them.
    """
    if sample.ndim != 4:
        return None
    config = pipeline.vae.config
    longest = max(sample.shape[-2:])
    if longest > MAX_LATENT_SIDE:
        height, width = (max(1, round(side * MAX_LATENT_SIDE / longest)) for side in sample.shape[-2:])
        sample = torch.nn.functional.adaptive_avg_pool2d(sample, (height, width))
    latents = sample / config.scaling_factor + (getattr(config, "shift_factor", None) or 0.0)
    decoded = pipeline.vae.decode(latents.to(pipeline.vae.dtype), return_dict=False)[0]
    return to_uint8(pipeline.image_processor.postprocess(decoded, output_type="pt"), ndim=4)
