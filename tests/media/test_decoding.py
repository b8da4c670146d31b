"""What callers send becomes the picture that a viewer shows, to the exact value."""

from __future__ import annotations

import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import ExifTags, Image

from diffusion_backend.media import decode_image, decode_mask

WHITE = [255, 255, 255]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, depth: int, colour: int, row: bytes, *chunks: bytes) -> bytes:
    """Return a PNG of one row, written by hand: Pillow writes not all that the format has.

    colour: 0 for grey, 2 for RGB, 3 for a palette, 4 for grey with alpha, 6 for RGB with alpha.
    """
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"\0" + row))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + pixels + chunk(b"IEND", b"")


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)  # type: ignore[arg-type]
    return buffer.getvalue()


def picture(mode: str, *pixels: object) -> Image.Image:
    """Return a picture of one row."""
    image = Image.new(mode, (len(pixels), 1))
    image.putdata(pixels)
    return image


def decoded(data: bytes | np.ndarray) -> list[list[int]]:
    """Return the pixels of a picture of one row."""
    image = decode_image(data, max_pixels=64)
    assert type(image) is Image.Image
    assert image.mode == "RGB"
    assert image.info == {}
    return np.asarray(image)[0].tolist()


def over_white(colour: int, alpha: int) -> int:
    return round((colour * alpha + 255 * (255 - alpha)) / 255)


def shorts(*values: int) -> bytes:
    return struct.pack(f">{len(values)}H", *values)


PALETTE = chunk(b"PLTE", bytes([10, 20, 30, 40, 50, 60, 70, 80, 90]))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(png(3, 1, 0, b"\x40"), [[0] * 3, WHITE, [0] * 3], id="1-bit"),
        pytest.param(png(4, 2, 0, b"\x1b"), [[v] * 3 for v in (0, 85, 170, 255)], id="2-bit grey"),
        pytest.param(png(2, 4, 0, b"\x1f"), [[17] * 3, WHITE], id="4-bit grey"),
        pytest.param(png(3, 8, 0, b"\x00\x07\xff"), [[0] * 3, [7] * 3, WHITE], id="8-bit grey"),
        pytest.param(
            png(5, 16, 0, shorts(0, 128, 129, 0x8000, 65535)), [[v] * 3 for v in (0, 0, 1, 128, 255)], id="16-bit grey"
        ),
        pytest.param(png(2, 8, 2, bytes(range(6))), [[0, 1, 2], [3, 4, 5]], id="RGB"),
        pytest.param(
            png(2, 16, 2, shorts(0, 256, 0x7FFF, 65535, 0x1234, 255)), [[0, 1, 127], [255, 18, 0]], id="16-bit RGB"
        ),
        pytest.param(png(3, 2, 3, b"\x18", PALETTE), [[10, 20, 30], [40, 50, 60], [70, 80, 90]], id="palette"),
        pytest.param(png(2, 8, 4, bytes([0, 255, 100, 51])), [[0] * 3, [over_white(100, 51)] * 3], id="LA"),
        pytest.param(png(2, 16, 4, shorts(0, 65535, 0, 0x8000)), [[0] * 3, [127] * 3], id="16-bit LA"),
        pytest.param(
            png(3, 8, 6, bytes([1, 2, 3, 255, 1, 2, 3, 0, 10, 20, 30, 128])),
            [[1, 2, 3], WHITE, [over_white(c, 128) for c in (10, 20, 30)]],
            id="RGBA",
        ),
        pytest.param(png(1, 16, 6, shorts(0x1234, 0, 65535, 0x8000)), [[136, 127, 255]], id="16-bit RGBA"),
    ],
)
def test_every_kind_of_png(data: bytes, expected: list[list[int]]) -> None:
    assert decoded(data) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(png(3, 1, 0, b"\x40", chunk(b"tRNS", shorts(0))), [WHITE, WHITE, WHITE], id="1-bit"),
        pytest.param(png(3, 8, 0, b"\x00\x07\x09", chunk(b"tRNS", shorts(7))), [[0] * 3, WHITE, [9] * 3], id="grey"),
        pytest.param(
            png(3, 16, 0, shorts(5, 6, 0x8000), chunk(b"tRNS", shorts(5))),
            [WHITE, [0] * 3, [128] * 3],
            id="16-bit grey",
        ),
        pytest.param(png(2, 8, 2, bytes(range(6)), chunk(b"tRNS", shorts(0, 1, 2))), [WHITE, [3, 4, 5]], id="RGB"),
        pytest.param(
            png(1, 16, 2, shorts(0x0500, 0x0600, 0x0700), chunk(b"tRNS", shorts(0x0105, 0x0106, 0x0107))),
            [[5, 6, 7]],
            id="16-bit RGB",
        ),
        pytest.param(
            png(3, 2, 3, b"\x18", PALETTE, chunk(b"tRNS", bytes([255, 0, 128]))),
            [[10, 20, 30], WHITE, [over_white(c, 128) for c in (70, 80, 90)]],
            id="palette",
        ),
    ],
)
def test_a_transparent_colour_of_a_png_is_white(data: bytes, expected: list[list[int]]) -> None:
    """Not of a 16-bit RGB: Pillow has read it as 8 bits by then, so the colour cannot be told apart any more."""
    assert decoded(data) == expected


