"""Case 25: whatever a caller sends as a picture is converted, or refused by the name of its input."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image
from tritonclient.utils import InferenceServerException

from tests.media_server.conftest import assert_same
from tests.support.media_files import array, as_file, files, picture

BASE = {"prompt": "red apple", "seed": 7, "num_inference_steps": 4, "strength": 0.5}
GUIDANCE = {"guidance_scale": 3.0}
PLAIN = picture(1, 64)


def expected(alone, image: Image.Image) -> np.ndarray:
    values = {name: value for name, value in BASE.items() if name != "prompt"}
    return alone("redraw", BASE["prompt"], image=image, **values, **GUIDANCE).images


def over_white(image: Image.Image) -> Image.Image:
    flat = Image.new("RGB", image.size, "white")
    flat.paste(image, mask=image.getchannel("A"))
    return flat


def grey16() -> Image.Image:
    return Image.fromarray(np.asarray(PLAIN.convert("L"), dtype=np.uint16) * 257)


def see_through() -> Image.Image:
    image = PLAIN.convert("RGBA")
    image.putalpha(picture(5, 64).convert("L"))
    return image


def gif() -> tuple[bytes, Image.Image]:
    """Return a GIF of two frames, and the first of them."""
    frames = [picture(k, 64).quantize(32) for k in (1, 2)]
    data = as_file(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=100)
    return data, frames[0].convert("RGB")


CONVERTED = {
    "jpeg": lambda: (data := as_file(PLAIN, "JPEG"), opened_rgb(data)),
    "webp": lambda: (data := as_file(PLAIN, "WEBP"), opened_rgb(data)),
    "bmp": lambda: (as_file(PLAIN, "BMP"), PLAIN),
    "gif": gif,
    "grey": lambda: (as_file(PLAIN.convert("L")), PLAIN.convert("L").convert("RGB")),
    "16-bit": lambda: (as_file(grey16()), PLAIN.convert("L").convert("RGB")),
    "cmyk": lambda: (data := as_file(PLAIN.convert("CMYK"), "JPEG"), opened_rgb(data)),
    "rgba": lambda: (as_file(see_through()), over_white(see_through())),
    "palette": lambda: (as_file(PLAIN.quantize(16)), PLAIN.quantize(16).convert("RGB")),
}


def opened_rgb(data: bytes) -> Image.Image:
    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


@pytest.mark.parametrize("name", CONVERTED)
def test_a_file_of_any_kind_is_converted_25(served, alone, name):
    """As the bare pipeline draws it from what a viewer shows."""
    data, shown = CONVERTED[name]()
    answer = served.infer("redraw_unary", image_file=files(data), **BASE)
    assert_same(answer.images, expected(alone, shown))


@pytest.mark.parametrize("channels", [1, 4])
def test_a_raw_picture_of_other_channels_is_converted_25(served, alone, channels):
    """Grey, and with alpha."""
    image = PLAIN.convert("L") if channels == 1 else see_through()
    shown = image.convert("RGB") if channels == 1 else over_white(image)
    assert array(image).shape == (1, 64, 64, channels)
    assert_same(served.infer("redraw_unary", image=array(image), **BASE).images, expected(alone, shown))


PNG = as_file(PLAIN)
REFUSED = {
    "nothing": (files(b""), "image_file: it has zero bytes"),
    "half": (files(PNG[: len(PNG) // 2]), "image_file: its .* damaged or cut short"),
    "broken": (files(b"\x00" * 40 + PNG[40:]), "image_file: its .* bytes are no picture"),
    "text": (files(b"this is, surely, no picture!"), "image_file: its 28 bytes are no picture"),
    "half base64": (files(base64.b64encode(PNG)[:301]), "image_file: it is not base64"),
    "tiff": (files(as_file(PLAIN, "TIFF")), "image_file: .* no picture.* PNG, JPEG, WebP, GIF and BMP can be read"),
    "too large": (files(as_file(Image.new("RGB", (300, 300)))), "image_file: 300×300 .*(256|65536)"),
    "bomb": (files(as_file(Image.new("1", (20_000, 20_000)))), "image_file: .*(256|65536)"),
    "raw too large": (np.zeros((1, 300, 300, 3), np.uint8), "image: 300×300 .*(256|65536)"),
    "raw two channels": (np.zeros((1, 64, 64, 2), np.uint8), r"image: an array uint8 \(64, 64, 2\) is no picture"),
    "raw no pixels": (np.zeros((1, 0, 64, 3), np.uint8), "image"),
    "1x1": (files(as_file(Image.new("RGB", (1, 1)))), "image: 1×1 pixels are too few; each side must be at least 8"),
    "raw 1x1": (np.zeros((1, 1, 1, 3), np.uint8), "image: 1×1 pixels are too few; each side must be at least 8"),
}


@pytest.mark.parametrize("call", ["infer", "stream"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_picture_is_refused_by_name_25(served, name, call):
    """INVALID_ARG before it queues, naming the input and what is allowed; the steps stay as they were."""
    value, words = REFUSED[name]
    sent = {**BASE, "image" if value.dtype == np.uint8 else "image_file": value}
    before = served.metrics()
    with pytest.raises(InferenceServerException, match=f"^(\\[.*\\] )?({words})") as caught:
        served.stream("redraw", **sent).result() if call == "stream" else served.infer("redraw_unary", **sent)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert "Traceback" not in caught.value.message()
    delta = served.metrics() - before
    assert delta.get("diffusion_steps_total", "redraw") == 0
    assert delta.get("diffusion_requests_total", "redraw", outcome="rejected") == 1
    assert delta.get("diffusion_requests_total", "redraw") == 1


def test_twenty_pictures_for_one_prompt_are_refused_25(served):
    """Case 25: 20 pictures where one is allowed."""
    with pytest.raises(InferenceServerException, match="image") as caught:
        served.infer("redraw_unary", image=np.zeros((20, 64, 64, 3), np.uint8), **BASE)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_pictures_of_several_sizes_that_set_the_output_are_refused(served):
    """They cannot be one tensor, and are not resized to the first one's size in silence."""
    sent = {**BASE, "prompt": ["red apple", "pizza"], "image_file": files(PNG, as_file(picture(2, 96)))}
    before = served.metrics()
    with pytest.raises(InferenceServerException, match="image: its pictures have several sizes") as caught:
        served.infer("redraw_unary", **sent)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert (served.metrics() - before).get("diffusion_steps_total", "redraw") == 0


def test_only_the_offenders_fail_11(served, alone):
    """Case 11: under load a broken picture fails alone; its neighbours are as alone."""
    good = [served.stream("redraw", image=array(PLAIN), **BASE) for _ in range(3)]
    bad = served.stream("redraw", image_file=files(PNG[:100]), **BASE)
    with pytest.raises(InferenceServerException, match="image_file"):
        bad.result()
    for call in good:
        assert_same(call.result().images, expected(alone, PLAIN))
