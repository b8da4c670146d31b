"""A video survives the way into an mp4 and back: frames, size, colours, rate, and a sound as long as the frames."""

from __future__ import annotations

import io
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np
import pytest

from diffusion_backend.errors import InvalidArgumentError
from diffusion_backend.media.video import DEFAULT_FRAME_RATE, encode_video


@dataclass(frozen=True)
class Film:
    """An mp4, read back.

    Attributes:
        frames: uint8 (F, H, W, 3).
        times: seconds at which each frame is shown.
        sound: float (channels, samples), or None.
        seconds, sound_seconds: lengths of the tracks; file_seconds: what the header tells players.
        codecs: of the tracks.
    """

    frames: np.ndarray
    times: list[float]
    rate: Fraction
    seconds: float
    file_seconds: float
    sound: np.ndarray | None
    sample_rate: int | None
    sound_seconds: float | None
    codecs: list[str]


def read(data: bytes) -> Film:
    with av.open(io.BytesIO(data)) as container:
        pictures = container.streams.video[0]
        assert pictures.codec_context.pix_fmt == "yuv420p"
        decoded = list(container.decode(pictures))
        film = {
            "frames": np.stack([frame.to_ndarray(format="rgb24") for frame in decoded]),
            "times": [frame.time for frame in decoded],
            "rate": pictures.average_rate,
            "seconds": float(pictures.duration * pictures.time_base),
            "file_seconds": container.duration / av.time_base,
            "codecs": [stream.codec_context.name for stream in container.streams],
        }
        has_sound = bool(container.streams.audio)
    if not has_sound:
        return Film(**film, sound=None, sample_rate=None, sound_seconds=None)
    with av.open(io.BytesIO(data)) as container:
        track = container.streams.audio[0]
        sound = np.concatenate([frame.to_ndarray() for frame in container.decode(track)], axis=1)
        # The duration of a track with an edit list is that of its packets; the file's is what is played.
        samples = sum(packet.duration for packet in _packets(data))
        return Film(**film, sound=sound, sample_rate=track.rate, sound_seconds=samples / track.rate)


def _packets(data: bytes) -> list[av.Packet]:
    """Return the packets of the sound that are played: those before time zero only prime the decoder."""
    with av.open(io.BytesIO(data)) as container:
        return [packet for packet in container.demux(audio=0) if packet.pts is not None and packet.pts >= 0]


def moving(frames: int, height: int, width: int) -> np.ndarray:
    """Smooth pictures that differ from frame to frame."""
    shades = np.linspace(30, 220, frames)
    rows, columns = np.mgrid[0:height, 0:width]
    base = np.stack([rows * 20 / height, columns * 20 / width, rows * 0], axis=-1)
    return (base[None] + shades[:, None, None, None]).round().astype(np.uint8)


def tone(seconds: float, rate: int, frequencies: tuple[float, ...]) -> np.ndarray:
    times = np.arange(round(seconds * rate)) / rate
    return np.stack([0.5 * np.sin(2 * np.pi * f * times) for f in frequencies]).astype(np.float32)


def loudest(sound: np.ndarray, rate: int) -> float:
    """Return the strongest frequency, in Hz."""
    spectrum = np.abs(np.fft.rfft(sound * np.hanning(len(sound))))
    return float(np.fft.rfftfreq(len(sound), 1 / rate)[spectrum.argmax()])


@pytest.mark.parametrize("encoder", ["libx264", "mpeg4"])
@pytest.mark.parametrize(("count", "rate"), [(1, 24.0), (2, 8.0), (17, 30000 / 1001), (25, 2.5)])
def test_a_video_comes_back_as_it_was(encoder: str, count: int, rate: float) -> None:
    video = moving(count, 48, 80)
    film = read(encode_video(video, rate, encoder=encoder))
    assert film.codecs == ["h264" if encoder == "libx264" else "mpeg4"]
    assert film.frames.shape == video.shape
    assert np.abs(film.frames.astype(int) - video).mean() < 4
    assert float(film.rate) == pytest.approx(rate, rel=1e-6)
    assert film.times == pytest.approx([i / rate for i in range(count)], abs=1e-3)
    assert film.seconds == pytest.approx(count / rate, abs=1e-3)
    assert film.sound is None


def test_the_encoder_is_h264_where_there_is_libx264() -> None:
    assert "libx264" in av.codecs_available
    assert read(encode_video(moving(2, 16, 16), 8.0)).codecs == ["h264"]


def test_without_a_rate_there_are_ten_frames_a_second() -> None:
    film = read(encode_video(moving(5, 16, 16), None))
    assert DEFAULT_FRAME_RATE == 10
    assert film.rate == 10
    assert film.seconds == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("encoder", ["libx264", "mpeg4"])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 2), (1, 16), (17, 16), (16, 17), (31, 33)])
