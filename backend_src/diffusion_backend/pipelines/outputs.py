"""From what a pipeline returns to what the engine hands out: uint8 pictures and float32 sound, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import PipelineError
from ..request import DiffusionOutput


def to_output(raw: Any) -> DiffusionOutput:
    """Return the output of a pipeline's call as arrays.

    Args:
        raw: the `diffusers` output object, with `images` or `frames`; pictures may be tensors (n, C, H, W) or videos
            (n, F, C, H, W), floats in [0, 1], or arrays with the channels last, or lists of PIL pictures.

    Raises:
        PipelineError: the output has neither.
    """
    images, frames = getattr(raw, "images", None), getattr(raw, "frames", None)
    if images is not None:
        return DiffusionOutput(images=to_uint8(images, ndim=4))
    if frames is not None:
        return DiffusionOutput(video=to_uint8(frames, ndim=5))
    raise PipelineError(TypeError(f"an output of type {type(raw).__name__} has no images and no frames"))


def to_uint8(pictures: Any, *, ndim: int) -> NDArray[np.uint8]:
    """Return pictures as uint8 with the channels last, exactly as `diffusers` makes PIL pictures of them.

    Args:
        pictures: as in `to_output`.
        ndim: of the result: 4 (n, H, W, C), or 5 (n, F, H, W, C).
    """
    if isinstance(pictures, torch.Tensor):
        # Converted on the device: a quarter of the bytes cross to the host.
        scaled = (pictures.float().clamp(0, 1) * 255).round().to(torch.uint8)
        array = scaled.movedim(-3, -1).contiguous().cpu().numpy()
    else:
        array = np.asarray(_stack(pictures))
        if array.dtype != np.uint8:
            array = (array.clip(0, 1) * 255).round().astype(np.uint8)
    if array.ndim == ndim - 1:
        array = array[None] if ndim == 5 else array[..., None]
    if array.shape[-1] == 1:
        array = np.repeat(array, 3, axis=-1)
    pictures_uint8: NDArray[np.uint8] = np.ascontiguousarray(array[..., :3])
    return pictures_uint8


def _stack(pictures: Any) -> Any:
    if isinstance(pictures, list | tuple):
        return np.stack([_stack(picture) for picture in pictures])
    return np.asarray(pictures)
