"""Every input has an effect, and a bad value of it is refused before it queues: named, with what is allowed."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.server.conftest import SMALL, same
from tests.support.client import HttpError

BASE = {"prompt": "red apple", "seed": 7, "num_inference_steps": 6, "height": 32, "width": 32}

INVALID = [
    # what is sent, then what the error must name: the field, the value, and what is allowed
    ({"prompt": b"\xff\xfe"}, r"^prompt: it is not UTF-8 \(byte 0\)"),
    ({"prompt": "a" * 16_385}, r"^prompt: 16385 bytes .*at most 16384"),
    ({"negative_prompt": "a" * 16_385}, r"^negative_prompt: 16385 bytes .*at most 16384"),
    ({"negative_prompt": b"ab\xff"}, r"^negative_prompt: it is not UTF-8 \(byte 2\)"),
    ({"num_inference_steps": 0}, r"^num_inference_steps: 0 is not allowed; it must be from 1 to 1000$"),
    ({"num_inference_steps": -1}, r"^num_inference_steps: -1 is not allowed; it must be from 1 to 1000$"),
    ({"num_inference_steps": 2**31 - 1}, r"^num_inference_steps: 2147483647 is not allowed; .*from 1 to 1000$"),
    ({"height": 0}, r"^height: 0 is not allowed; it must be from 1 to 4096$"),
    ({"height": -8}, r"^height: -8 is not allowed; it must be from 1 to 4096$"),
    ({"height": 63}, r"^height: 63 is not allowed; it must be a multiple of \d+$"),
    ({"width": 0}, r"^width: 0 is not allowed; it must be from 1 to 4096$"),
    ({"width": -8}, r"^width: -8 is not allowed; it must be from 1 to 4096$"),
    ({"width": 2**31 - 1}, r"^width: 2147483647 is not allowed; it must be from 1 to 4096$"),
    ({"num_frames": 0}, r"^num_frames: 0 is not allowed; it must be from 1 to 1024$"),
    ({"num_frames": -8}, r"^num_frames: -8 is not allowed; it must be from 1 to 1024$"),
    ({"num_frames": 8}, r"^num_frames: StableDiffusionPipeline has no such argument; leave it out$"),
    ({"num_outputs_per_prompt": 0}, r"^num_outputs_per_prompt: 0 is not allowed; it must be from 1 to 64$"),
    ({"num_outputs_per_prompt": -8}, r"^num_outputs_per_prompt: -8 is not allowed; it must be from 1 to 64$"),
    ({"num_outputs_per_prompt": 65}, r"^num_outputs_per_prompt: 65 is not allowed; it must be from 1 to 64$"),
    ({"num_outputs_per_prompt": 2**31 - 1}, r"^num_outputs_per_prompt: 2147483647 is not allowed; .*1 to 64$"),
    ({"num_outputs_per_prompt": 17}, r"^num_outputs_per_prompt: 17 for 1 prompts .*at most 16 a request"),
    (
        {"prompt": ["a"] * 9, "num_outputs_per_prompt": 2},
        r"^num_outputs_per_prompt: .*18 outputs; at most 16 a request",
    ),
    ({"seed": -1}, r"^seed: -1 is not allowed; it must be from 0 to 9223372036854775807, or left out"),
    ({"seed": -(2**63)}, r"^seed: -9223372036854775808 is not allowed"),
    ({"guidance_scale": float("nan")}, r"^guidance_scale: nan is not allowed; it must be a number from 0 to 1000$"),
    ({"guidance_scale": float("inf")}, r"^guidance_scale: inf is not allowed; it must be a number from 0 to 1000$"),
    ({"guidance_scale": -1.0}, r"^guidance_scale: -1.0 is not allowed; it must be a number from 0 to 1000$"),
    ({"guidance_scale": 1001.0}, r"^guidance_scale: 1001.0 is not allowed; it must be a number from 0 to 1000$"),
    ({"output_format": "pgn"}, r"^output_format: 'pgn' is not one of raw, png, .*did you mean 'png'\?"),
    ({"output_format": "raw;base64"}, r"^output_format: 'raw;base64' is not one of raw, png"),
    ({"output_format": "png;base32"}, r"^output_format: 'png;base32' is not one of raw, png"),
    ({"output_format": b"\xff"}, r"^output_format: it is not UTF-8"),
    ({"extra_args": "{"}, r"^extra_args: it is not JSON: .*line 1"),
    ({"extra_args": "[1]"}, r"^extra_args: it must be a JSON object, not list$"),
    ({"extra_args": "[" * 60_000}, r"^extra_args: it is not JSON: nested too deeply$"),
    ({"extra_args": {"etta": 1}}, r"^extra_args: 'etta' is not an argument of StableDiffusion.*did you mean 'eta'\?"),
    ({"extra_args": {"latents": 1}}, r"^extra_args: 'latents' cannot be set here; allowed are .*eta"),
    ({"extra_args": {"prompt": "b"}}, r"^extra_args: 'prompt' cannot be set here; allowed are .*eta"),
    ({"extra_args": {"num_images_per_prompt": 3}}, r"^extra_args: 'num_images_per_prompt' cannot be set here"),
    ({"extra_args": {"scheduler": 3}}, r"^extra_args: 'scheduler' must be the name of a scheduler's class$"),
    ({"extra_args": {"scheduler": "DDIM"}}, r"^scheduler: 'DDIM' is not one of .*DDIMScheduler"),
    ({"extra_args": {"timesteps": [3, 2, 1]}}, r"^arguments: StableDiffusionPipeline refuses it: .*timestep schedules"),
]

STREAM_ONLY = [
    ({"preview_interval": -1}, r"^preview_interval: -1 is not allowed; it must be from 0 to 1000$"),
    ({"preview_interval": 1001}, r"^preview_interval: 1001 is not allowed; it must be from 0 to 1000$"),
]

REFUSED_BY_TRITON = [
    # a wrong type or shape never reaches the backend; the server's own words name the input
    ({"num_inference_steps": np.array([[4.0]], dtype=np.float32)}, "num_inference_steps"),
    ({"guidance_scale": np.array([[4]], dtype=np.int32)}, "guidance_scale"),
    ({"seed": np.array([[1]], dtype=np.int32)}, "seed"),
    ({"prompt": np.array([[1]], dtype=np.int32)}, "prompt"),
    ({"height": np.array([[8, 8]], dtype=np.int32)}, "height"),
    ({"width": np.array([8], dtype=np.int32)}, "width"),
    ({"prompt": np.array([[[b"a"]]], dtype=np.object_)}, "prompt"),
    ({"prompt": ["a"] * 17}, "batch-size must be <= 16"),
    ({"prompt": ["a", "b"], "seed": np.array([[1]], dtype=np.int64)}, "seed"),
]


def label(case) -> str:
    """Name a case by what is sent."""
    return re.sub(r"\s+", " ", ",".join(f"{k}={v}"[:40] for k, v in case[0].items()))


def check_words(message: str) -> None:
    """No path and no traceback."""
    assert "Traceback" not in message
    assert 'File "' not in message
    assert not re.search(r"/(work|usr|home|tmp|root|opt)/", message), message
    assert ".py" not in message


@pytest.mark.parametrize("case", INVALID, ids=label)
def test_invalid_argument_21(served, case):
    """Cases 21, 23: refused with INVALID_ARG, through the twin and on the stream; counted as rejected, nothing runs."""
    sent, words = case
    before = served.metrics()
    with pytest.raises(InferenceServerException) as from_twin:
        served.infer(**{**BASE, **sent})
    with pytest.raises(InferenceServerException) as from_stream:
        served.stream(**{**BASE, **sent}).result()
    for caught in (from_twin, from_stream):
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT", caught.value
        assert re.search(words, caught.value.message()), caught.value.message()
        check_words(caught.value.message())
    delta = served.metrics() - before
    assert delta.get("diffusion_steps_total") == 0
    assert delta.get("diffusion_requests_total", outcome="completed") == 0


@pytest.mark.parametrize("case", STREAM_ONLY, ids=label)
def test_invalid_argument_of_the_stream_21(served, case):
    """Case 21: inputs that the twin does not have."""
    sent, words = case
    with pytest.raises(InferenceServerException) as caught:
        served.stream(**{**BASE, **sent}).result()
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert re.search(words, caught.value.message()), caught.value.message()
    check_words(caught.value.message())


@pytest.mark.parametrize("case", REFUSED_BY_TRITON, ids=label)
def test_wrong_type_or_shape_is_refused_by_name_21(served, case):
    """Case 21: a wrong type, rank, size or number of prompts."""
    sent, name = case
    with pytest.raises(InferenceServerException, match=name) as caught:
        served.infer(**{**BASE, **sent})
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    check_words(caught.value.message())
    with pytest.raises(InferenceServerException, match=name):
        served.stream(**{**BASE, **sent}).result()


def test_refusals_are_counted_and_come_before_the_queue_21(served):
    """Case 21: refused at once though the model has no free slot and a full pipeline ahead."""
    before = served.metrics()
    for _ in range(3):
        with pytest.raises(InferenceServerException):
            served.stream(**{**BASE, "height": 0}).result()
    delta = served.metrics() - before
    assert delta.get("diffusion_requests_total", outcome="rejected") == 3
    assert delta.get("diffusion_requests_total") == 3
    assert delta.get("diffusion_request_duration_seconds_count") == 0


# -- each parameter has an effect ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "blue whale"},
        {"negative_prompt": "red"},
        {"num_inference_steps": 7},
        {"guidance_scale": 1.0},
        {"guidance_scale": 7.5},
        {"seed": 8},
        {"extra_args": {"eta": 0.7}},
        {"extra_args": {"scheduler": "EulerDiscreteScheduler"}},
        {"extra_args": {"guidance_rescale": 0.9}},
    ],
    ids=str,
)
def test_each_parameter_changes_the_picture_17(served, alone, change):
    """Case 17: changed alone, each parameter changes the picture, and only as often as it is sent."""
    assert not same(served.infer(**{**BASE, **change}).images, alone(**BASE).images)
    assert same(served.infer(**BASE).images, alone(**BASE).images), "it went on to the next request"


def test_size_and_number_change_the_shape_17(served):
    """Case 17: height, width and outputs."""
    answer = served.infer(**{**BASE, "height": 16, "width": 48, "num_outputs_per_prompt": 3})
    assert answer.images.shape == (3, 16, 48, 3)


@pytest.mark.parametrize(
    ("sent", "echo"),
    [
        ({"guidance_scale": 3.3}, {"guidance_scale": 3.3}),
        ({"num_inference_steps": 5}, {"num_inference_steps": 5}),
        ({"height": 16, "width": 48}, {"height": 16, "width": 48}),
        ({"num_outputs_per_prompt": 2}, {"num_outputs_per_prompt": 2, "seeds": [7, 8]}),
        ({"extra_args": {"eta": 0.5}}, {"eta": 0.5}),
        ({"extra_args": {"scheduler": "DDPMScheduler"}}, {"scheduler": "DDPMScheduler"}),
    ],
    ids=str,
)
def test_the_echo_is_what_was_sent_19(served, sent, echo):
    """Cases 17, 19: `param_*` tells what was really used."""
    metrics = served.infer(**{**BASE, **sent}).metrics
    assert {name: metrics[f"param_{name}"] for name in echo} == echo


def test_the_echo_holds_the_defaults_19(served):
    """Case 19: what was left out is told too; the defaults of config.pbtxt stand for the pipeline's."""
    metrics = served.infer(prompt="red apple", seed=3).metrics
    echo = {name.removeprefix("param_"): value for name, value in metrics.items() if name.startswith("param_")}
    assert echo.pop("scheduler") == "DDIMScheduler"
    assert echo == {
        "num_inference_steps": 20,
        "guidance_scale": 3.0,
        "height": 64,
        "width": 64,
        "num_outputs_per_prompt": 1,
        "seeds": [3],
    }


