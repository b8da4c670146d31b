"""The sound that pipelines return, in whichever container, as one array of constant rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def _extract_audio_slice(payload: Any, start: int, count: int) -> NDArray[np.float32]:
    """Return outputs `start` to `start + count` of a payload as float32 (count, channels, samples) in [-1, 1].

    A pure function; any thread may call it.

    Args:
        payload: what a pipeline returned: an array or tensor (n, samples) or (n, channels, samples), or a list or tuple
            of n sounds (samples,) or (channels, samples). One sound (samples,) by itself counts as n = 1. Sounds of
            different lengths are padded with silence to the longest.
        start: first output, from 0.
        count: outputs, at least 1.

    Raises:
        ValueError: the payload has fewer outputs than asked for, or is no sound.
    """
    if count < 1 or start < 0:
        raise ValueError(f"outputs {start} to {start + count} were asked for")
    sounds = [_as_channels(sound) for sound in _sounds(payload)]
    if start + count > len(sounds):
        raise ValueError(f"outputs {start} to {start + count} were asked for, but there are only {len(sounds)}")
    chosen = sounds[start : start + count]
    if len({sound.shape[0] for sound in chosen}) > 1:
        raise ValueError("the sounds have different numbers of channels")
    longest = max(sound.shape[1] for sound in chosen)
    padded = [np.pad(sound, ((0, 0), (0, longest - sound.shape[1]))) for sound in chosen]
    return np.clip(np.stack(padded), -1.0, 1.0)


def _sounds(payload: Any) -> list[Any]:
    """Return the sounds of a payload, one by one."""
    if isinstance(payload, list | tuple):
        if payload and np.ndim(_array(payload[0])) == 0:
            return [payload]  # one sound, as a list of numbers
        return list(payload)
    array = _array(payload)
    if array.ndim == 0:
        raise ValueError("a single number is no sound")
    if array.ndim > 3:
        raise ValueError(f"a payload of the shape {array.shape} is no sound")
    return [array] if array.ndim == 1 else list(array)


def _as_channels(sound: Any) -> NDArray[np.float32]:
    array = _array(sound).astype(np.float32, copy=False)
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2:
        raise ValueError(f"a sound of the shape {array.shape} has no channels and samples")
    return array


def _array(value: Any) -> NDArray[Any]:
    return value.detach().float().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def sample_rate_of(pipeline: Any) -> int | None:
    """Return the samples a second of the sound that a pipeline makes, or None if it does not tell."""
    for name in ("audio_sampling_rate", "audio_sample_rate", "sample_rate"):
        rate = getattr(pipeline, name, None)
        if isinstance(rate, int | float) and rate > 0:
            return int(rate)
    for component, names in (
        ("vocoder", ("output_sampling_rate", "sampling_rate")),
        ("audio_vae", ("sampling_rate", "sample_rate")),
        ("vae", ("sampling_rate", "sample_rate")),
        ("unet", ("sample_rate",)),
    ):
        config = getattr(getattr(pipeline, component, None), "config", None)
        for name in names:
            rate = getattr(config, name, None)
            if isinstance(rate, int | float) and rate > 0:
                return int(rate)
    return None
