"""From what a pipeline returns to what the engine hands out: uint8 pictures and float32 sound, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import NotFiniteError, PipelineError
from ..request import DiffusionOutput
from .audio import _extract_audio_slice

FIELDS = {
    **dict.fromkeys(("images", "image", "rgb", "prediction", "frames", "videos", "video"), "pictures"),
    **dict.fromkeys(("audios", "audio"), "sound"),
}
"""The fields of pipelines' outputs that are handed out, and what they hold."""


def to_output(raw: Any, *, sample_rate: int | None = None, frame_rate: float | None = None) -> DiffusionOutput:
    """Return the output of a pipeline's call as arrays.

    Args:
        raw: the `diffusers` output object, with `images`, `frames` or `audios`, or `frames` and `audio`; pictures may
            be tensors (n, C, H, W) or videos (n, F, C, H, W), floats in [0, 1], or arrays with the channels last, or
            lists of PIL pictures; for sound see `_extract_audio_slice`.
        sample_rate: of the sound, in Hz.
        frame_rate: of the video, in frames a second.

    Raises:
        PipelineError: the output has none of them.
    """
    images = _first(raw, "images", "image", "rgb", "prediction")
    frames = _first(raw, "frames", "videos", "video")
    if getattr(images, "ndim", 0) == 5:  # turns of an object
        images, frames = None, images
    sound = _first(raw, "audios", "audio")
    if images is None and frames is None and sound is None:
        raise PipelineError(TypeError(f"an output of type {type(raw).__name__} has no images, frames or audios"))
    audio = None
    if sound is not None:
        # The length of a list or batch is the number of outputs; a single sound is one.
        count = len(sound) if np.ndim(sound[0]) > 0 else 1
        audio = _extract_audio_slice(sound, 0, count)
    video = None if frames is None else to_uint8(frames, ndim=5)
    if video is not None and audio is not None and frame_rate and sample_rate:
        audio = as_long_as_video(audio, video.shape[1], frame_rate, sample_rate)
    return DiffusionOutput(
        images=None if images is None else to_uint8(images, ndim=4),
        video=video,
        audio=audio,
        sample_rate=None if audio is None else sample_rate,
        frame_rate=None if frames is None else frame_rate,
    )


def as_long_as_video(
    audio: NDArray[np.float32], num_frames: int, frame_rate: float, sample_rate: int
) -> NDArray[np.float32]:
    """Return the sound of a video; one that is a frame or more too short ends in silence, too long is cut.

    (Vocoders make whole pieces of sound, which do not fit every number of frames.)

    Args:
        audio: (n, channels, samples).
        num_frames: of each video.
        frame_rate, sample_rate: a second.
    """
    wanted = round(num_frames / frame_rate * sample_rate)
    missing = wanted - audio.shape[2]
    if abs(missing) < sample_rate / frame_rate:
        return audio
    return np.pad(audio, ((0, 0), (0, 0), (0, max(0, missing))))[:, :, :wanted]


def is_conventional(raw: Any) -> bool:
    """Whether floating-point pictures in an output are in [0, 1], with their channels where `to_uint8` expects them."""
    for pictures in (_first(raw, "images", "image"), _first(raw, "frames", "videos", "video")):
        if isinstance(pictures, torch.Tensor) and pictures.is_floating_point():
            finite = pictures[torch.isfinite(pictures)]
            if finite.numel() and not (float(finite.min()) >= -0.01 and float(finite.max()) <= 1.01):
                return False
            if pictures.ndim == 5 and pictures.shape[1] == 3 and 3 not in (pictures.shape[2], pictures.shape[4]):
                return False  # (n, C, F, H, W)
    return True


def is_finite(values: Any) -> Any:
    """Whether numbers of any kind (a tensor, an array, nested lists, pictures) hold neither NaN nor infinity.

    Returns:
        For a tensor a 0-d tensor on its device, so that nobody has to wait for it; else a bool.
    """
    if isinstance(values, torch.Tensor):
        return torch.isfinite(values).all()
    if isinstance(values, list | tuple):
        return all(bool(is_finite(value)) for value in values)
    if isinstance(values, float | np.floating):
        return bool(np.isfinite(values))
    return not isinstance(values, np.ndarray) or values.dtype.kind != "f" or bool(np.isfinite(values).all())


def check_finite(raw: Any) -> None:
    """Refuse an output that would become black pictures or silence without a word.

    (Pictures that a pipeline has made PIL pictures of itself cannot be checked any more.)

    Args:
        raw: as for `to_output`.

    Raises:
        NotFiniteError: naming the field.
    """
    for name in FIELDS:
        if not is_finite(getattr(raw, name, None)):
            raise NotFiniteError(name)


def _first(raw: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(raw, name, None)) is not None), None)


def quantize(pictures: torch.Tensor) -> torch.Tensor:
    """Return pictures in [0, 1] as uint8, rounded as `diffusers` rounds; integers as they are, on their device."""
    if not pictures.is_floating_point():
        return pictures.to(torch.uint8)
    return (pictures.float().nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)


def to_uint8(pictures: Any, *, ndim: int) -> NDArray[np.uint8]:
    """Return pictures as uint8 with the channels last, exactly as `diffusers` makes PIL pictures of them.

    Args:
        pictures: as in `to_output`.
        ndim: of the result: 4 (n, H, W, C), or 5 (n, F, H, W, C).
    """
    if isinstance(pictures, list | tuple) and pictures and isinstance(pictures[0], torch.Tensor):
        pictures = torch.stack(list(pictures))
    if isinstance(pictures, torch.Tensor):
        # Converted on the device: a quarter of the bytes cross to the host.
        scaled = quantize(pictures)
        channels_last = pictures.shape[-1] in (1, 3, 4) and pictures.shape[-3] not in (1, 3, 4)
        array = (scaled if channels_last else scaled.movedim(-3, -1)).contiguous().cpu().numpy()
    else:
        array = np.asarray(_stack(pictures))
        if array.dtype != np.uint8:
            array = (np.nan_to_num(array, nan=0.0).clip(0, 1) * 255).round().astype(np.uint8)
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
