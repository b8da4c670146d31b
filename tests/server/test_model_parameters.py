"""Every parameter of config.pbtxt has an effect, and a bad value fails the load with a reason that can be read."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from diffusion_backend.config import ModelConfig
from tests.server.conftest import BROKEN, Blocker, pending
from tests.support.client import HttpError, eventually

SIZE = {"height": 32, "width": 32}


def refusal(served, **values) -> str:
    """Return what the model `limits` says to a request that it refuses."""
    with pytest.raises(InferenceServerException) as caught:
        served.infer("other_name", **{"prompt": "a", **values})
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    return caught.value.message()


@pytest.fixture(scope="module")
def index(served) -> dict[str, dict[str, str]]:
    """What the server lists of each model."""
    return {entry["name"]: entry for entry in json.loads(served.request("POST", "/v2/repository/index"))}


@pytest.mark.parametrize("name", BROKEN)
def test_a_bad_value_fails_the_load_readably_20(index, name):
    """Case 20: the reason names the parameter, the value and what is allowed, in its first line."""
    entry = index[f"broken_{name}"]
    assert entry["state"] == "UNAVAILABLE"
    reason = entry["reason"].splitlines()[0]
    assert re.search(BROKEN[name][1], reason), entry["reason"]
    assert "Traceback" not in entry["reason"]


def test_every_parameter_has_a_bad_value_here_20():
    """Case 20: whoever adds a parameter adds its bad value."""
    tried = {name for parameters, _ in BROKEN.values() for name in parameters}
    assert {field.name for field in dataclasses.fields(ModelConfig)} <= tried


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nameless", "parameter 'stream_model' is missing: name the streaming model, or call this one NAME_unary"),
        ("misspelt_unary", "parameter 'stream_modle': there is no such parameter; did you mean 'stream_model'?"),
    ],
)
def test_a_twin_that_cannot_load_says_why_20(index, name, words):
    """Case 20: the twin's parameters."""
    assert index[name]["state"] == "UNAVAILABLE"
    assert words in index[name]["reason"].splitlines()[0]


def test_a_model_that_is_not_loaded_answers_with_an_error_51(served):
    """Case 51: no hang."""
    with pytest.raises(InferenceServerException):
        served.stream("broken_dtype", prompt="a").result()
    with pytest.raises(HttpError) as caught:
        served.generate("broken_dtype", prompt="a")
    assert caught.value.status in (400, 404, 503)


def test_other_models_are_served_beside_broken_ones_51(served, index):
    """Case 51: a model that cannot be loaded takes no other one with it."""
    ready = {name for name, entry in index.items() if entry["state"] == "READY"}
    assert ready == {"emoji", "emoji_unary", "tight", "tight_unary", "limits", "other_name", "deaf_unary"}


def test_dtype_20(served, alone):
    """Case 20: bfloat16 gives nearly the picture of float32, not exactly it."""
    value = {"prompt": "red apple", "seed": 7, "num_inference_steps": 6, "guidance_scale": 3.0, **SIZE}
    full, half = alone(**value).image, served.infer("other_name", **value).image
    error = np.abs(full.astype(float) - half).mean()
    print(f"mean difference {error:.2f} of 255")
    assert 0.05 < error < 20


def test_step_batching_off_20(served):
    """Case 20: every call of the denoiser is by itself, and the reason is counted."""
    before = served.metrics()
    calls = [served.stream("limits", prompt="a", seed=k, num_inference_steps=8, **SIZE) for k in range(2)]
    for call in calls:
        call.result()
    delta = served.metrics() - before
    assert delta.get("diffusion_steps_total", "limits") == 16
    assert delta.get("diffusion_solo_calls_total", "limits", reason="disabled") == 16
    assert delta.get("diffusion_batch_rows_count", "limits") == 16


def test_stream_model_and_grpc_endpoint_of_a_twin_20(served):
    """Case 20: a twin of any name, told its model and the server's address."""
    before = served.metrics()
    assert served.infer("other_name", prompt="a", seed=1).seeds == [1]
    assert (served.metrics() - before).get("diffusion_requests_total", "limits", outcome="completed") == 1


