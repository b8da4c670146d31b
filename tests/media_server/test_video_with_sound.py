"""Video with sound: each output has its own track, as long as its frames."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.media_server.conftest import assert_differ, assert_same
from tests.support.media_files import film, sound
from tests.support.media_models import TRACK_RATE

MODEL = "talkie_unary"
FRAMES = 17
RATE = 24.0
BASE = {"num_inference_steps": 2, "num_frames": FRAMES, "frame_rate": RATE, "height": 32, "width": 32}


def test_each_output_has_its_own_track_26(served, alone):
    """Case 26: two outputs: own frames and own sound, as long as each other within a frame; both rates are told."""
    answer = served.infer(MODEL, prompt="a bell rings", seed=5, num_outputs_per_prompt=2, **BASE)
    assert set(answer.outputs) == {"video", "frame_rate", "audio", "sample_rate", "seeds", "metrics"}
    video, audio = answer.outputs["video"], answer.outputs["audio"]
    assert (video.dtype, video.shape) == (np.uint8, (2, FRAMES, 32, 32, 3))
    assert audio.dtype == np.float32
    assert audio.shape[:2] == (2, 2)
    assert np.abs(audio).max() <= 1
    assert answer.outputs["frame_rate"].tolist() == [RATE]
    assert answer.outputs["sample_rate"].tolist() == [TRACK_RATE]
    assert audio.shape[2] / TRACK_RATE == pytest.approx(FRAMES / RATE, abs=1 / RATE)
    assert_differ(*video)
    assert_differ(*audio)
    for k, seed in enumerate(answer.seeds):
        expected = alone("talkie", "a bell rings", seed=seed, **BASE)
        assert_same(video[k], expected.video[0])
        assert_same(audio[k], expected.audio[0])


def test_several_prompts_at_once_with_others_24_27(served, alone):
    """Cases 24, 27: two requests at once, one of two prompts with two outputs each: every sound is its owner's."""

    def call(prompt: str | list[str], seed: int | list[int], count: int, steps: int) -> dict[str, np.ndarray]:
        sent = {**BASE, "num_inference_steps": steps, "num_outputs_per_prompt": count}
        return served.infer(MODEL, prompt=prompt, seed=seed, **sent).outputs

    with ThreadPoolExecutor(2) as pool:
        many = pool.submit(call, ["a bell", "a drum"], [5, 70], 2, 2)
        one = pool.submit(call, "a whale", 900, 1, 3)
    owners = [(many, k, p, s, 2) for k, (p, s) in enumerate([("a bell", 5), ("a bell", 6), ("a drum", 70)])]
    owners += [(many, 3, "a drum", 71, 2), (one, 0, "a whale", 900, 3)]
    for future, k, prompt, seed, steps in owners:
        expected = alone("talkie", prompt, seed=seed, **{**BASE, "num_inference_steps": steps})
        assert future.result()["audio"].ndim == 3
        assert_same(future.result()["video"][k], expected.video[0])
        assert_same(future.result()["audio"][k], expected.audio[0])


def test_an_mp4_holds_frames_and_sound_26(served):
    """Case 26: the tracks of each file are as long as each other within a frame, and are this output's."""
    sent = {"prompt": "a bell rings", "seed": 5, "num_outputs_per_prompt": 2, "output_format": "mp4", **BASE}
    answer = served.infer(MODEL, outputs=("video", "audio", "encoded"), **sent)
    films = [film(data) for data in answer.encoded]
    assert len(films) == 2
    for k, found in enumerate(films):
        assert found.frames.shape == (FRAMES, 32, 32, 3)
        assert found.frame_rate == RATE
        assert found.track is not None
        assert (found.sample_rate, found.track.shape[0]) == (TRACK_RATE, 2)
        assert found.seconds == pytest.approx(FRAMES / RATE, abs=1e-3)
        assert found.track_seconds == pytest.approx(found.seconds, abs=1 / RATE)
        # Lossy, but nearer to its own sound than to the other's.
        own, other = (_distance(found.track, answer.outputs["audio"][i]) for i in (k, 1 - k))
        assert own < other


def _distance(track: np.ndarray, audio: np.ndarray) -> float:
    count = min(track.shape[1], audio.shape[1])
    return float(np.square(track[:, :count] - audio[:, :count]).mean())


def test_the_sound_alone_can_be_had_as_a_file(served):
    """`wav` of a video with sound: its tracks."""
    sent = {"prompt": "a bell rings", "seed": 5, "output_format": "wav", **BASE}
    answer = served.infer(MODEL, outputs=("audio", "encoded"), **sent)
    samples, rate = sound(answer.encoded[0], "WAV")
    assert rate == TRACK_RATE
    assert np.abs(samples - answer.outputs["audio"][0]).max() < 1e-6


@pytest.mark.parametrize(("frames", "rate"), [(25, 24.0), (9, 6.0), (9, 24.0), (17, 30.0)])
def test_frames_and_rate_set_the_length_of_the_sound(served, frames, rate):
    """More frames, or a lower rate: a longer sound. (The vocoder of the last two is more than a frame too short.)"""
    sent = {**BASE, "num_frames": frames, "frame_rate": rate, "num_inference_steps": 1}
    answer = served.infer(MODEL, prompt="a bell", seed=5, **sent)
    assert answer.outputs["video"].shape[1] == frames
    assert answer.outputs["frame_rate"].tolist() == [rate]
    assert answer.outputs["audio"].shape[2] / TRACK_RATE == pytest.approx(frames / rate, abs=1 / rate)


def test_duration_sets_frames_and_sound(served):
    """`duration_s` is the length of both."""
    sent = {name: value for name, value in BASE.items() if name != "num_frames"}
    answer = served.infer(MODEL, prompt="a bell", seed=5, duration_s=FRAMES / RATE, **sent)
    assert answer.outputs["video"].shape[1] == FRAMES
    assert_same(answer.outputs["audio"], served.infer(MODEL, prompt="a bell", seed=5, **BASE).outputs["audio"])
