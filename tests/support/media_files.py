"""Pictures, sounds and videos as callers send and read them."""

from __future__ import annotations

import io
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image

from tests.support.families.components import mask, picture

__all__ = ["Film", "array", "as_file", "files", "film", "mask", "opened", "picture", "sound"]


def array(*pictures: Image.Image) -> NDArray[np.uint8]:
    """Return pictures as a raw input: uint8 (B, H, W, channels)."""
    stacked = np.stack([np.asarray(picture) for picture in pictures])
    return stacked if stacked.ndim == 4 else stacked[..., None]


def as_file(picture: Image.Image, name: str = "PNG", **options: Any) -> bytes:
    """Return a picture as the bytes of a file."""
    buffer = io.BytesIO()
    picture.save(buffer, name, **options)
    return buffer.getvalue()


def files(*contents: bytes | str) -> NDArray[np.object_]:
    """Return files as an input: (B, 1)."""
    encoded = [content.encode() if isinstance(content, str) else content for content in contents]
    return np.array(encoded, dtype=np.object_).reshape(-1, 1)


def opened(data: bytes, name: str = "PNG") -> NDArray[np.uint8]:
    """Return the pixels of a picture file, which must be of this format."""
    with Image.open(io.BytesIO(data)) as image:
        assert (image.format, image.mode) == (name, "RGB")
        return np.asarray(image)


def sound(data: bytes, name: str) -> tuple[NDArray[np.float32], int]:
    """Return the samples (channels, samples) and the rate of a sound file, which must be of this format."""
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        assert file.format == name
        return file.read(dtype="float32", always_2d=True).T, file.samplerate


@dataclass(frozen=True)
class Film:
    """What an mp4 file holds.

    Attributes:
        frames: uint8 (F, H, W, 3).
        frame_rate: frames a second.
        track: float32 (channels, samples), or None without a sound, with its `sample_rate`.
        seconds, track_seconds: the lengths of the two, as the file tells them.
    """

    frames: NDArray[np.uint8]
    frame_rate: float
    seconds: float
    track: NDArray[np.float32] | None = None
    sample_rate: int = 0
    track_seconds: float = 0.0


def film(data: bytes) -> Film:
    """Decode an mp4 file."""
    with av.open(io.BytesIO(data)) as container:
        (video,) = container.streams.video
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video)])
        rate, seconds = float(video.average_rate or 0), _seconds(video)
        if not container.streams.audio:
            return Film(frames, rate, seconds)
    with av.open(io.BytesIO(data)) as container:
        (stream,) = container.streams.audio
        track = np.concatenate([frame.to_ndarray() for frame in container.decode(stream)], axis=1)
        return Film(frames, rate, seconds, track, stream.rate, _seconds(stream))


def _seconds(stream: Any) -> float:
    return float(Fraction(stream.duration) * stream.time_base)