def test_guidance_with_a_negative_prompt_19(served):
    """Case 19: guidance 1 and 7.5 with a negative prompt: the pictures differ; the echo equals the input."""
    answers = [served.infer(**BASE, negative_prompt="blue", guidance_scale=g) for g in (1.0, 7.5)]
    assert not same(answers[0].images, answers[1].images)
    assert [answer.metrics["param_guidance_scale"] for answer in answers] == [1.0, 7.5]


@pytest.mark.parametrize("steps", [1, 2, 7, 50])
def test_exactly_as_many_step_events_as_steps_18(served, steps):
    """Case 18: exactly that many step events, in order, each with the total."""
    before = served.metrics()
    call = served.stream(**{**BASE, "num_inference_steps": steps})
    call.result()
    told = [(answer.step, answer.num_steps) for answer in call.events("step")]
    assert told == [(k + 1, steps) for k in range(steps)]
    assert (served.metrics() - before).get("diffusion_steps_total") == steps


def test_misspelt_input_is_named_17(served):
    """Case 17: an input that there is not."""
    with pytest.raises(InferenceServerException, match="num_inference_step"):
        served.stream(**BASE, num_inference_step=np.array([[4]], dtype=np.int32)).result()
    with pytest.raises(InferenceServerException, match="num_inference_step"):
        served.infer(**BASE, num_inference_step=np.array([[4]], dtype=np.int32))