def test_an_odd_side_gets_its_last_line_twice(encoder: str, height: int, width: int) -> None:
    video = moving(3, height, width)
    frames = read(encode_video(video, 8.0, encoder=encoder)).frames
    assert frames.shape == (3, height + height % 2, width + width % 2, 3)
    expected = np.pad(video, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    assert np.abs(frames.astype(int) - expected).mean() < 8


@pytest.mark.parametrize(
    "colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 0, 0), (255, 255, 255), (200, 30, 60)]
)
def test_colours_stay_and_are_tagged(colour: tuple[int, int, int]) -> None:
    data = encode_video(np.broadcast_to(np.array(colour, np.uint8), (3, 32, 32, 3)), 8.0)
    assert np.abs(read(data).frames.astype(int) - colour).max() <= 4
    with av.open(io.BytesIO(data)) as container:
        context = container.streams.video[0].codec_context
        assert (context.colorspace, context.color_primaries, context.color_trc, context.color_range) == (1, 1, 1, 1)


@pytest.mark.parametrize("sample_rate", [8000, 16000, 22050, 44100, 48000, 96000])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_sound_is_in_the_file(sample_rate: int, channels: int) -> None:
    frequencies = (440.0, 1000.0)[:channels]
    film = read(encode_video(moving(24, 16, 16), 24.0, tone(1.0, sample_rate, frequencies), sample_rate))
    assert film.codecs == ["h264", "aac"]
    assert film.sample_rate == sample_rate
    assert film.sound is not None
    assert film.sound.shape[0] == channels
    for heard, frequency in zip(film.sound, frequencies, strict=True):
        assert loudest(heard[:sample_rate], sample_rate) == pytest.approx(frequency, abs=5)
        assert np.abs(heard[:sample_rate]).mean() == pytest.approx(0.5 * 2 / np.pi, rel=0.1)


@pytest.mark.parametrize("sample_rate", [6000, 37800, 192000])
def test_a_rate_that_aac_does_not_know_is_resampled(sample_rate: int) -> None:
    film = read(encode_video(moving(24, 16, 16), 24.0, tone(1.0, sample_rate, (440.0,)), sample_rate))
    assert film.sample_rate == 48000
    assert film.sound is not None
    assert loudest(film.sound[0][:48000], 48000) == pytest.approx(440, abs=5)
    assert film.sound_seconds == pytest.approx(1.0, abs=1 / 24)


@pytest.mark.parametrize(("count", "rate"), [(1, 24.0), (1, 60.0), (5, 24.0), (17, 30000 / 1001), (49, 16.0), (3, 2.5)])
@pytest.mark.parametrize("sample_rate", [8000, 24000, 44100, 48000])
@pytest.mark.parametrize("given", [0.0, 0.5, 1.0, 1.7], ids=["none", "half", "all", "more"])
def test_the_sound_is_as_long_as_the_frames(count: int, rate: float, sample_rate: int, given: float) -> None:
    sound = tone(given * count / rate, sample_rate, (440.0,))
    film = read(encode_video(moving(count, 16, 16), rate, sound, sample_rate))
    assert film.seconds == pytest.approx(count / rate, abs=1e-3)
    assert film.sound_seconds == pytest.approx(count / rate, abs=1e-3)
    assert film.file_seconds == pytest.approx(count / rate, abs=1e-4)


def test_a_short_sound_goes_on_as_silence() -> None:
    film = read(encode_video(moving(24, 16, 16), 24.0, tone(0.5, 16000, (440.0,)), 16000))
    assert film.sound is not None
    assert np.abs(film.sound[0][2000:6000]).mean() > 0.25
    assert np.abs(film.sound[0][10000:16000]).max() < 0.01


def test_the_sound_is_in_step_with_the_frames() -> None:
    sound = np.zeros((1, 48000), np.float32)
    sound[0, 24000:24480] = tone(0.01, 48000, (1000.0,))[0]  # a click after half a second
    film = read(encode_video(moving(24, 16, 16), 24.0, sound, 48000))
    assert film.sound is not None
    assert int(np.abs(film.sound[0]).argmax()) == pytest.approx(24240, abs=480)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 6])
def test_sounds_of_several_channels_are_held(channels: int) -> None:
    film = read(encode_video(moving(8, 16, 16), 8.0, np.zeros((channels, 48000), np.float32), 48000))
    assert film.sound is not None
    assert film.sound.shape[0] == channels


def test_no_number_is_silence() -> None:
    film = read(encode_video(moving(8, 16, 16), 8.0, np.full((1, 8000), np.nan, np.float32), 8000))
    assert film.sound is not None
    assert np.abs(film.sound).max() == 0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf"), 1e-9, 1001.0])
def test_an_impossible_frame_rate_is_refused(rate: float) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        encode_video(moving(2, 16, 16), rate)
    assert str(caught.value) == f"frame_rate: {rate:g} is not allowed in a file; it must be from 0.001 to 1000"


@pytest.mark.parametrize("rate", [0.001, 1000.0])
def test_the_limits_of_the_frame_rate_are_allowed(rate: float) -> None:
    assert float(read(encode_video(moving(2, 16, 16), rate)).rate) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("shape", "sound_shape", "sample_rate", "problem"),
    [
        ((1, 2, 16386, 3), None, None, "'mp4' holds at most 16384 pixels a side, not 16386×2; give 'raw'"),
        ((1, 16, 16, 3), (7, 10), 8000, "'mp4' holds sounds of 1, 2, 3, 4, 5, 6 channels, not 7; give 'raw'"),
        ((1, 16, 16, 3), (1, 10), None, "'mp4' needs a sample rate, and the model does not tell that of its sound; "),
    ],
)
def test_what_an_mp4_cannot_hold_is_refused(
    shape: tuple[int, ...], sound_shape: tuple[int, int] | None, sample_rate: int | None, problem: str
) -> None:
    sound = None if sound_shape is None else np.zeros(sound_shape, np.float32)
    with pytest.raises(InvalidArgumentError) as caught:
        encode_video(np.zeros(shape, np.uint8), 8.0, sound, sample_rate)
    assert str(caught.value).startswith(f"output_format: {problem}")


def test_the_longest_side_is_held() -> None:
    assert read(encode_video(np.zeros((1, 2, 16384, 3), np.uint8), 8.0)).frames.shape == (1, 2, 16384, 3)


def test_the_callers_arrays_stay_as_they_were() -> None:
    video, sound = moving(3, 17, 17), np.array([[0.1, np.nan, 0.2]], np.float32)
    before = video.copy(), sound.copy()
    encode_video(video, 8.0, sound, 8000)
    assert np.array_equal(video, before[0])
    assert np.array_equal(sound, before[1], equal_nan=True)
