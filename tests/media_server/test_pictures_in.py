"""Pictures in: raw, as files, as base64; masks and control pictures; each answer as the bare pipeline makes it."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.media_server.conftest import TEXT, assert_differ, assert_same
from tests.support.client import eventually
from tests.support.media_files import array, as_file, files, mask, opened, picture

FIRST, SECOND = picture(1, 64), picture(2, 64)
EMOJI = {"num_inference_steps": 5, "strength": 0.6}
"""Three of the five steps are done: those after the picture's share."""

TINY = {"num_inference_steps": 3}
GUIDANCE = {"guidance_scale": 3.0}
"""What `redraw` has as its default; the bare pipeline does not know of it."""


def as_sent(kind: str, name: str, *pictures) -> dict[str, np.ndarray]:
    """Return pictures as an input of a kind: raw, png, jpeg, base64, data_url."""
    if kind == "raw":
        return {name: array(*pictures)}
    data = [as_file(image) for image in pictures]
    if kind == "base64":
        data = [base64.b64encode(content) for content in data]
    elif kind == "data_url":
        data = [b"data:image/png;base64," + base64.b64encode(content) for content in data]
    return {f"{name}_file": files(*data)}


@pytest.mark.parametrize("call", ["infer", "infer_http"])
@pytest.mark.parametrize("kind", ["raw", "png", "base64", "data_url"])
def test_a_picture_is_drawn_anew(served, alone, kind, call):
    """The emoji weights as image-to-image: the same picture, however it is sent; another one gives another."""
    sent = {"prompt": "red apple", "seed": 7, **EMOJI}
    found = [getattr(served, call)("redraw_unary", **sent, **as_sent(kind, "image", p)).images for p in (FIRST, SECOND)]
    assert found[0].shape == (1, 64, 64, 3)
    for images, image in zip(found, (FIRST, SECOND), strict=True):
        assert_same(images, alone("redraw", "red apple", seed=7, image=image, **EMOJI, **GUIDANCE).images)
    assert_differ(*found)


def test_a_cancelled_picture_stops_28(served):
    """Case 28: image-to-image, cancelled in the middle."""
    before = served.metrics()
    call = served.stream("redraw", prompt="red apple", image=array(picture(1, 96)), num_inference_steps=900)
    call.wait_step(2).cancel()
    eventually(
        lambda: (served.metrics() - before).get("diffusion_requests_total", "redraw", outcome="cancelled") == 1,
        "the request is cancelled",
    )
    delta = served.metrics() - before
    assert 2 <= delta.get("diffusion_steps_total", "redraw") < 600
    assert delta.get("diffusion_outputs_total", "redraw") == 0


def test_a_picture_as_json(served, alone):
    """HTTP `infer` with everything as JSON: numbers for the pixels."""
    answer = served.infer_http(
        "redraw_unary", outputs=["images"], binary=False, prompt="red apple", seed=7, image=array(FIRST), **EMOJI
    )
    expected = alone("redraw", "red apple", seed=7, image=FIRST, **EMOJI, **GUIDANCE).images
    assert_same(answer.images.astype(np.uint8), expected)


def test_a_picture_through_generate(served, alone):
    """`/generate`: base64 in, base64 out; and the events of `/generate_stream`."""
    body = {"prompt": "red apple", "seed": 7, "image_file": base64.b64encode(as_file(FIRST)).decode(), **EMOJI}
    expected = alone("redraw", "red apple", seed=7, image=FIRST, **EMOJI, **GUIDANCE).images[0]
    answer = served.generate("redraw_unary", output_format="png;base64", **body)
    assert_same(opened(base64.b64decode(answer["encoded"])), expected)
    events = list(served.generate_stream("redraw", output_format="png;base64", **body))
    assert [event["event"] for event in events] == ["step"] * 3 + ["finished"]
    assert_same(opened(base64.b64decode(events[-1]["encoded"])), expected)


def test_each_prompt_has_its_own_picture_24(served, alone):
    """Case 24: two prompts with a picture each and two outputs each, in order, each equal to alone with its seed."""
    sent = {"prompt": ["red apple", "blue heart"], "seed": [7, 90], "num_outputs_per_prompt": 2, **EMOJI}
    answer = served.infer("redraw_unary", image=array(FIRST, SECOND), **sent)
    assert answer.seeds == [7, 8, 90, 91]
    owners = zip(["red apple"] * 2 + ["blue heart"] * 2, [FIRST] * 2 + [SECOND] * 2, answer.seeds, strict=True)
    for found, (prompt, image, seed) in zip(answer.images, owners, strict=True):
        assert_same(found, alone("redraw", prompt, seed=seed, image=image, **EMOJI, **GUIDANCE).images[0])
    for other in answer.images[1:]:
        assert_differ(answer.images[0], other)


@pytest.mark.parametrize("kind", ["raw", "png"])
def test_several_outputs_of_one_picture_15(served, alone, kind):
    """Case 15: each of three outputs is made again alone by the seed reported for it."""
    sent = {"prompt": "red apple", "num_outputs_per_prompt": 3, **as_sent(kind, "image", FIRST), **EMOJI}
    answer = served.infer("redraw_unary", **sent)
    assert len(set(answer.seeds)) == 3
    for seed, found in zip(answer.seeds, answer.images, strict=True):
        assert_same(found, alone("redraw", "red apple", seed=seed, image=FIRST, **EMOJI, **GUIDANCE).images[0])
    assert_differ(answer.images[0], answer.images[1])