def test_defaults_20(served):
    """Case 20: default_num_inference_steps, default_guidance_scale, default_height, default_width."""
    call = served.stream("limits", prompt="a")
    answer = call.result()
    assert len(call.events("step")) == 3
    assert answer.images.shape == (1, 32, 48, 3)
    metrics = answer.metrics
    assert metrics["param_num_inference_steps"] == 3
    assert metrics["param_guidance_scale"] == 2.5
    assert (metrics["param_height"], metrics["param_width"]) == (32, 48)


def test_a_default_is_what_an_explicit_value_gives_20(served):
    """Case 20: guidance left out equals guidance 2.5, and not guidance 1."""
    left_out, given, other = (
        served.infer("other_name", prompt="a", seed=1, guidance_scale=g).images for g in (None, 2.5, 1.0)
    )
    assert np.array_equal(left_out, given)
    assert not np.array_equal(left_out, other)


def test_limits_of_a_request_20(served):
    """Case 20: max_steps, max_side, max_outputs, max_frames, max_duration_s, max_prompt_bytes, max_batch_rows."""
    assert "from 1 to 950" in refusal(served, num_inference_steps=951)
    assert "from 1 to 48" in refusal(served, height=64)
    assert "from 1 to 2" in refusal(served, num_outputs_per_prompt=3)
    assert "from 1 to 5" in refusal(served, num_frames=6)
    assert "to 7" in refusal(served, duration_s=8.0)
    assert "has no such argument" in refusal(served, num_frames=5)
    assert "41 bytes are too many; at most 40" in refusal(served, prompt="a" * 41)
    # Six rows, two an output, as guidance is on by default.
    assert "4 outputs; at most 3 a request" in refusal(served, prompt=["a", "b"], num_outputs_per_prompt=2)
    answer = served.infer("other_name", prompt=["a", "b", "c"], num_inference_steps=1)
    assert answer.images.shape == (3, 32, 48, 3)


def test_max_num_seqs_20(served):
    """Case 20: two run, the third waits."""
    with Blocker(served, "limits", count=2, height=48, width=48):
        call = served.stream("limits", prompt="a", seed=3)
        wanted = {"limits diffusion_requests_running": 2, "limits nv_inference_pending_request_count": 1}
        eventually(lambda: pending(served, "limits") == wanted, "two run and one waits")
    assert call.result().seeds == [3]


def test_max_waiting_20(served):
    """Case 20: with room for one in the engine's own queue, all but a few of a burst are refused.

    Without a queue policy Triton hands over at once what has gathered while no slot was free.
    """
    before = served.metrics()
    with Blocker(served, "limits", count=2, height=48, width=48):
        calls = [served.stream("limits", prompt="a", num_inference_steps=1) for _ in range(8)]
        gathered = "limits nv_inference_pending_request_count"
        eventually(lambda: pending(served, "limits").get(gathered) == 8, "8 have gathered")
    for call in calls:
        call.wait()
        call.close()
    refused = [call.error for call in calls if call.error is not None]
    print(f"{len(refused)} of 8 refused")
    assert 1 <= len(refused) <= 7
    for error in refused:
        assert error.status() == "StatusCode.UNAVAILABLE"
        assert error.message() == "the queue is full (1 requests wait); try again later"
    delta = served.metrics() - before
    assert delta.get("diffusion_requests_total", "limits", outcome="rejected") == len(refused)
    assert delta.get("diffusion_requests_total", "limits", outcome="completed") == 8 - len(refused)


def test_self_check_tolerance_20(log_path):
    """Case 20: the model `tight` is allowed more; the server's log tells what was allowed."""
    log = log_path.read_text()
    assert re.search(r"merged calls differ .*\(allowed 1e-04\)", log)
    assert re.search(r"merged calls differ .*\(allowed 3e-01\)", log)
