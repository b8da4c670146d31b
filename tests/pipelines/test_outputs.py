"""From what pipelines return to arrays: pictures as `diffusers` makes them, sound of constant rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from diffusion_backend.errors import PipelineError
from diffusion_backend.pipelines.audio import _extract_audio_slice
from diffusion_backend.pipelines.outputs import to_output, to_uint8

PICTURES = torch.rand(2, 3, 4, 6, generator=torch.Generator().manual_seed(1))


def test_pictures_are_exactly_those_that_diffusers_makes() -> None:
    expected = np.stack([np.asarray(p) for p in VaeImageProcessor.numpy_to_pil(PICTURES.permute(0, 2, 3, 1).numpy())])
    assert np.array_equal(to_uint8(PICTURES, ndim=4), expected)
    assert np.array_equal(to_uint8(PICTURES.permute(0, 2, 3, 1).numpy(), ndim=4), expected)
    assert np.array_equal(to_uint8([Image.fromarray(p) for p in expected], ndim=4), expected)
    assert np.array_equal(to_uint8(list(PICTURES), ndim=4), expected)


@pytest.mark.parametrize(
    ("pictures", "shape"),
    [
        (torch.zeros(2, 1, 4, 6), (2, 4, 6, 3)),  # grey
        (torch.zeros(2, 4, 5, 6), (2, 5, 6, 3)),  # with alpha
        ([Image.new("L", (6, 4))], (1, 4, 6, 3)),
        ([Image.new("RGBA", (6, 4))], (1, 4, 6, 3)),
        (np.zeros((2, 4, 6, 3), np.uint8), (2, 4, 6, 3)),
    ],
)
def test_pictures_of_any_kind_have_three_channels(pictures: Any, shape: tuple[int, ...]) -> None:
    array = to_uint8(pictures, ndim=4)
    assert array.shape == shape
    assert array.dtype == np.uint8
    assert array.flags["C_CONTIGUOUS"]


@pytest.mark.parametrize("made", [torch.tensor, np.array])
def test_values_out_of_range_are_clipped_and_no_numbers_are_black(made: Any) -> None:
    values = made([[[[-1.0, 0.5], [2.0, float("nan")]]] * 3])
    values = values if isinstance(values, torch.Tensor) else np.moveaxis(values, 1, -1)
    assert to_uint8(values, ndim=4)[0, :, :, 0].tolist() == [[0, 128], [255, 0]]


@pytest.mark.parametrize("frames", [torch.zeros(2, 5, 3, 4, 6), [[Image.new("RGB", (6, 4))] * 5] * 2])
def test_videos_have_five_dimensions(frames: Any) -> None:
    output = to_output(SimpleNamespace(frames=frames), frame_rate=8.0)
    assert output.video is not None
    assert output.video.shape == (2, 5, 4, 6, 3)
    assert output.frame_rate == 8.0
    assert output.modalities == ("video",)


def test_pictures_have_no_rates() -> None:
    output = to_output(SimpleNamespace(images=PICTURES), sample_rate=16000, frame_rate=8.0)
    assert output.modalities == ("image",)
    assert (output.sample_rate, output.frame_rate) == (None, None)


def test_a_video_with_sound_has_both_and_their_rates() -> None:
    raw = SimpleNamespace(frames=torch.zeros(2, 5, 3, 4, 6), audio=torch.zeros(2, 2, 10000))
    output = to_output(raw, sample_rate=16000, frame_rate=8.0)
    assert output.modalities == ("video", "audio")
    assert output.audio is not None
    assert output.audio.shape == (2, 2, 10000)
    assert output.sample_rate == 16000


@pytest.mark.parametrize(
    ("samples", "kept"),
    [(1000, 1000), (901, 901), (1099, 1099), (900, 1000), (450, 1000), (1100, 1000), (5000, 1000)],
)
def test_sound_is_as_long_as_its_video_within_a_frame(samples: int, kept: int) -> None:
    """Ten frames of 100 samples: what is missing is silence at the end, what is too much is cut there."""
    sound = torch.full((2, 1, samples), 0.5)
    raw = SimpleNamespace(frames=torch.zeros(2, 10, 3, 4, 4), audio=sound)
    audio = to_output(raw, frame_rate=8.0, sample_rate=800).audio
    assert audio is not None
    assert audio.shape == (2, 1, kept)
    assert (audio[:, :, :samples] == 0.5).all()
    assert (audio[:, :, samples:] == 0).all()
    unknown = to_output(raw, frame_rate=None, sample_rate=800).audio
    assert unknown is not None
    assert unknown.shape == (2, 1, samples)


def test_an_output_of_nothing_is_an_error() -> None:
    with pytest.raises(PipelineError, match="an output of type SimpleNamespace has no images, frames or audios"):
        to_output(SimpleNamespace(latents=PICTURES))


SOUND = np.linspace(-1, 1, 12, dtype=np.float32)


@pytest.mark.parametrize(
    ("payload", "shape"),
    [
        (SOUND, (1, 1, 12)),
        (SOUND.reshape(3, 4), (3, 1, 4)),
        (SOUND.reshape(2, 2, 3), (2, 2, 3)),
        (torch.from_numpy(SOUND).reshape(2, 2, 3), (2, 2, 3)),
        (torch.from_numpy(SOUND).reshape(3, 4).half(), (3, 1, 4)),
        ([SOUND[:4], SOUND[4:8]], (2, 1, 4)),
        ((torch.zeros(2, 5), torch.zeros(2, 5)), (2, 2, 5)),
        (list(SOUND), (1, 1, 12)),
        ([SOUND[:4], SOUND[:6]], (2, 1, 6)),
    ],
)
def test_sound_in_any_container_has_constant_rank(payload: Any, shape: tuple[int, int, int]) -> None:
    array = _extract_audio_slice(payload, 0, shape[0])
    assert array.shape == shape
    assert array.dtype == np.float32
    if shape[0] > 1:
        assert np.array_equal(_extract_audio_slice(payload, 1, 1)[0, :, : shape[2]], array[1][:, : shape[2]][:, :])


def test_a_slice_is_its_owners() -> None:
    payload = np.arange(12, dtype=np.float32).reshape(4, 3) / 12
    assert np.array_equal(_extract_audio_slice(payload, 1, 2)[:, 0], payload[1:3])


def test_shorter_sounds_end_in_silence_and_loud_ones_are_clipped() -> None:
    array = _extract_audio_slice([np.array([2.0, -3.0]), np.array([0.5])], 0, 2)
    assert array.tolist() == [[[1.0, -1.0]], [[0.5, 0.0]]]


@pytest.mark.parametrize(
    ("payload", "start", "count", "text"),
    [
        (SOUND.reshape(3, 4), 2, 2, "outputs 2 to 4 were asked for, but there are only 3"),
        (SOUND, 0, 2, "there are only 1"),
        (SOUND, 0, 0, "were asked for"),
        (SOUND, -1, 1, "were asked for"),
        ([np.zeros((1, 3)), np.zeros((2, 3))], 0, 2, "different numbers of channels"),
        (np.float32(1), 0, 1, "a single number is no sound"),
        (np.zeros((1, 1, 1, 1)), 0, 1, "is no sound"),
        ([np.zeros((1, 1, 1))], 0, 1, "no channels and samples"),
        ([], 0, 1, "there are only 0"),
    ],
)
def test_what_does_not_fit_is_an_error_and_never_handed_out_whole(
    payload: Any, start: int, count: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        _extract_audio_slice(payload, start, count)
