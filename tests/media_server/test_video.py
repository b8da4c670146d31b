"""Video from a text and from a picture: raw, in files, streamed and cancelled, each as the bare pipeline makes it."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from tests.media_server.conftest import assert_differ, assert_same, difference
from tests.support.client import eventually
from tests.support.media_files import array, as_file, files, film, picture

MODEL = "clip_unary"
BASE = {"num_inference_steps": 2, "num_frames": 9, "height": 32, "width": 32}


def test_a_video_is_that_of_the_bare_pipeline(served, alone):
    """UINT8 (n, F, H, W, 3) with its rate, for two prompts and two outputs each in order (case 24)."""
    answer = served.infer(MODEL, prompt=["a ball", "a river"], seed=[5, 80], num_outputs_per_prompt=2, **BASE)
    assert set(answer.outputs) == {"video", "frame_rate", "seeds", "metrics"}
    video = answer.outputs["video"]
    assert video.dtype == np.uint8
    assert video.shape == (4, 9, 32, 32, 3)
    assert answer.outputs["frame_rate"].dtype == np.float32
    assert answer.outputs["frame_rate"].tolist() == [25.0]  # the pipeline's own
    assert answer.seeds == [5, 6, 80, 81]
    for prompt, seed, frames in zip(["a ball"] * 2 + ["a river"] * 2, answer.seeds, video, strict=True):
        assert_same(frames, alone("clip", prompt, seed=seed, **BASE).video[0])
    for other in video[1:]:
        assert_differ(video[0], other)


def test_each_output_can_be_made_again_15_16(served):
    """Cases 15, 16: unseeded outputs differ; the seed reported for each makes it again alone."""
    answer = served.infer(MODEL, prompt="a ball", num_outputs_per_prompt=2, **BASE)
    assert len(set(answer.seeds)) == 2
    for seed, frames in zip(answer.seeds, answer.outputs["video"], strict=True):
        assert_same(served.infer(MODEL, prompt="a ball", seed=seed, **BASE).outputs["video"][0], frames)
    assert_differ(*answer.outputs["video"])


def test_an_mp4_holds_the_frames(served):
    """One file for each output, with as many frames, about the same pixels, the rate, and no sound."""
    wanted = ("video", "frame_rate", "encoded")
    sent = {"prompt": "a ball", "seed": 5, "num_outputs_per_prompt": 2, "frame_rate": 8.0, **BASE}
    answer = served.infer(MODEL, outputs=wanted, output_format="mp4", **sent)
    assert answer.outputs["frame_rate"].tolist() == [8.0]
    assert len(answer.encoded) == 2
    video = answer.outputs["video"]
    for data, frames, other in zip(answer.encoded, video, video[::-1], strict=True):
        found = film(data)
        assert found.frames.shape == frames.shape == (9, 32, 32, 3)
        assert found.frame_rate == 8.0
        assert found.seconds == pytest.approx(9 / 8, abs=1e-3)
        assert found.track is None
        assert alike(found.frames, frames) > 0.7  # random pixels lose their colours in 4:2:0
        assert alike(found.frames, frames) > alike(found.frames, other) + 0.1


def test_a_video_through_generate_stream(served):
    """`/generate_stream`: step events, then the file as base64."""
    events = list(served.generate_stream("clip", prompt="a ball", seed=5, output_format="mp4;base64", **BASE))
    assert [event["event"] for event in events] == ["step", "step", "finished"]
    assert film(base64.b64decode(events[-1]["encoded"])).frames.shape == (9, 32, 32, 3)


def alike(a: np.ndarray, b: np.ndarray) -> float:
    """Return the correlation of the light of two videos."""
    return float(np.corrcoef(a.mean(axis=-1).ravel(), b.mean(axis=-1).ravel())[0, 1])


@pytest.mark.parametrize("frames", [1, 17])
def test_num_frames_has_effect(served, alone, frames):
    """The video has as many frames as were asked for."""
    sent = {**BASE, "num_frames": frames}
    answer = served.infer(MODEL, prompt="a ball", seed=5, **sent)
    assert answer.outputs["video"].shape == (1, frames, 32, 32, 3)
    assert answer.metrics["param_num_frames"] == frames
    assert_same(answer.outputs["video"], alone("clip", "a ball", seed=5, **sent).video)


def test_frame_rate_has_effect(served, alone):
    """The network is told the rate, and so is the client."""
    answers = [served.infer(MODEL, prompt="a ball", seed=5, frame_rate=rate, **BASE) for rate in (4.0, 30.0)]
    assert [answer.outputs["frame_rate"].tolist() for answer in answers] == [[4.0], [30.0]]
    assert [answer.metrics["param_frame_rate"] for answer in answers] == [4.0, 30.0]
    assert_same(answers[0].outputs["video"], alone("clip", "a ball", seed=5, frame_rate=4.0, **BASE).video)
    assert difference(*(answer.outputs["video"] for answer in answers)) > 1


def test_duration_is_as_many_frames_as_it_takes(served):
    """`duration_s` of a video is its length at the rate asked for."""
    sent = {name: value for name, value in BASE.items() if name != "num_frames"}
    answer = served.infer(MODEL, prompt="a ball", seed=5, duration_s=0.9, frame_rate=10.0, **sent)
    assert answer.outputs["video"].shape == (1, 9, 32, 32, 3)
    assert answer.metrics["param_duration_s"] == 0.9
    exact = served.infer(MODEL, prompt="a ball", seed=5, frame_rate=10.0, **BASE)
    assert_same(answer.outputs["video"], exact.outputs["video"])


def test_steps_are_told_in_order(served, alone):
    """The streaming model: a step event for each step, then the video."""
    call = served.stream("clip", prompt="a ball", seed=5, **{**BASE, "num_inference_steps": 5})
    answer = call.result()
    assert [(event.step, event.num_steps) for event in call.events("step")] == [(k, 5) for k in range(1, 6)]
    assert answer.event == "finished"
    assert_same(answer.outputs["video"], alone("clip", "a ball", seed=5, **{**BASE, "num_inference_steps": 5}).video)


def test_a_cancelled_video_stops_28(served):
    """Case 28: cancelled at its third step of many: counted as cancelled, soon after, and the next one is right."""
    before = served.metrics()
    call = served.stream("clip", prompt="a ball", num_inference_steps=900, num_frames=9).wait_step(3)
    call.cancel()
    eventually(
        lambda: (served.metrics() - before).get("diffusion_requests_total", "clip", outcome="cancelled") == 1,
        "the request is cancelled",
    )
    delta = served.metrics() - before
    assert 3 <= delta.get("diffusion_steps_total", "clip") < 600
    assert delta.get("diffusion_outputs_total", "clip") == 0
    assert served.infer(MODEL, prompt="a ball", **BASE).outputs["video"].shape == (1, 9, 32, 32, 3)


@pytest.mark.parametrize("kind", ["raw", "file"])
def test_a_picture_becomes_a_video(served, alone, kind):
    """Image to video: the picture given raw and as a file; another one gives another video."""
    first, second = picture(1), picture(2)
    sent = [
        {"image": array(image)} if kind == "raw" else {"image_file": files(as_file(image))} for image in (first, second)
    ]
    videos = [served.infer("animate_unary", prompt="it moves", seed=5, **BASE, **s).outputs["video"] for s in sent]
    assert videos[0].shape == (1, 9, 32, 32, 3)
    for video, image in zip(videos, (first, second), strict=True):
        assert_same(video, alone("animate", "it moves", seed=5, image=image, **BASE).video)
    assert_differ(*videos)


def test_each_prompt_has_its_own_picture(served, alone):
    """Two prompts with a picture each: each video is that of its own."""
    pictures, prompts = [picture(1), picture(2)], ["it moves", "it turns"]
    answer = served.infer("animate_unary", prompt=prompts, seed=[5, 6], image=array(*pictures), **BASE)
    for prompt, seed, image, video in zip(prompts, (5, 6), pictures, answer.outputs["video"], strict=True):
        assert_same(video, alone("animate", prompt, seed=seed, image=image, **BASE).video[0])


def test_two_videos_of_one_picture(served, alone):
    """Two outputs of one prompt and its picture, each as alone with its reported seed."""
    values = {"prompt": "it moves", "num_outputs_per_prompt": 2, "seed": 3, **BASE}
    answer = served.infer("animate_unary", image=array(picture(1)), **values)
    assert answer.outputs["video"].shape == (2, 9, 32, 32, 3)
    for seed, video in zip(answer.seeds, answer.outputs["video"], strict=True):
        assert_same(video, alone("animate", "it moves", seed=seed, image=picture(1), **BASE).video[0])
