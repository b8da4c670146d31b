"""What is no picture is refused in words that help, before it costs anything, and nothing else comes out."""

from __future__ import annotations

import io
import random
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from diffusion_backend.errors import InvalidArgumentError
from diffusion_backend.media import decode_image, decode_mask

READABLE = "PNG, JPEG, WebP, GIF and BMP"
ARRAYS = "uint8 (H, W, 3), (H, W, 4), (H, W, 1) or (H, W)"
KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def saved(kind: str, size: tuple[int, int] = (24, 16), mode: str = "RGB") -> bytes:
    pixels = np.random.default_rng(5).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def refusal(data: Any, *, max_pixels: int = 1_000_000, field: str = "image") -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        decode_image(data, max_pixels=max_pixels, field=field)
    message = str(caught.value)
    assert caught.value.field == field
    assert caught.value.__cause__ is None
    for leak in ("Traceback", "BytesIO", "/", "PIL", "0x"):
        assert leak not in message, message
    return message.removeprefix(f"{field}: ")


def test_zero_bytes() -> None:
    assert refusal(b"") == f"it has zero bytes; it must be a picture: {READABLE} can be read"


@pytest.mark.parametrize(
    "data",
    [
        b"\0",
        b"no picture",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7\n",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        b"BM",
        b"RIFF\0\0\0\0WEBPVP8X",
        b"\xff\xd8\xff",
        saved("TIFF"),
        saved("PPM"),
        saved("ICO", (16, 16)),
        saved("TGA"),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_no_picture_or_of_another_format(data: bytes) -> None:
    message = refusal(data)
    assert message in (
        f"its {len(data)} bytes are no picture, or their beginning is damaged; {READABLE} can be read",
        f"its {len(data)} bytes are a picture that is damaged or cut short; send it again",
    )


def test_a_format_that_pillow_knows_but_callers_may_not_use() -> None:
    assert Image.open(io.BytesIO(saved("TIFF"))).format == "TIFF"
    assert refusal(saved("TIFF")).endswith(
        f"bytes are no picture, or their beginning is damaged; {READABLE} can be read"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_file(kind: str) -> None:
    data = saved(kind, (64, 48))
    half = data[: len(data) // 2]
    assert refusal(half) == f"its {len(half)} bytes are a picture that is damaged or cut short; send it again"


@pytest.mark.parametrize("kind", KINDS)
def test_every_beginning_of_a_file_is_refused_or_has_all_of_its_pixels(kind: str) -> None:
    data = saved(kind, (6, 5))
    whole = decode_image(data, max_pixels=30)
    refused = 0
    for length in range(len(data)):
        try:
            part = decode_image(data[:length], max_pixels=30)
        except InvalidArgumentError:
            refused += 1
        else:
            assert np.array_equal(np.asarray(part), np.asarray(whole)), length
    assert refused > len(data) * 0.8


@pytest.mark.parametrize("kind", KINDS)
def test_a_pixel_too_many(kind: str) -> None:
    data = saved(kind, (24, 16))
    assert decode_image(data, max_pixels=384).size == (24, 16)
    assert refusal(data, max_pixels=383) == "24×16 pixels are more than the 383 allowed; send a smaller picture"


def test_a_pixel_too_many_in_an_array() -> None:
    array = np.zeros((16, 24, 3), np.uint8)
    assert decode_image(array, max_pixels=384).size == (24, 16)
    assert refusal(array, max_pixels=383) == "24×16 pixels are more than the 383 allowed; send a smaller picture"


def claimed(kind: str, width: int, height: int) -> bytes:
    """Return a small file that says it is large."""
    data = bytearray(saved(kind, (8, 8)))
    if kind == "PNG":
        data[16:24] = struct.pack(">II", width, height)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    elif kind == "GIF":
        data[6:10] = struct.pack("<HH", width, height)
    elif kind == "BMP":
        data[18:26] = struct.pack("<ii", width, height)
    elif kind == "JPEG":
        at = data.index(b"\xff\xc0")
        data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    else:  # an animated WebP with a canvas larger than its one frame
        frame = b"\0" * 6 + struct.pack("<I", 7)[:3] * 2 + b"\1\0\0\0" + bytes(data[12:])
        sides = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
        body = b"VP8X" + struct.pack("<I", 10) + b"\2\0\0\0" + sides + b"ANIM" + struct.pack("<I", 6) + b"\0" * 6
        body += b"ANMF" + struct.pack("<I", len(frame)) + frame
        return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body
    return bytes(data)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", [3000, 9000, 12000, 16000, 65000])
def test_a_bomb_is_refused_before_it_is_decoded(kind: str, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = claimed(kind, side, side)
    loaded = []
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: loaded.append(self))
    tracemalloc.start()
    try:
        message = refusal(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message.endswith("more than the 1000000 allowed; send a smaller picture")
    assert loaded == []
    assert peak < 1_000_000


def test_a_bomb_of_text_is_refused() -> None:
    text = b"comment\0\0" + zlib.compress(b"x" * 50_000_000)
    data = saved("PNG")
    bomb = struct.pack(">I", len(text)) + b"zTXt" + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    assert "damaged or cut short" in refusal(data[:33] + bomb + data[33:])


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 2, 3), np.float32),
        np.zeros((2, 2, 3), np.int8),
        np.zeros((2, 2), np.uint16),
        np.zeros((2, 2), np.bool_),
        np.zeros((2, 2), np.object_),
        np.zeros((), np.uint8),
        np.zeros((4,), np.uint8),
        np.zeros((3, 2, 2), np.uint8),
        np.zeros((2, 2, 5), np.uint8),
        np.zeros((2, 2, 0), np.uint8),
        np.zeros((1, 2, 2, 3), np.uint8),
    ],
    ids=lambda array: f"{array.dtype} {array.shape}",
)
def test_an_array_that_is_no_picture(array: np.ndarray) -> None:
    expected = f"an array {array.dtype} {array.shape} is no picture; it must be {ARRAYS}, or the bytes of a file"
    if array.shape == (3, 2, 2):
        assert refusal(array) == expected
    assert refusal(array) == expected


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (0, 0), (0, 4, 1)])
def test_an_array_without_pixels(shape: tuple[int, ...]) -> None:
    assert refusal(np.zeros(shape, np.uint8)) == f"an array of the shape {shape} has no pixels"


