"""Time-outs hold wherever a request is, whichever way they are given; an overload leaves nobody without an answer."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.server.conftest import LONG, SMALL, Blocker
from tests.support.client import HttpError, Served, StreamCall, eventually, grpc_inputs, tensors

PRECISION_S = 0.5
"""Triton looks every half second for whose time is up."""

BUSY_S = 2.0
"""What a busy machine may add."""

QUEUE_EXPIRED = "Request timeout expired"
TIME_OUTS = [(1.0, None), (None, 1.0), (1.0, 60.0), (60.0, 1.0)]
"""Of the request (Triton's own) and of the input, in seconds."""

EXPIRED = "deadline exceeded: not done within the timeout of 1 s"


def with_input(seconds: float | None, values: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a request, with the input `timeout_s` where it is given."""
    made = tensors(**values)
    if seconds is not None:
        made["timeout_s"] = np.full((1, 1), seconds, dtype=np.float32)
    return made


def seconds_until(call: Any) -> tuple[float, InferenceServerException]:
    """Return how long a call took that ends with an error, and the error."""
    begin = time.monotonic()
    with pytest.raises(InferenceServerException) as caught:
        call()
    return time.monotonic() - begin, caught.value


def check(seconds: float, limit: float = 1.0) -> None:
    print(f"told {seconds - limit:+.3f} s from the limit")
    assert limit - 0.01 <= seconds <= limit + PRECISION_S + BUSY_S


def ask(served: Served, model: str, inputs: dict[str, Any], request_s: float | None = None) -> None:
    """Make a call, with Triton's time-out where one is given; raise what it ends with."""
    if model.endswith("_unary"):
        served.grpc.infer(model, grpc_inputs(inputs), timeout=None if request_s is None else round(request_s * 1e6))
    else:
        StreamCall(served.grpc_url, model, inputs, timeout_s=request_s).result()


@pytest.mark.parametrize(("request_s", "input_s"), TIME_OUTS)
@pytest.mark.parametrize("model", ["tight", "tight_unary"])
def test_the_smaller_time_out_holds_while_running_34(
    served: Served, model: str, request_s: float | None, input_s: float | None
) -> None:
    seconds, error = seconds_until(lambda: ask(served, model, with_input(input_s, {"prompt": "a", **LONG}), request_s))
    assert EXPIRED in error.message()
    assert error.status() == "StatusCode.UNAVAILABLE"
    check(seconds)


@pytest.mark.parametrize(("request_s", "input_s"), TIME_OUTS)
def test_the_smaller_time_out_holds_in_tritons_queue_behind_the_twin_34(
    served: Served, request_s: float | None, input_s: float | None
) -> None:
    """The twin hands the smaller one to Triton, whose queue does not look into inputs."""
    inputs = with_input(input_s, {"prompt": "a", **SMALL})
    with Blocker(served):
        seconds, error = seconds_until(lambda: ask(served, "tight_unary", inputs, request_s))
    assert QUEUE_EXPIRED in error.message()
    assert error.status() == "StatusCode.UNAVAILABLE"
    check(seconds)


def test_the_fields_of_generate_agree_too_34(served: Served) -> None:
    for fields in ({"timeout": 1_000_000, "timeout_s": 60.0}, {"timeout": 60_000_000, "timeout_s": 1.0}):
        begin = time.monotonic()
        with pytest.raises(HttpError, match=EXPIRED):
            served.generate("tight_unary", prompt="a", **LONG, **fields)
        check(time.monotonic() - begin)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("model", ["tight", "tight_unary"])
def test_a_time_out_that_is_none_is_refused_by_name_21(served: Served, model: str, seconds: float) -> None:
    inputs = with_input(seconds, {"prompt": "a", **SMALL})
    with pytest.raises(
        InferenceServerException, match=r"timeout_s: .* is not allowed; it must be more than 0"
    ) as caught:
        ask(served, model, inputs)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_an_input_that_does_not_pass_changes_nothing_34(served: Served) -> None:
    inputs = with_input(60.0, {"prompt": "a", "seed": 4, **SMALL})
    assert StreamCall(served.grpc_url, "tight", inputs).result().seeds == [4]


def test_ten_times_the_capacity_and_every_call_is_answered_36(served: Served) -> None:
    """One slot and four places in the queue; fifty streaming and fifty unary calls at once, some with a time-out."""
    values = {"prompt": "a", "num_inference_steps": 20, "height": 32, "width": 32}
    before = served.metrics()
    streams = [served.stream("tight", **values, timeout_s=2.0 if k % 5 == 0 else None) for k in range(50)]

    def call_twin(k: int) -> str:
        try:
            served.infer("tight_unary", **values, timeout_s=2.0 if k % 5 == 0 else None)
        except InferenceServerException as error:
            return reason_of(error) if error.status() == "StatusCode.UNAVAILABLE" else str(error)
        return "OK"

    with ThreadPoolExecutor(50) as pool:
        outcomes = Counter(pool.map(call_twin, range(50)))
    for call in streams:
        call.wait()
        call.close()
        outcomes["OK" if call.error is None else reason_of(call.error)] += 1
    print(outcomes)
    assert outcomes.total() == 100
    assert set(outcomes) <= {"OK", "full", "expired"}
    assert outcomes["OK"] >= 5, "capacity"
    assert outcomes["full"] >= 50, "no overload"
    delta = served.metrics() - before
    assert delta.get("diffusion_requests_total", "tight", outcome="completed") == outcomes["OK"]
    eventually(lambda: served.infer("tight_unary", **values), "the next one is OK")


def reason_of(error: InferenceServerException) -> str:
    text = error.message()
    if "maximum queue size" in text:
        return "full"
    return "expired" if QUEUE_EXPIRED in text or "deadline exceeded" in text else text