def test_a_gif_is_its_first_frame_over_white() -> None:
    frames = [Image.new("RGB", (2, 1), colour) for colour in ("red", "blue")]
    animated = saved(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=100)
    assert Image.open(io.BytesIO(animated)).n_frames == 2
    assert decoded(animated) == [[255, 0, 0]] * 2
    image = picture("P", 0, 1)
    image.putpalette([9, 8, 7, 6, 5, 4])
    assert decoded(saved(image, "GIF", transparency=1)) == [[9, 8, 7], WHITE]
    assert decoded(saved(picture("L", 3, 200), "GIF")) == [[3] * 3, [200] * 3]


def test_an_animated_webp_or_png_is_its_first_frame() -> None:
    frames = [Image.new("RGB", (2, 1), colour) for colour in ("red", "blue")]
    for kind in ("WEBP", "PNG"):
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=100, lossless=True)
        assert Image.open(io.BytesIO(data)).n_frames == 2
        assert decoded(data) == [[255, 0, 0]] * 2


def test_a_webp_with_alpha_is_over_white() -> None:
    data = saved(picture("RGBA", (1, 2, 3, 255), (1, 2, 3, 0), (10, 20, 30, 128)), "WEBP", lossless=True, exact=True)
    assert decoded(data) == [[1, 2, 3], WHITE, [over_white(c, 128) for c in (10, 20, 30)]]


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (picture("1", 0, 255), [[0] * 3, WHITE]),
        (picture("L", 0, 77), [[0] * 3, [77] * 3]),
        (picture("RGB", (1, 2, 3), (4, 5, 6)), [[1, 2, 3], [4, 5, 6]]),
        (picture("RGBA", (1, 2, 3, 255), (1, 2, 3, 0)), [[1, 2, 3], [1, 2, 3]]),  # the fourth byte means nothing there
    ],
    ids=lambda value: getattr(value, "mode", ""),
)
def test_every_kind_of_bmp(image: Image.Image, expected: list[list[int]]) -> None:
    assert decoded(saved(image, "BMP")) == expected


def test_a_bmp_that_declares_alpha_is_over_white() -> None:
    masks = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    header = struct.pack("<IiiHHIIiiII", 108, 3, 1, 1, 32, 3, 12, 0, 0, 0, 0) + masks + b"\0" * 52
    pixels = bytes([3, 2, 1, 255, 3, 2, 1, 0, 30, 20, 10, 128])
    data = b"BM" + struct.pack("<IHHI", 14 + 108 + 12, 0, 0, 14 + 108) + header + pixels
    assert decoded(data) == [[1, 2, 3], WHITE, [over_white(c, 128) for c in (10, 20, 30)]]


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("L", 77, (77, 77, 77)),
        ("RGB", (200, 100, 50), (200, 100, 50)),
        ("CMYK", (0, 0, 0, 0), (255, 255, 255)),
        ("CMYK", (0, 0, 0, 255), (0, 0, 0)),
        ("CMYK", (255, 0, 0, 0), (0, 255, 255)),
        ("CMYK", (0, 128, 255, 51), (204, 102, 0)),
    ],
)
def test_every_kind_of_jpeg(mode: str, colour: object, expected: tuple[int, int, int]) -> None:
    data = saved(Image.new(mode, (8, 8), colour), "JPEG", quality=100, subsampling=0)  # type: ignore[arg-type]
    pixels = np.asarray(decode_image(data, max_pixels=64)).astype(int)
    assert np.abs(pixels - expected).max() <= 2


def test_a_jpeg_of_a_camera_with_two_pictures_is_the_first() -> None:
    first, second = (Image.new("RGB", (8, 8), colour) for colour in ("white", "black"))
    data = saved(first, "MPO", save_all=True, append_images=[second])
    assert np.asarray(decode_image(data, max_pixels=64)).min() >= 253


