"""Pictures survive the way into a file and back, as far as the format allows."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from diffusion_backend.errors import InvalidArgumentError
from diffusion_backend.media import FORMATS, OutputFormat
from diffusion_backend.request import DiffusionOutput


def pictures(count: int = 2) -> np.ndarray:
    """Smooth pictures, of different colours, 24 high and 40 wide."""
    rows, columns = np.mgrid[0:24, 0:40]
    base = np.stack([rows * 8, columns * 5, (rows + columns) * 3], axis=-1)
    return np.stack([np.roll(base, i, axis=-1) for i in range(count)]).astype(np.uint8)


def decode(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize(("name", "kind", "tolerance"), [("png", "PNG", 0), ("jpeg", "JPEG", 6), ("webp", "WEBP", 12)])
def test_a_picture_comes_back_as_it_was(name: str, kind: str, tolerance: int) -> None:
    images = pictures()
    encoded = OutputFormat.parse(name).encode(DiffusionOutput(images=images))
    assert len(encoded) == 2
    for data, image in zip(encoded, images, strict=True):
        assert Image.open(io.BytesIO(data)).format == kind
        assert decode(data).shape == image.shape
        assert np.abs(decode(data).astype(int) - image.astype(int)).mean() <= tolerance
    first, second = (decode(data).astype(int) for data in encoded)
    assert np.abs(first - second).mean() > 20, "the pictures were mixed up"


def test_text_is_the_base64_of_the_same_file() -> None:
    images = pictures(1)
    text = OutputFormat.parse("png;base64").encode_images(images)[0]
    assert text.decode("ascii")
    assert base64.b64decode(text, validate=True) == OutputFormat.parse("png").encode_images(images)[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, OutputFormat("raw", False)),
        ("raw", OutputFormat("raw", False)),
        ("png", OutputFormat("png", False)),
        (" PNG ", OutputFormat("png", False)),
        ("jpg", OutputFormat("jpeg", False)),
        ("jpeg;base64", OutputFormat("jpeg", True)),
        ("JPG;BASE64", OutputFormat("jpeg", True)),
        ("webp", OutputFormat("webp", False)),
    ],
)
def test_a_format_is_read_as_people_write_it(text: str | None, expected: OutputFormat) -> None:
    assert OutputFormat.parse(text) == expected
    assert expected.is_raw == (expected.name == "raw")


@pytest.mark.parametrize("text", ["", "gif", "pngg", "png;", "png;hex", "raw;base64", "png;base64;base64", ";base64"])
def test_an_unknown_format_is_refused_with_those_that_are_known(text: str) -> None:
    if text == "png;":
        assert OutputFormat.parse(text) == OutputFormat("png", False)  # an empty encoding is none
        return
    with pytest.raises(InvalidArgumentError) as caught:
        OutputFormat.parse(text)
    assert caught.value.field == "output_format"
    assert f"{text!r} is not one of {', '.join(FORMATS)}" in str(caught.value)


def test_a_misspelt_format_is_told_the_nearest() -> None:
    with pytest.raises(InvalidArgumentError, match=r"did you mean 'jpeg'\?"):
        OutputFormat.parse("jpeeg")
