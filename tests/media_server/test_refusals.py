"""What a model of sound, video or pictures cannot do is refused before it queues, by the input's name."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.media_server.conftest import TEXT
from tests.support.client import HttpError
from tests.support.media_files import array, as_file, files, mask, picture

ONE = picture(1)
RAW, FILE = array(ONE), files(as_file(ONE))
NAN = float("nan")

REFUSED = [
    # the model, what is sent besides a prompt, and what the error must say
    ("sound", {"output_format": "mp4"}, r"output_format: 'mp4' is for video, but the output is audio; .*raw or wav or"),
    ("sound", {"output_format": "png"}, r"output_format: 'png' is for image, but the output is audio"),
    ("sound", {"duration_s": 3.5}, r"duration_s: 3.5 is not allowed; it must be from 0.1 to 3.0"),
    ("sound", {"duration_s": 0.0}, r"duration_s: 0.0 is not allowed; it must be from 0.1 to 3.0"),
    ("sound", {"duration_s": -1.0}, r"duration_s: -1.0 is not allowed"),
    ("sound", {"duration_s": NAN}, r"duration_s: nan is not allowed"),
    ("sound", {"num_frames": 9}, r"num_frames: StableAudioPipeline has no such argument; leave it out"),
    ("sound", {"frame_rate": 9.0}, r"frame_rate: StableAudioPipeline has no such argument"),
    ("sound", {"height": 32}, r"height: StableAudioPipeline has no such argument"),
    ("sound", {"image": RAW}, r"^image: .* has no such argument; leave it out"),
    ("sound", {"image_file": FILE}, r"^image(_file)?: .* has no such argument; leave it out"),
    ("clip", {"output_format": "wav"}, r"output_format: 'wav' is for audio, but the output is video; .*raw or mp4"),
    ("clip", {"output_format": "png"}, r"output_format: 'png' is for image, but the output is video"),
    ("clip", {"num_frames": 0}, r"num_frames: 0 is not allowed; it must be from 1 to 40"),
    ("clip", {"num_frames": 41}, r"num_frames: 41 is not allowed; it must be from 1 to 40"),
    ("clip", {"frame_rate": 0.0}, r"frame_rate: 0.0 is not allowed; it must be from 1.0 to 240.0"),
    ("clip", {"frame_rate": NAN}, r"frame_rate: nan is not allowed"),
    ("clip", {"duration_s": 1.0, "num_frames": 9}, r"duration_s: num_frames says the length already"),
    ("clip", {"duration_s": 60.0}, r"duration_s: 60.0 s at 25.0 frames a second are 1500 frames; at most 40 are"),
    ("clip", {"image": RAW}, r"^image: .* has no such argument; leave it out"),
    ("clip", {"strength": 0.5}, r"strength: LTXPipeline has no such argument"),
    ("talkie", {"duration_s": 4.5}, r"duration_s: 4.5 is not allowed; it must be from 0.1 to 4.0"),
    ("talkie", {"output_format": "webp"}, r"output_format: 'webp' is for image, but the output is video and audio"),
    ("animate", {}, r"image: it is missing; LTXImageToVideoPipeline needs a picture here"),
    ("animate", {"image": RAW, "image_file": FILE}, r"image_file: image was sent too; send one of them"),
    ("animate", {"image": RAW, "mask_image": RAW}, r"^mask_image: .* has no such argument"),
    ("inpaint", {"image": RAW}, r"mask_image: it is missing; StableDiffusionInpaintPipeline needs a picture"),
    ("inpaint", {"mask_image": array(mask(1))}, r"image: it is missing; StableDiffusionInpaintPipeline needs"),
    ("inpaint", {"image": RAW, "mask_image": RAW, "mask_image_file": FILE}, r"mask_image_file: mask_image was sent"),
    ("control", {"image": RAW}, r"control_image: it is missing; .*needs a picture here"),
    ("control", {"control_image": RAW}, r"image: it is missing"),
    ("redraw", {}, r"image: it is missing; StableDiffusionImg2ImgPipeline needs a picture here"),
    ("redraw", {"image": RAW, "output_format": "wav"}, r"output_format: 'wav' is for audio, but the output is image"),
    ("redraw", {"image": RAW, "strength": 1.5}, r"strength: 1.5 is not allowed; it must be from 0.0 to 1.0"),
    ("redraw", {"image": RAW, "strength": 0.5}, r"strength: 0.5 of 1 steps leaves none; it must be at least 1.0"),
    ("redraw", {"image": RAW, "strength": NAN}, r"strength: nan is not allowed"),
    ("redraw", {"image": RAW, "duration_s": 1.0}, r"duration_s: StableDiffusionImg2ImgPipeline has no such argument"),
    (TEXT, {"image": RAW}, r"^image: .* has no such argument; leave it out"),
    (TEXT, {"image_file": FILE}, r"^image(_file)?: .* has no such argument; leave it out"),
    (TEXT, {"output_format": "flac"}, r"output_format: 'flac' is for audio, but the output is image"),
    (TEXT, {"output_format": "mp4"}, r"output_format: 'mp4' is for video, but the output is image"),
]


def label(case) -> str:
    return f"{case[0]}-" + ",".join(n if isinstance(v, np.ndarray) else f"{n}={v}" for n, v in case[1].items())


@pytest.mark.parametrize("case", REFUSED, ids=label)
def test_refused_before_it_queues_21(served, case):
    """INVALID_ARG through the twin and on the stream; counted as rejected, and nothing runs."""
    model, sent, words = case
    before = served.metrics()
    with pytest.raises(InferenceServerException) as from_twin:
        served.infer(f"{model}_unary", prompt="a bell", num_inference_steps=1, **sent)
    with pytest.raises(InferenceServerException) as from_stream:
        served.stream(model, prompt="a bell", num_inference_steps=1, **sent).result()
    for caught in (from_twin, from_stream):
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT", caught.value
        assert re.search(words, caught.value.message()), caught.value.message()
        assert "Traceback" not in caught.value.message()
    delta = served.metrics() - before
    assert delta.get("diffusion_requests_total", model, outcome="rejected") == 2
    assert delta.get("diffusion_requests_total", model) == 2
    assert delta.get("diffusion_steps_total", model) == 0


@pytest.mark.parametrize("model", ["sound", "clip", "talkie", "animate"])
def test_sound_and_video_have_no_previews(served, model):
    """Asked for where there are none, they are refused, not left out in silence."""
    sent = {"image": RAW} if model == "animate" else {}
    with pytest.raises(InferenceServerException, match=r"preview_interval: .* has no previews; leave it out") as caught:
        served.stream(model, prompt="a bell", preview_interval=1, **sent).result()
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_longer_than_the_network_can(served):
    """A sound within the limit of the configuration, but over that of the pipeline: its own words, and no step."""
    before = served.metrics()
    with pytest.raises(InferenceServerException, match="StableAudioPipeline refuses it") as caught:
        served.infer("sound_unary", prompt="a bell", num_inference_steps=1, duration_s=2.9)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert (served.metrics() - before).get("diffusion_steps_total", "sound") == 0


@pytest.mark.parametrize("model", ["sound", "clip", "redraw"])
def test_a_refusal_through_generate(served, model):
    """`/generate`: 400 and the same words."""
    with pytest.raises(HttpError, match="output_format: 'pgn' is not one of") as caught:
        served.generate(f"{model}_unary", prompt="a bell", output_format="pgn")
    assert caught.value.status == 400
