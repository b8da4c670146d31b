"""Pictures survive the way into a file and back, as far as the format allows."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from diffusion_backend.errors import InvalidArgumentError
from diffusion_backend.media.images import decode_image, encode_image


def picture() -> np.ndarray:
    """A smooth picture, 24 high and 41 wide."""
    rows, columns = np.mgrid[0:24, 0:41]
    return np.stack([rows * 8, columns * 5, (rows + columns) * 3], axis=-1).astype(np.uint8)


@pytest.mark.parametrize(("name", "kind", "tolerance"), [("png", "PNG", 0), ("jpeg", "JPEG", 3), ("webp", "WEBP", 4)])
def test_a_picture_comes_back_as_it_was(name: str, kind: str, tolerance: float) -> None:
    data = encode_image(picture(), name)
    assert Image.open(io.BytesIO(data)).format == kind
    back = np.asarray(decode_image(data, max_pixels=24 * 41)).astype(int)
    assert back.shape == (24, 41, 3)
    assert np.abs(back - picture()).mean() <= tolerance


@pytest.mark.parametrize("name", ["png", "jpeg", "webp"])
@pytest.mark.parametrize("size", [(1, 1), (1, 7), (7, 1)])
def test_the_smallest_sizes_are_pictures_too(name: str, size: tuple[int, int]) -> None:
    image = np.full((*size, 3), 128, np.uint8)
    back = np.asarray(decode_image(encode_image(image, name), max_pixels=7))
    assert back.shape == image.shape
    assert np.abs(back.astype(int) - 128).max() <= 2


@pytest.mark.parametrize(("name", "limit"), [("jpeg", 65_500), ("webp", 16_383)])
def test_a_side_too_long_for_a_format_is_refused(name: str, limit: int) -> None:
    encode_image(np.zeros((1, limit, 3), np.uint8), name)
    for shape in ((1, limit + 1, 3), (limit + 1, 1, 3)):
        with pytest.raises(InvalidArgumentError) as caught:
            encode_image(np.zeros(shape, np.uint8), name)
        assert str(caught.value) == (
            f"output_format: {name!r} holds at most {limit} pixels a side, not {shape[1]}×{shape[0]}; "
            "give 'png' or 'raw'"
        )
