"""Sound to files, through libsndfile."""

from __future__ import annotations

import io
from typing import NoReturn

import numpy as np
import soundfile
from numpy.typing import NDArray

from ..errors import InvalidArgumentError

# 24 bits for both: as many as a float32 holds, so nothing that the model made is lost; a float WAV would hold no more
# for samples in [-1, 1], and fewer programs read it (Python's `wave` does not). FLAC has no floats, and no more bits.
_SUBTYPE = "PCM_24"
_FULL_SCALE = 1 << 23

_MAX_CHANNELS = {"wav": 1024, "flac": 8}  # libsndfile's SF_MAX_CHANNELS; FLAC's header has three bits
# Hz. FLAC's streamable subset tells rates in 16 bits, of 1 Hz or of 10 Hz (RFC 9639, 9.1.2).
_FLAC_RATES = (65_535, 655_350)


def encode_audio(sound: NDArray[np.float32], sample_rate: int | None, name: str) -> bytes:
    """Return a sound as a file of 24 bits a sample. A pure function.

    A sample x becomes the integer nearest to 2^23 x, kept within 24 bits; no number at all becomes silence.

    Args:
        sound: float32 (channels, samples) in [-1, 1].
        sample_rate: in Hz; None if the model does not tell.
        name: `wav` or `flac`.

    Raises:
        InvalidArgumentError: the format has no room for so many channels, this rate or no samples; no rate is known.
    """
    channels, count = sound.shape
    rate = known_sample_rate(sample_rate, name)
    if channels > _MAX_CHANNELS[name]:
        _refuse(name, f"holds at most {_MAX_CHANNELS[name]} channels, not {channels}")
    if name == "flac":
        any_hz, tens_of_hz = _FLAC_RATES
        if rate > tens_of_hz or (rate > any_hz and rate % 10):
            _refuse(name, f"holds rates up to {any_hz} Hz, or in tens up to {tens_of_hz}, not {rate}")
        if count == 0:  # libsndfile would make a file of no bytes
            _refuse(name, "holds one sample at least, and the sound has none")
    scaled = np.rint(np.nan_to_num(sound.clip(-1.0, 1.0)).astype(np.float64) * _FULL_SCALE)
    samples = scaled.clip(max=_FULL_SCALE - 1).astype(np.int32) << 8  # libsndfile takes the upper 24 bits
    buffer = io.BytesIO()
    soundfile.write(buffer, samples.T, rate, format=name.upper(), subtype=_SUBTYPE)
    return buffer.getvalue()


def known_sample_rate(sample_rate: int | None, name: str) -> int:
    """Return the rate in Hz, or tell the caller that a sound without one makes no file.

    Raises:
        InvalidArgumentError: it is None.
    """
    if sample_rate is None:
        _refuse(name, "needs a sample rate, and the model does not tell that of its sound")
    return sample_rate


def _refuse(name: str, why: str) -> NoReturn:
    raise InvalidArgumentError("output_format", f"{name!r} {why}; give 'raw'")
