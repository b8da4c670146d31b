"""Sound: raw, in files, of several outputs and prompts, each as the bare pipeline makes it."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.media_server.conftest import assert_differ, assert_same
from tests.support.media_files import sound
from tests.support.media_models import SOUND_MAX_S, SOUND_RATE

MODEL = "sound_unary"
BASE = {"num_inference_steps": 3, "duration_s": 1.0}
SAMPLES = SOUND_RATE


def check_sound(audio: np.ndarray, count: int, samples: int = SAMPLES) -> None:
    """FP32 (n, channels, samples) in [-1, 1], and no silence."""
    assert audio.dtype == np.float32
    assert audio.shape == (count, 2, samples)
    assert np.abs(audio).max() <= 1
    assert audio.std(axis=-1).min() > 0.001


@pytest.mark.parametrize("call", ["infer", "infer_http"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_sound_is_that_of_the_bare_pipeline(served, alone, call, count):
    """The shape has the same rank for one output and for several; the rate is told."""
    answer = getattr(served, call)(MODEL, prompt="a bell", seed=3, num_outputs_per_prompt=count, **BASE)
    assert set(answer.outputs) == {"audio", "sample_rate", "seeds", "metrics"}
    check_sound(answer.outputs["audio"], count)
    assert answer.outputs["sample_rate"].dtype == np.int32
    assert answer.outputs["sample_rate"].tolist() == [SOUND_RATE]
    expected = alone("sound", "a bell", seed=3, num_outputs_per_prompt=count, **BASE).audio
    assert_same(answer.outputs["audio"], expected)


@pytest.mark.parametrize("name", ["wav", "flac"])
def test_a_file_holds_the_samples_of_the_tensor(served, name):
    """`wav` and `flac` decode to what `raw` gives, within their 24 bits."""
    wanted = ("audio", "encoded", "sample_rate", "seeds")
    sent = {"prompt": ["a bell", "a drum"], "seed": [3, 9], "num_outputs_per_prompt": 2, **BASE}
    answer = served.infer(MODEL, outputs=wanted, output_format=name, **sent)
    check_sound(answer.outputs["audio"], 4)
    assert len(answer.encoded) == 4
    for data, samples in zip(answer.encoded, answer.outputs["audio"], strict=True):
        decoded, rate = sound(data, name.upper())
        assert rate == SOUND_RATE
        assert decoded.shape == samples.shape
        assert np.abs(decoded - samples).max() < 1e-6
    assert_differ(answer.outputs["audio"][0], answer.outputs["audio"][1])


def test_only_the_file_is_sent_unless_the_tensor_is_asked_for(served):
    """Without names an encoded answer has no tensor of the samples."""
    answer = served.infer(MODEL, prompt="a bell", output_format="wav", **BASE)
    assert set(answer.outputs) == {"encoded", "sample_rate", "seeds", "metrics"}


def test_a_sound_through_generate(served):
    """`/generate`: base64 in JSON, the same samples."""
    sent = {"prompt": "a bell", "seed": 3, **BASE}
    answer = served.generate(MODEL, output_format="wav;base64", **sent)
    samples, rate = sound(base64.b64decode(answer["encoded"]), "WAV")
    assert rate == answer["sample_rate"] == SOUND_RATE
    assert np.abs(samples - served.infer(MODEL, **sent).outputs["audio"][0]).max() < 1e-4


def test_several_prompts_come_in_order_24(served, alone):
    """Case 24: A, A, B, B, each equal to alone with the seed reported for it."""
    answer = served.infer(MODEL, prompt=["a bell", "a drum"], seed=[3, 70], num_outputs_per_prompt=2, **BASE)
    check_sound(answer.outputs["audio"], 4)
    assert answer.seeds == [3, 4, 70, 71]
    for prompt, seed, audio in zip(["a bell"] * 2 + ["a drum"] * 2, answer.seeds, answer.outputs["audio"], strict=True):
        assert_same(audio, alone("sound", prompt, seed=seed, **BASE).audio[0])
    for other in answer.outputs["audio"][1:]:
        assert_differ(answer.outputs["audio"][0], other)


def test_each_output_can_be_made_again_15_16(served):
    """Cases 15, 16: unseeded outputs differ; the seed reported for each makes it again alone."""
    answer = served.infer(MODEL, prompt="a bell", num_outputs_per_prompt=3, **BASE)
    assert len(set(answer.seeds)) == 3
    for seed, audio in zip(answer.seeds, answer.outputs["audio"], strict=True):
        again = served.infer(MODEL, prompt="a bell", seed=seed, **BASE)
        assert again.seeds == [seed]
        assert_same(again.outputs["audio"][0], audio)
    assert_differ(answer.outputs["audio"][0], answer.outputs["audio"][1])


def test_three_at_once_27(served, alone):
    """Case 27: three requests at once, of one output and of two: constant rank, all different, each its owner's."""
    sent = [("a bell", 3, 1, 4), ("a drum", 50, 2, 2), ("a whale", 900, 1, 6)]

    def call(prompt: str, seed: int, count: int, steps: int) -> np.ndarray:
        values = {"num_outputs_per_prompt": count, "num_inference_steps": steps, "duration_s": 1.0}
        return served.infer(MODEL, prompt=prompt, seed=seed, **values).outputs["audio"]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda values: call(*values), sent))
    for audio, (prompt, seed, count, steps) in zip(found, sent, strict=True):
        check_sound(audio, count)
        options = {"num_outputs_per_prompt": count, "num_inference_steps": steps, "duration_s": 1.0}
        assert_same(audio, alone("sound", prompt, seed=seed, **options).audio)
    together = np.concatenate(found)
    for i in range(len(together)):
        for j in range(i):
            assert_differ(together[i], together[j])


@pytest.mark.parametrize("seconds", [0.5, 1.25, SOUND_MAX_S])
def test_duration_has_effect(served, seconds):
    """`duration_s` is the length of the sound, and is told."""
    answer = served.infer(MODEL, prompt="a bell", seed=3, num_inference_steps=1, duration_s=seconds)
    check_sound(answer.outputs["audio"], 1, round(seconds * SOUND_RATE))
    assert answer.metrics["param_duration_s"] == seconds


@pytest.mark.parametrize(
    "change",
    [{"prompt": "a drum"}, {"negative_prompt": "a drum"}, {"num_inference_steps": 4}, {"guidance_scale": 1.0}],
    ids=str,
)
def test_each_parameter_changes_the_sound_17(served, change):
    """Case 17: each parameter has an effect on sound, too."""
    sent = {"prompt": "a bell", "seed": 3, **BASE}
    assert_differ(
        served.infer(MODEL, **sent).outputs["audio"], served.infer(MODEL, **{**sent, **change}).outputs["audio"]
    )


def test_steps_are_told_while_a_sound_is_made(served, alone):
    """The streaming model: a step event for each step, then the sound."""
    call = served.stream("sound", prompt="a bell", seed=3, **{**BASE, "num_inference_steps": 5})
    answer = call.result()
    assert [(event.step, event.num_steps) for event in call.events("step")] == [(k, 5) for k in range(1, 6)]
    assert_same(answer.outputs["audio"], alone("sound", "a bell", seed=3, **{**BASE, "num_inference_steps": 5}).audio)