# The picture 1 2 3 / 4 5 6, as a camera that was held in each way stores it (the rows that it stores).
UPRIGHT = [[1, 2, 3], [4, 5, 6]]
STORED = {
    1: [[1, 2, 3], [4, 5, 6]],
    2: [[3, 2, 1], [6, 5, 4]],
    3: [[6, 5, 4], [3, 2, 1]],
    4: [[4, 5, 6], [1, 2, 3]],
    5: [[1, 4], [2, 5], [3, 6]],
    6: [[3, 6], [2, 5], [1, 4]],
    7: [[6, 3], [5, 2], [4, 1]],
    8: [[4, 1], [5, 2], [6, 3]],
}


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("orientation", STORED)
def test_a_picture_is_turned_as_exif_says(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    image = Image.fromarray(np.array(STORED[orientation], np.uint8) * 40)
    image = image.convert("RGB")
    data = saved(image, kind, exif=exif, lossless=True)
    upright = np.asarray(decode_image(data, max_pixels=6))
    assert (upright[..., 0] // 40).tolist() == UPRIGHT


def test_a_jpeg_is_turned_too() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    image = Image.new("RGB", (16, 8), "white")
    image.paste("black", (0, 0, 8, 8))
    pixels = np.asarray(decode_image(saved(image, "JPEG", exif=exif), max_pixels=128))
    assert pixels.shape == (16, 8, 3)
    assert pixels[:6].max() < 20
    assert pixels[10:].min() > 235


@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0garbage", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0"])
def test_damaged_metadata_do_not_spoil_a_picture(exif: bytes) -> None:
    assert decoded(saved(picture("RGB", (1, 2, 3)), "PNG", exif=exif)) == [[1, 2, 3]]


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_unknown_orientation_is_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    assert decoded(saved(picture("L", 1, 2, 3), "PNG", exif=exif)) == [[1] * 3, [2] * 3, [3] * 3]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        ([[[1, 2, 3], [4, 5, 6]]], [[1, 2, 3], [4, 5, 6]]),
        ([[1, 2]], [[1] * 3, [2] * 3]),
        ([[[1], [2]]], [[1] * 3, [2] * 3]),
        ([[[1, 2, 3, 255], [1, 2, 3, 0], [10, 20, 30, 128]]], [[1, 2, 3], WHITE, [132, 137, 142]]),
    ],
    ids=["RGB", "grey", "grey with an axis", "RGBA"],
)
def test_arrays_are_pictures(array: list, expected: list[list[int]]) -> None:
    given = np.array(array, np.uint8)
    assert decoded(given) == expected
    for other in (np.asfortranarray(given), np.repeat(given, 2, axis=1)[:, ::2]):  # whichever way they lie in memory
        assert decoded(other) == expected


def test_a_picture_does_not_share_memory_with_the_callers_array() -> None:
    for shape in ((2, 2), (2, 2, 1), (2, 2, 3), (2, 2, 4)):
        given = np.full(shape, 255, np.uint8)
        image = decode_image(given, max_pixels=4)
        given[:] = 0
        assert np.asarray(image).min() == 255


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_one_pixel_is_a_picture(kind: str) -> None:
    assert decode_image(saved(Image.new("RGB", (1, 1), "white"), kind), max_pixels=1).getpixel((0, 0)) == (255,) * 3


def test_a_mask_is_grey_and_white_where_transparent() -> None:
    mask = decode_mask(png(3, 8, 6, bytes([255, 255, 255, 255, 0, 0, 0, 255, 0, 0, 0, 0])), max_pixels=3)
    assert mask.mode == "L"
    assert np.asarray(mask).tolist() == [[255, 0, 255]]
    assert np.asarray(decode_mask(png(3, 16, 0, shorts(0, 0x8000, 65535)), max_pixels=3)).tolist() == [[0, 128, 255]]
    assert np.asarray(decode_mask(png(2, 1, 0, b"\x40"), max_pixels=2)).tolist() == [[0, 255]]
    # ITU-R 601: 0.299 R + 0.587 G + 0.114 B
    assert np.asarray(decode_mask(np.array([[[255, 0, 0], [0, 255, 0]]], np.uint8), max_pixels=2)).tolist() == [
        [76, 150]
    ]


@pytest.mark.parametrize("grey", range(0, 256, 5))
def test_a_grey_mask_keeps_its_values(grey: int) -> None:
    assert decode_mask(np.full((1, 1), grey, np.uint8), max_pixels=1).getpixel((0, 0)) == grey


def test_many_threads_decode_at_once_what_one_does_alone() -> None:
    rng = np.random.default_rng(3)
    images = [Image.fromarray(rng.integers(0, 256, (64, 48, 3), dtype=np.uint8)) for _ in range(4)]
    files = [saved(image, kind) for image in images for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
    alone = [decode_image(data, max_pixels=64 * 48).tobytes() for data in files]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            assert list(pool.map(lambda data: decode_image(data, max_pixels=64 * 48).tobytes(), files)) == alone
