"""Sound survives the way into a file and back to the 24th bit, each channel in its place."""

from __future__ import annotations

import io
import wave

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from diffusion_backend.errors import InvalidArgumentError
from diffusion_backend.media.audio import encode_audio

STEP = 2.0**-23  # between two values of 24 bits


def read(data: bytes) -> tuple[np.ndarray, int]:
    """Return the samples (channels, samples) and the rate."""
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float64", always_2d=True)
    return samples.T, rate


@pytest.mark.parametrize("name", ["wav", "flac"])
@pytest.mark.parametrize("channels", [1, 2, 8])
@pytest.mark.parametrize("rate", [8000, 16000, 44100, 48000, 96000])
def test_a_sound_comes_back_as_it_was(name: str, channels: int, rate: int) -> None:
    sound = np.random.default_rng(7).uniform(-1, 1, (channels, 999)).astype(np.float32)
    data = encode_audio(sound, rate, name)
    info = soundfile.info(io.BytesIO(data))
    assert (info.format, info.subtype) == (name.upper(), "PCM_24")
    back, back_rate = read(data)
    assert back_rate == rate
    assert back.shape == sound.shape
    assert np.abs(back - np.minimum(sound, 1 - STEP)).max() <= STEP / 2


@pytest.mark.parametrize("name", ["wav", "flac"])
def test_the_values_are_those_of_24_bits(name: str) -> None:
    sound = np.array([[0.0, 0.5, -0.5, STEP, -1.0, 1.0, 1.5, -1.5, np.nan, np.inf, -np.inf]], np.float32)
    expected = [0.0, 0.5, -0.5, STEP, -1.0, 1 - STEP, 1 - STEP, -1.0, 0.0, 1 - STEP, -1.0]
    assert read(encode_audio(sound, 16000, name))[0][0].tolist() == expected


def test_a_wav_is_read_by_the_plainest_of_readers() -> None:
    sound = np.array([[0.5, -0.5], [0.25, 0.0]], np.float32)
    with wave.open(io.BytesIO(encode_audio(sound, 22050, "wav"))) as reader:
        assert reader.getparams()[:4] == (2, 3, 22050, 2)
        frames = reader.readframes(2)
    values = [int.from_bytes(frames[i : i + 3], "little", signed=True) for i in range(0, 12, 3)]
    assert values == [2**22, 2**21, -(2**22), 0]


@pytest.mark.parametrize(("name", "samples"), [("wav", 0), ("wav", 1), ("wav", 2), ("flac", 1), ("flac", 2)])
def test_the_shortest_sounds_are_sounds_too(name: str, samples: int) -> None:
    back, rate = read(encode_audio(np.full((2, samples), 0.5, np.float32), 44100, name))
    assert back.shape == (2, samples)
    assert rate == 44100


RATES = st.one_of(st.integers(1, 65_535), st.integers(6554, 65_535).map(lambda rate: rate * 10))


@given(
    values=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=64),
    rate=RATES,
    name=st.sampled_from(["wav", "flac"]),
)
def test_any_sound_at_any_rate_comes_back(values: list[float], rate: int, name: str) -> None:
    sound = np.array([values], np.float32)
    back, back_rate = read(encode_audio(sound, rate, name))
    assert back_rate == rate
    assert np.abs(back - np.minimum(sound.astype(np.float64), 1 - STEP)).max() <= STEP / 2


@pytest.mark.parametrize(
    ("shape", "rate", "name", "problem"),
    [
        ((9, 10), 8000, "flac", "'flac' holds at most 8 channels, not 9; give 'raw'"),
        ((1025, 1), 8000, "wav", "'wav' holds at most 1024 channels, not 1025; give 'raw'"),
        (
            (1, 10),
            655_360,
            "flac",
            "'flac' holds rates up to 65535 Hz, or in tens up to 655350, not 655360; give 'raw'",
        ),
        ((1, 10), 65_536, "flac", "'flac' holds rates up to 65535 Hz, or in tens up to 655350, not 65536; give 'raw'"),
        ((1, 0), 8000, "flac", "'flac' holds one sample at least, and the sound has none; give 'raw'"),
        ((1, 10), None, "wav", "'wav' needs a sample rate, and the model does not tell that of its sound; give 'raw'"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(shape: tuple[int, int], rate: int, name: str, problem: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        encode_audio(np.zeros(shape, np.float32), rate, name)
    assert str(caught.value) == f"output_format: {problem}"


@pytest.mark.parametrize("name", ["wav", "flac"])
def test_the_callers_array_stays_as_it_was(name: str) -> None:
    sound = np.array([[0.1, np.nan, 2.0]], np.float32)
    before = sound.copy()
    encode_audio(sound, 8000, name)
    assert np.array_equal(sound, before, equal_nan=True)
