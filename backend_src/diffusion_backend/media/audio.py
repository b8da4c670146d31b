"""Sound to files, through libsndfile."""

from __future__ import annotations

import io

import numpy as np
import soundfile
from numpy.typing import NDArray

from ..errors import InvalidArgumentError

# 24 bits for both: as many as a float32 holds, so nothing that the model made is lost; a float WAV would hold no more
# for samples in [-1, 1], and fewer programs read it (Python's `wave` does not). FLAC has no floats, and no more bits.
_SUBTYPE = "PCM_24"
_FULL_SCALE = 1 << 23

# Of the formats themselves: the WAV header has 16 bits for the channels, FLAC's has three.
_MAX_CHANNELS = {"wav": 1024, "flac": 8}
_MAX_SAMPLE_RATE = {"wav": 2**31 - 1, "flac": 655_350}


def encode_audio(sound: NDArray[np.float32], sample_rate: int | None, name: str) -> bytes:
    """Return a sound as a file of 24 bits a sample. A pure function.

    A sample x becomes the integer nearest to 2^23 x, kept within 24 bits; no number at all becomes silence.

    Args:
        sound: float32 (channels, samples) in [-1, 1].
        sample_rate: in Hz; None if the model does not tell.
        name: `wav` or `flac`.

    Raises:
        InvalidArgumentError: the format has no room for so many channels or so high a rate, or no rate is known.
    """
    channels = sound.shape[0]
    rate = known_sample_rate(sample_rate, name)
    if channels > _MAX_CHANNELS[name]:
        raise InvalidArgumentError(
            "output_format", f"{name!r} holds at most {_MAX_CHANNELS[name]} channels, not {channels}; give 'raw'"
        )
    if rate > _MAX_SAMPLE_RATE[name]:
        raise InvalidArgumentError(
            "output_format", f"{name!r} holds at most {_MAX_SAMPLE_RATE[name]} samples a second, not {rate}; give 'raw'"
        )
    scaled = np.rint(np.nan_to_num(sound.astype(np.float64), nan=0.0) * _FULL_SCALE)
    samples = scaled.clip(-_FULL_SCALE, _FULL_SCALE - 1).astype(np.int32) << 8  # libsndfile takes the upper 24 bits
    buffer = io.BytesIO()
    soundfile.write(buffer, samples.T, rate, format=name.upper(), subtype=_SUBTYPE)
    return buffer.getvalue()


def known_sample_rate(sample_rate: int | None, name: str) -> int:
    """Return the rate in Hz, or tell the caller that a sound without one makes no file.

    Raises:
        InvalidArgumentError: it is None.
    """
    if sample_rate is None:
        raise InvalidArgumentError(
            "output_format", f"{name!r} needs a sample rate, and the model does not tell that of its sound; give 'raw'"
        )
    return sample_rate