@pytest.mark.parametrize("value", [None, "text", 3, [[1, 2]], io.BytesIO(b"x"), bytearray(b"x")])
def test_neither_bytes_nor_an_array(value: object) -> None:
    expected = f"{type(value).__name__} is no picture; it must be the bytes of a file, or {ARRAYS}"
    with pytest.raises(InvalidArgumentError) as caught:
        decode_image(value, max_pixels=1)  # type: ignore[arg-type]
    assert str(caught.value) == f"image: {expected}"


def test_the_field_is_named_as_the_caller_knows_it() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^mask_image: it has zero bytes") as caught:
        decode_mask(b"", max_pixels=1)
    assert caught.value.field == "mask_image"
    assert "zero bytes" in refusal(b"", field="control_image")


def only_a_picture_or_a_refusal(data: bytes) -> None:
    try:
        image = decode_image(data, max_pixels=4096)
    except InvalidArgumentError as error:
        refused = error
    else:
        assert image.mode == "RGB"
        assert 0 < image.width * image.height <= 4096
        return
    assert refused.field == "image"
    assert "/" not in refused.message


MAGIC = [b"", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\xff\xd8\xff\xe0", b"GIF89a", b"BM", b"RIFF\x20\0\0\0WEBPVP8L"]


@settings(max_examples=400, deadline=None)
@given(magic=st.sampled_from(MAGIC), rest=st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(magic: bytes, rest: bytes) -> None:
    only_a_picture_or_a_refusal(magic + rest)


@settings(max_examples=800, deadline=None)
@given(
    kind=st.sampled_from([(k, m) for k in KINDS for m in ("RGB", "L", "1", "P", "RGBA") if (k, m) != ("JPEG", "RGBA")]),
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=8),
    cut=st.one_of(st.none(), st.integers(0, 2**16)),
    extra=st.binary(max_size=8),
)
def test_mutated_pictures_never_raise_anything_else(
    kind: tuple[str, str], changes: list[tuple[int, int]], cut: int | None, extra: bytes
) -> None:
    name, mode = kind
    if name == "JPEG" and mode == "P":
        mode = "CMYK"
    data = bytearray(saved(name, (9, 7), mode))
    for at, value in changes:
        data[at % len(data)] = value
    if cut is not None:
        data = data[: cut % len(data)]
    only_a_picture_or_a_refusal(bytes(data) + extra)


def test_mutated_headers_never_raise_anything_else() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for kind in KINDS:
        data = saved(kind, (9, 7))
        for _ in range(300):
            broken = bytearray(data)
            for _ in range(rng.randrange(1, 4)):
                broken[rng.randrange(min(len(data), 80))] = rng.randrange(256)
            only_a_picture_or_a_refusal(bytes(broken))
