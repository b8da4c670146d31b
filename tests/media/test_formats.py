"""A format is read, checked against what an output has, and carried out for each output."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor

import av
import numpy as np
import pytest
import soundfile
from PIL import Image

from diffusion_backend.errors import InvalidArgumentError
from diffusion_backend.media import FORMATS, OutputFormat
from diffusion_backend.request import DiffusionOutput

IMAGES = np.stack([np.full((8, 12, 3), shade, np.uint8) for shade in (40, 200)])
VIDEO = np.stack([np.full((3, 16, 24, 3), shade, np.uint8) for shade in (40, 200)])
SOUND = np.stack([np.full((1, 800), level, np.float32) for level in (0.25, -0.5)])

PICTURES = DiffusionOutput(images=IMAGES)
FILM = DiffusionOutput(video=VIDEO, frame_rate=10.0)
TALKIE = DiffusionOutput(video=VIDEO, frame_rate=10.0, audio=SOUND, sample_rate=8000)
MUSIC = DiffusionOutput(audio=SOUND, sample_rate=8000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, OutputFormat("raw", False)),
        ("raw", OutputFormat("raw", False)),
        ("png", OutputFormat("png", False)),
        ("png;", OutputFormat("png", False)),
        (" PNG ", OutputFormat("png", False)),
        ("jpg", OutputFormat("jpeg", False)),
        ("jpeg;base64", OutputFormat("jpeg", True)),
        ("JPG;BASE64", OutputFormat("jpeg", True)),
        ("webp", OutputFormat("webp", False)),
        ("wav", OutputFormat("wav", False)),
        ("flac;base64", OutputFormat("flac", True)),
        ("mp4", OutputFormat("mp4", False)),
        ("MP4;base64", OutputFormat("mp4", True)),
    ],
)
def test_a_format_is_read_as_people_write_it(text: str | None, expected: OutputFormat) -> None:
    assert OutputFormat.parse(text) == expected
    assert expected.is_raw == (expected.name == "raw")


@pytest.mark.parametrize("text", ["", "gif", "pngg", "png;hex", "raw;base64", "png;base64;base64", ";base64", "mp3"])
def test_an_unknown_format_is_refused_with_those_that_are_known(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        OutputFormat.parse(text)
    assert caught.value.field == "output_format"
    assert f"{text!r} is not one of raw, png, jpeg, webp, wav, flac, mp4" in str(caught.value)


def test_a_misspelt_format_is_told_the_nearest() -> None:
    with pytest.raises(InvalidArgumentError, match=r"did you mean 'jpeg'\?"):
        OutputFormat.parse("jpeeg")


@pytest.mark.parametrize(
    ("output", "possible"),
    [
        (PICTURES, {"png", "jpeg", "webp"}),
        (FILM, {"mp4"}),
        (TALKIE, {"mp4", "wav", "flac"}),
        (MUSIC, {"wav", "flac"}),
        (DiffusionOutput(), set()),
    ],
    ids=["image", "video", "video and audio", "audio", "empty"],
)
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_goes_with_what_it_can_hold_and_with_nothing_else(
    name: str, output: DiffusionOutput, possible: set[str]
) -> None:
    chosen = OutputFormat.parse(name)
    if name in possible:
        chosen.check(output.modalities)
        assert len(chosen.encode(output)) == 2
    elif name == "raw":
        chosen.check(output.modalities)
    else:
        with pytest.raises(InvalidArgumentError, match=f"^output_format: {name!r} is for ") as early:
            chosen.check(output.modalities)
        with pytest.raises(InvalidArgumentError) as late:
            chosen.encode(output)
        assert str(early.value) == str(late.value)
        assert set(str(early.value).rpartition("it can be ")[2].split(" or ")) == possible | {"raw"}


@pytest.mark.parametrize(
    ("name", "modalities", "message"),
    [
        ("wav", ("image",), "'wav' is for audio, but the output is image; it can be raw or png or jpeg or webp"),
        ("png", ("video", "audio"), "'png' is for image, but the output is video and audio; it can be raw or wav or "),
        ("mp4", (), "'mp4' is for video, but the output is empty; it can be raw"),
    ],
)
def test_a_refusal_names_the_field_the_value_and_what_is_possible(
    name: str, modalities: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        OutputFormat(name).check(modalities)
    assert caught.value.field == "output_format"
    assert str(caught.value).startswith(f"output_format: {message}")


@pytest.mark.parametrize(
    ("name", "output"), [("png", PICTURES), ("jpeg", PICTURES), ("webp", PICTURES), ("wav", MUSIC), ("flac", MUSIC)]
)
def test_text_is_the_base64_of_the_same_file(name: str, output: DiffusionOutput) -> None:
    texts = OutputFormat.parse(f"{name};base64").encode(output)
    files = OutputFormat.parse(name).encode(output)
    assert [base64.b64decode(text, validate=True) for text in texts] == files
    assert all(text.isascii() for text in texts)


def test_text_of_a_video_is_an_mp4() -> None:
    text = OutputFormat.parse("mp4;base64").encode(TALKIE)[0]
    assert base64.b64decode(text, validate=True)[4:8] == b"ftyp"


def test_of_a_video_with_sound_a_wav_is_the_sound() -> None:
    assert OutputFormat("wav").encode(TALKIE) == OutputFormat("wav").encode(MUSIC)


@pytest.mark.parametrize("name", ["wav", "flac", "mp4"])
def test_previews_of_what_is_no_picture_are_png(name: str) -> None:
    assert OutputFormat(name).encode_images(IMAGES) == OutputFormat("png").encode_images(IMAGES)


def test_previews_of_pictures_are_in_their_own_format() -> None:
    data = OutputFormat("webp", base64=True).encode_images(IMAGES)[1]
    assert Image.open(io.BytesIO(base64.b64decode(data))).format == "WEBP"


def test_as_many_sounds_as_videos_are_needed() -> None:
    with pytest.raises(ValueError, match="zip"):
        OutputFormat("mp4").encode(DiffusionOutput(video=VIDEO, audio=SOUND[:1], sample_rate=8000, frame_rate=10.0))


@pytest.mark.parametrize(("name", "output"), [("png", PICTURES), ("flac", MUSIC), ("mp4", TALKIE)])
def test_many_threads_encode_at_once_what_one_does_alone(name: str, output: DiffusionOutput) -> None:
    alone = OutputFormat(name).encode(output)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: OutputFormat(name).encode(output), range(24)))
    assert all(result == alone for result in results)


def test_each_output_is_in_its_own_file() -> None:
    shades = [int(np.asarray(Image.open(io.BytesIO(data)))[0, 0, 0]) for data in OutputFormat("png").encode(PICTURES)]
    assert shades == [40, 200]
    levels = [float(soundfile.read(io.BytesIO(data))[0][0]) for data in OutputFormat("wav").encode(MUSIC)]
    assert levels == [0.25, -0.5]
    shades, levels = [], []
    for data in OutputFormat("mp4").encode(TALKIE):
        with av.open(io.BytesIO(data)) as container:
            shades.append(float(next(container.decode(video=0)).to_ndarray(format="rgb24").mean()))
        with av.open(io.BytesIO(data)) as container:
            levels.append(float(next(container.decode(audio=0)).to_ndarray()[0, 300:500].mean()))
    assert shades == pytest.approx([40, 200], abs=3)
    assert levels == pytest.approx([0.25, -0.5], abs=0.05)
