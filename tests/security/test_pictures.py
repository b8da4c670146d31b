"""Pictures as weapons: refused before they take memory or time, and the server draws on."""

from __future__ import annotations

import base64
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image
from tritonclient.utils import InferenceServerException

from diffusion_backend.errors import InvalidArgumentError
from diffusion_backend.media import decode_image
from diffusion_backend.serve import TritonServer
from tests.support.client import Served
from tests.support.media_files import as_file, files

SMALL = {"prompt": "red apple", "num_inference_steps": 2, "strength": 0.5}
SIDE = 30_000


def flat(kind: str, width: int, height: int, mode: str = "L") -> bytes:
    """Return a file of one colour, which is far smaller than its pixels."""
    return as_file(Image.new(mode, (width, height)), kind)


def png_of_one_colour(width: int, height: int) -> bytes:
    """Return a PNG whose rows are really there, made without holding them."""
    packed = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    data = b"".join(packed.compress(row * 1000) for _ in range(height // 1000)) + packed.flush()

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def gif_with_a_frame_beyond_its_screen() -> bytes:
    data = bytearray(flat("GIF", 4000, 4000))
    data[6:10] = struct.pack("<HH", 8, 8)
    return bytes(data)


def jpeg_of_many_scans(scans: int, side: int = 64) -> bytes:
    """Return a progressive JPEG with its last scan, of some bytes, again and again."""
    data = as_file(Image.new("RGB", (side, side), "grey"), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * scans + data[-2:]


def exif_bomb() -> bytes:
    """Return a JPEG whose EXIF directory points into itself and far beyond its end."""
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", 2)
    exif += struct.pack("<HHII", 0x8769, 4, 1, 8)  # the sub-directory is the directory
    exif += struct.pack("<HHII", 0x0112, 2, 2**31, 2**31)  # an orientation of two billion letters
    exif += struct.pack("<I", 8)
    data = as_file(Image.new("RGB", (16, 16), "red"), "JPEG")
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + data[2:]


SVG = b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><svg width="8" height="8">&e;</svg>'
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n(/tmp/attack) (w) file closefile showpage\n%%EOF\n"
PDF = b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF\n"
NOT_ALLOWED = {
    "SVG": SVG,
    "EPS": EPS,
    "PDF": PDF,
    "TIFF": flat("TIFF", 8, 8),
    "ICO": flat("ICO", 16, 16, "RGB"),
    "TGA": flat("TGA", 8, 8),
    "PPM": flat("PPM", 8, 8),
    "a path": b"/etc/passwd",
    "an address": b"http://127.0.0.1/picture.png",
}
BOMBS = {
    "PNG": png_of_one_colour(SIDE, SIDE),
    "GIF": flat("GIF", 4000, 4000),
    "GIF, beyond its screen": gif_with_a_frame_beyond_its_screen(),
    "WebP": flat("WEBP", 8000, 8000, "RGB"),
    "TIFF": as_file(Image.new("1", (12_000, 12_000)), "TIFF", compression="group4"),
    "JPEG": flat("JPEG", 5000, 5000),
    "BMP": flat("BMP", 257, 257),
}
SMALL_ENOUGH = {name: data for name, data in BOMBS.items() if len(data) <= 300_000}


def refusal(served: Served, data: bytes) -> str:
    """Return what the twin says to a picture; it must be the caller's fault."""
    with pytest.raises(InferenceServerException) as caught:
        served.infer("redraw_unary", **SMALL, image_file=files(data))
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT", caught.value
    message = caught.value.message()
    assert message.startswith("image_file: ")
    assert "Traceback" not in message
    assert "/etc" not in message
    return message


def memory(server: TritonServer) -> int:
    """Return the bytes that the server and its models' processes hold for themselves."""
    return sum(psutil.Process(pid).memory_full_info().uss for pid in (server.pid, *server.stub_pids()))


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(served: Served, name: str) -> None:
    message = refusal(served, BOMBS[name])
    assert (
        "are more than the 65536 allowed" in message or "are no picture" in message or "bytes are too many" in message
    )


@pytest.mark.usefixtures("settled")
def test_the_memory_stays_flat_under_bombs(served: Served, drawing: TritonServer) -> None:
    """A hundred of them; one alone would take 100 MB and more if it were decoded."""
    assert len(SMALL_ENOUGH) >= 5
    for data in SMALL_ENOUGH.values():
        refusal(served, data)
    before = memory(drawing)
    for _ in range(100 // len(SMALL_ENOUGH)):
        for data in SMALL_ENOUGH.values():
            refusal(served, data)
    grown = memory(drawing) - before
    print(f"grown by {grown / 2**20:.1f} MiB")
    assert grown < 64 * 2**20


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("name", NOT_ALLOWED)
def test_a_format_that_is_not_allowed_is_refused(served: Served, name: str) -> None:
    """Before any decoder of it is asked: above all none that runs a program, or reads a file or an address."""
    message = refusal(served, NOT_ALLOWED[name])
    assert message.endswith(("PNG, JPEG, WebP, GIF and BMP can be read", "it is not base64: Incorrect padding"))
    assert not Path("/tmp/attack").exists()


@pytest.mark.usefixtures("settled")
def test_a_file_that_is_too_large_is_refused_unread(served: Served) -> None:
    """As bytes and as base64 text; the limit is of the file."""
    noise = np.random.default_rng(1).integers(0, 256, 300_001, np.uint8).tobytes()
    assert refusal(served, noise) == "image_file: 300001 bytes are too many; at most 300000 are allowed"
    assert (
        refusal(served, base64.b64encode(noise)) == "image_file: 300001 bytes are too many; at most 300000 are allowed"
    )
    assert refusal(served, b"A" * 600_001) == "image_file: 600001 bytes are too many; at most 600000 are allowed"


@pytest.mark.usefixtures("settled")
def test_a_jpeg_of_many_scans_is_refused(served: Served) -> None:
    """Each scan costs a pass over all pixels, for some thirty bytes."""
    assert "JPEG of more than 50 scans" in refusal(served, jpeg_of_many_scans(3000, 256))
    usual = as_file(Image.new("RGB", (64, 64), "red"), "JPEG", progressive=True)
    assert usual.count(b"\xff\xda") > 5
    assert served.infer("redraw_unary", **SMALL, image_file=files(usual)).images.shape == (1, 64, 64, 3)


def test_a_jpeg_of_many_scans_takes_no_time() -> None:
    """At the default limits, decoding this file would take longer than anyone waits."""
    bomb = jpeg_of_many_scans(20_000, 4096)
    began = time.monotonic()
    with pytest.raises(InvalidArgumentError, match="of more than 50 scans; send it as a baseline JPEG, or as PNG"):
        decode_image(bomb, max_pixels=4096**2)
    assert time.monotonic() - began < 30


@pytest.mark.usefixtures("settled")
def test_exif_that_leads_astray_is_ignored(served: Served) -> None:
    """The picture is taken as it lies."""
    assert served.infer("redraw_unary", **SMALL, image_file=files(exif_bomb())).images.shape == (1, 16, 16, 3)


@pytest.mark.usefixtures("settled")
def test_half_a_picture_is_refused(served: Served) -> None:
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        whole = as_file(Image.effect_noise((64, 64), 50).convert("RGB"), kind)
        assert "damaged or cut short" in refusal(served, whole[: len(whole) // 2])


def test_a_picture_never_opens_a_file_or_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the bytes say. What is opened is noted: an exception would be taken for a damaged picture."""
    noted: list[tuple[object, ...]] = []

    def opened(*arguments: object, **options: object) -> None:
        noted.append(arguments)
        raise OSError("not in this test")

    Image.init()  # which reads Pillow's own files
    monkeypatch.setattr("builtins.open", opened)
    monkeypatch.setattr("socket.socket.connect", opened)
    monkeypatch.setattr("subprocess.Popen.__init__", opened)
    for data in [*NOT_ALLOWED.values(), *SMALL_ENOUGH.values(), exif_bomb()]:
        assert isinstance(data, bytes)
        try:
            picture = decode_image(data, max_pixels=4096)
        except InvalidArgumentError:
            continue
        assert picture.size == (16, 16)
    monkeypatch.undo()
    assert noted == []
