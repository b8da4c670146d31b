"""Triton's queue in front of the engine: limits, priorities, time-outs, and who waits where."""

from __future__ import annotations

import time

import pytest
from tritonclient.utils import InferenceServerException

from tests.server.conftest import LONG, SMALL, Blocker, pending
from tests.server.test_replies import at_once
from tests.support.client import eventually

QUICK = {"num_inference_steps": 2, "height": 32, "width": 32}


def waiting(served, count: int, model: str = "tight") -> None:
    """Wait until so many requests wait in Triton's queue."""
    key = f"{model} nv_inference_pending_request_count"
    eventually(lambda: pending(served, model).get(key, 0) == count, f"{count} wait: {pending(served, model)}")


def test_timeout_in_the_queue_34(served):
    """Case 34: A runs long, B has a time-out of 2 s: B is told at 2 s (+ 0.5, and what a busy machine adds)."""
    with Blocker(served):
        call = served.stream("tight", prompt="b", **QUICK, timeout_s=2.0)
        with pytest.raises(InferenceServerException, match="timeout expired") as caught:
            call.result()
    assert caught.value.status() is None, "what Triton itself says on a stream has no code"
    print(f"told after {call.seconds:.2f} s")
    assert 2.0 <= call.seconds <= 3.0


def test_timeout_in_the_queue_behind_the_twin_34(served):
    """Case 34: the twin hands the time-out on, and the answer back."""
    with Blocker(served), pytest.raises(InferenceServerException, match="timeout expired") as caught:
        served.infer("tight_unary", prompt="b", **QUICK, timeout_s=1.0)
    assert caught.value.status() == "StatusCode.UNAVAILABLE"


@pytest.mark.parametrize("model", ["tight", "tight_unary"])
def test_timeout_while_running_34(served, model):
    """Case 34: a time-out that passes while the request runs ends it, in words."""
    before = served.metrics()

    def ask() -> None:
        values = {"prompt": "a", **LONG, "timeout_s": 1.0}
        served.stream(model, **values).result() if model == "tight" else served.infer(model, **values)

    begin = time.monotonic()
    with pytest.raises(
        InferenceServerException, match=r"deadline exceeded: not done within the timeout of 1 s"
    ) as caught:
        ask()
    seconds = time.monotonic() - begin
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    assert 1.0 <= seconds <= 3.0
    assert (served.metrics() - before).get("diffusion_requests_total", "tight", outcome="failed") == 1


def test_a_timeout_that_does_not_pass_changes_nothing_34(served):
    """Case 34: time-outs are limits, not delays."""
    assert served.stream("tight", prompt="a", **QUICK, seed=1, timeout_s=60.0).result().seeds == [1]


def test_queue_limit_35(served):
    """Case 35: queue limit 4, one slot that is taken, 20 sent: exactly 4 are accepted, the others refused at once."""
    with Blocker(served):
        calls = [served.stream("tight", prompt="a", **QUICK) for _ in range(20)]
        eventually(lambda: sum(call.done for call in calls) == 16, "16 are refused")
        refused = [call for call in calls if call.done]
        waiting(served, 4)
        for call in refused:
            assert "Exceeds maximum queue size" in str(call.error)
            assert call.seconds < 5, "not at once"
    for call in calls:
        call.wait()
        call.close()
    assert [call.error for call in calls if call not in refused] == [None] * 4


def test_queue_limit_behind_the_twin_35(served):
    """Case 35: the twin's clients are told UNAVAILABLE."""
    with Blocker(served):
        calls = [served.stream("tight", prompt="a", **QUICK) for _ in range(4)]
        waiting(served, 4)
        with pytest.raises(InferenceServerException, match="maximum queue size") as caught:
            served.infer("tight_unary", prompt="b", **QUICK)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
    for call in calls:
        call.result()


def test_large_and_small_ones_share_37(served):
    """Case 37, small: small requests end while a very large one runs, and the large one ends."""
    large = served.stream(prompt="a", num_inference_steps=60, height=192, width=192)
    large.wait_step()
    answers = at_once(8, lambda k: served.infer(prompt="b", **QUICK, seed=k))
    assert not large.done, "the large one was too small to show anything"
    assert [answer.seeds for answer in answers] == [[k] for k in range(8)]
    assert large.result().images.shape == (1, 192, 192, 3)


def test_what_gathered_is_handed_over_together(served):
    """When a slot is free, all that wait come in one go; one by one each would wait for Triton's next look, 0.5 s."""
    before = served.metrics()
    with Blocker(served):
        calls = [served.stream("tight", prompt="a", **QUICK, seed=seed) for seed in range(4)]
        waiting(served, 4)
    assert [call.result().seeds for call in calls] == [[seed] for seed in range(4)]
    executed = (served.metrics() - before).get("nv_inference_exec_count_total", "tight")
    assert executed == 2, "not the blocker, and then the four together"


def test_priority_1_overtakes_38(served):
    """Case 38: priority 1 overtakes those waiting at priority 2, and at priority 3."""
    with Blocker(served):
        calls = []
        for priority in (3, 2, 0, 1, 1):  # 0 is the default, 2
            calls.append(served.stream("tight", prompt="a", **{**QUICK, "num_inference_steps": 8}, priority=priority))
            waiting(served, len(calls))
    for call in calls:
        call.result()
    order = sorted(range(5), key=lambda k: calls[k].answers[0].at)
    assert order == [3, 4, 1, 2, 0]


def test_ten_at_one_slot_40(served):
    """Case 40: 10 at once with one slot: running 1, waiting 9 across Triton's queue and ours, then 0 and 0."""
    with Blocker(served):
        # Four places for each priority level.
        calls = [served.stream("tight", prompt="a", **QUICK, priority=1 + k % 3) for k in range(9)]
        waiting(served, 9)
        assert pending(served, "tight") == {
            "tight diffusion_requests_running": 1,
            "tight nv_inference_pending_request_count": 9,
        }
    for call in calls:
        call.result()
    eventually(lambda: pending(served, "tight") == {}, "0 and 0")


def test_overload_36(served):
    """Case 36, small: ten times as many as there are slots at once: every call is answered."""
    before = served.metrics()
    answers = at_once(160, lambda k: served.infer(**SMALL, prompt="a", seed=k))
    assert [answer.seeds for answer in answers] == [[k] for k in range(160)]
    assert (served.metrics() - before).get("diffusion_requests_total", outcome="completed") == 160