@pytest.mark.parametrize(("strength", "steps"), [(0.2, 2), (0.5, 5), (1.0, 10)])
def test_strength_sets_the_steps_17(served, alone, strength, steps):
    """Case 17: as many step events as the strength leaves, and the result of the bare pipeline."""
    values = {"num_inference_steps": 10, "strength": strength}
    call = served.stream("redraw", prompt="red apple", seed=7, image=array(FIRST), **values)
    answer = call.result()
    assert [(event.step, event.num_steps) for event in call.events("step")] == [(k, steps) for k in range(1, steps + 1)]
    assert answer.metrics["param_strength"] == strength
    assert_same(answer.images, alone("redraw", "red apple", seed=7, image=FIRST, **values, **GUIDANCE).images)


def test_strength_changes_the_picture_17(served):
    """Case 17: little strength leaves the picture nearly as it was, much of it does not."""
    found = [
        served.infer("redraw_unary", prompt="red apple", seed=7, image=array(FIRST), num_inference_steps=10, strength=s)
        for s in (0.2, 0.9)
    ]
    near, far = (float(np.abs(a.image.astype(int) - np.asarray(FIRST, dtype=int)).mean()) for a in found)
    assert near < far
    assert_differ(found[0].images, found[1].images)


def test_previews_are_pictures(served):
    """An image-to-image model has previews, as PNG where that was asked for."""
    call = served.stream(
        "redraw", prompt="red apple", image=array(FIRST), preview_interval=1, output_format="png", **EMOJI
    )
    call.result()
    previews = call.events("preview")
    assert [event.step for event in previews] == [1, 2]
    for event in previews:
        assert opened(event.encoded[0]).ndim == 3


@pytest.mark.parametrize("kind", ["raw", "png", "base64"])
def test_a_mask_says_where_to_paint(served, alone, kind):
    """Inpainting: the mask raw (with one channel, and with three) or as a file; another mask, another picture."""
    image, masks = picture(1), (mask(1), mask(2))
    sent = {"prompt": "a frog", "seed": 7, **TINY, **as_sent(kind, "image", image)}
    found = [served.infer("inpaint_unary", **sent, **as_sent(kind, "mask_image", m)).images for m in masks]
    for images, which in zip(found, masks, strict=True):
        assert images.shape == (1, 32, 32, 3)
        expected = alone("inpaint", "a frog", seed=7, image=image, mask_image=which, height=32, width=32, **TINY)
        assert_same(images, expected.images)
    assert_differ(*found)
    coloured = as_sent(kind, "mask_image", masks[0].convert("RGB"))
    assert_same(served.infer("inpaint_unary", **sent, **coloured).images, found[0])


def test_each_prompt_has_its_own_mask(served, alone):
    """Two prompts with a picture and a mask each."""
    pictures, masks = (picture(1), picture(2)), (mask(1), mask(2))
    sent = {"prompt": ["a frog", "a lake"], "seed": [7, 90], **TINY}
    answer = served.infer("inpaint_unary", image=array(*pictures), mask_image=array(*masks), **sent)
    for k, (prompt, seed) in enumerate([("a frog", 7), ("a lake", 90)]):
        values = {"image": pictures[k], "mask_image": masks[k], "height": 32, "width": 32}
        assert_same(answer.images[k], alone("inpaint", prompt, seed=seed, **values, **TINY).images[0])


@pytest.mark.parametrize("kind", ["raw", "png", "base64"])
def test_a_control_picture_leads(served, alone, kind):
    """A ControlNet beside the picture to begin with: each of the two has effect."""
    image, controls = picture(1), (picture(21), picture(22))
    sent = {"prompt": "a frog", "seed": 7, **TINY}
    found = [
        served.infer("control_unary", **sent, **as_sent(kind, "image", image), **as_sent(kind, "control_image", c))
        for c in controls
    ]
    for answer, control in zip(found, controls, strict=True):
        values = {"image": image, "control_image": control, "height": 32, "width": 32}
        assert_same(answer.images, alone("control", "a frog", seed=7, **values, **TINY).images)
    assert_differ(found[0].images, found[1].images)
    other = {**as_sent(kind, "image", picture(2)), **as_sent(kind, "control_image", controls[0])}
    assert_differ(found[0].images, served.infer("control_unary", **sent, **other).images)


def test_two_sizes_at_once_with_text_neighbours_10(served, alone):
    """Case 10: image-to-image at two sizes and text-to-image, all at once: each as alone."""
    large = picture(3, (96, 64))
    redraws = [("red apple", 7, FIRST), ("blue heart", 8, large), ("pizza", 9, SECOND), ("rocket", 10, large)]
    texts = [("red apple", 7, 64), ("pizza", 9, 96)]

    def redraw(prompt, seed, image):
        return served.infer("redraw_unary", prompt=prompt, seed=seed, image=array(image), **EMOJI).image

    def draw(prompt, seed, side):
        values = {"num_inference_steps": 4, "height": side, "width": 64, "guidance_scale": 3.0}
        return served.infer(f"{TEXT}_unary", prompt=prompt, seed=seed, **values).image

    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(redraw, *values) for values in redraws]
        futures += [pool.submit(draw, *values) for values in texts]
        found = [future.result() for future in futures]
    for (prompt, seed, image), drawn in zip(redraws, found[:4], strict=True):
        assert drawn.shape == (image.height, image.width, 3)
        assert_same(drawn, alone("redraw", prompt, seed=seed, image=image, **EMOJI, **GUIDANCE).images[0])
    for (prompt, seed, side), drawn in zip(texts, found[4:], strict=True):
        values = {"num_inference_steps": 4, "height": side, "width": 64, "guidance_scale": 3.0}
        assert_same(drawn, alone(TEXT, prompt, seed=seed, **values).images[0])