@pytest.mark.parametrize("call", ["generate", "generate_stream"])
def test_misspelt_field_of_generate_is_named_17(served, call):
    """Case 17: `/generate` makes request parameters of the fields that are no inputs; they are not swallowed."""
    with pytest.raises(HttpError, match="num_inference_step") as caught:
        list(getattr(served, call)(**BASE, num_inference_step=4))
    assert caught.value.status == 400
    assert "did you mean 'num_inference_steps'?" in caught.value.message()


# -- prompts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", " ", "\n"])
def test_an_empty_prompt_is_a_prompt_22(served, prompt):
    """Case 22: one rule: whatever text is given is handed to the pipeline, the empty one too."""
    answer = served.infer(**{**BASE, "prompt": prompt})
    assert answer.images.shape == (1, 32, 32, 3)


@pytest.mark.parametrize("call", ["infer", "infer_http", "stream"])
def test_a_missing_prompt_is_refused_22(served, call):
    """Case 22: the prompt is the one input that every request needs."""
    values = {name: value for name, value in BASE.items() if name != "prompt"}
    with pytest.raises(InferenceServerException, match="prompt"):
        served.stream(**values).result() if call == "stream" else getattr(served, call)(**values)


def test_a_huge_prompt_is_refused_at_once_22(served):
    """Case 22: a prompt of 1 MB: answered within a second."""
    begin = time.monotonic()
    with pytest.raises(InferenceServerException, match=r"prompt: 1000000 bytes are too many; at most 16384"):
        served.stream(**{**BASE, "prompt": "a" * 1_000_000}).result()
    seconds = time.monotonic() - begin
    print(f"answered in {seconds:.3f} s")
    assert seconds < 1


@pytest.mark.parametrize(
    "prompt", ["🍎", "苹果", "תפוח", "a\0b", "a" * 16_384], ids=["emoji", "cjk", "rtl", "nul", "long"]
)
def test_any_text_is_a_prompt_23(served, prompt):
    """Case 23: emoji, CJK, right-to-left, NUL, and as long as is allowed."""
    assert served.infer(**{**BASE, **SMALL, "prompt": prompt}).images.shape == (1, 16, 16, 3)
    assert served.infer(**{**BASE, **SMALL, "negative_prompt": prompt}).images.shape == (1, 16, 16, 3)
