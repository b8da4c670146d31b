"""What the server tells of itself equals what was sent to it, exactly."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.utils import InferenceServerException

from diffusion_backend.telemetry import METRICS
from tests.server.conftest import SMALL, pending, rounds
from tests.server.test_replies import POISON
from tests.support.client import eventually

PARTS = ("queue", "preprocess", "execute", "postprocess")
OUTCOMES = ("completed", "failed", "cancelled", "rejected")


def check_times(metrics: dict, client_ms: float) -> None:
    """Parts sum to the total within 1 %; the total is at most what the client saw."""
    total = metrics["time_total_ms"]
    parts = [metrics[f"time_{name}_ms"] for name in PARTS]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(total, rel=0.01)
    assert total <= client_ms
    assert metrics["time_queue_ms"] < metrics["time_to_first_step_ms"] <= total


@pytest.mark.parametrize("call", ["infer", "infer_http"])
def test_times_of_a_request_39(served, call):
    """Case 39: through the twin. That no key is there twice is checked wherever `Answer.metrics` is read."""
    for steps in (1, 8):
        begin = time.monotonic()
        answer = getattr(served, call)(prompt="red apple", num_inference_steps=steps)
        check_times(answer.metrics, (time.monotonic() - begin) * 1e3)


def test_times_under_load_39(served):
    """Case 39: also where requests wait for each other."""

    def call(k: int) -> None:
        stream = served.stream(prompt="red apple", num_inference_steps=4 + k, output_format="png", preview_interval=2)
        check_times(stream.result().metrics, stream.seconds * 1e3)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))


def test_every_key_is_a_time_or_a_parameter_39(served):
    """Case 39: times and parameters are told apart by name."""
    metrics = served.infer(prompt="a", num_inference_steps=1).metrics
    times = {name for name in metrics if name.startswith("time_")}
    assert times == {f"time_{name}_ms" for name in (*PARTS, "total", "to_first_step")}
    assert all(name.startswith("param_") for name in set(metrics) - times)


def test_durations_add_up_41(served):
    """Case 41: the histogram's sum is the sum of the totals that the clients were told, in every phase."""
    count = rounds(6, 20)
    before = served.metrics()
    told = [served.infer(prompt="a", num_inference_steps=12, seed=k).metrics for k in range(count)]
    delta = served.metrics() - before
    names = {"total": "duration", **{name: name for name in PARTS}}
    for key, name in names.items():
        seconds = sum(metrics[f"time_{key}_ms"] for metrics in told) / 1e3
        assert delta.get(f"diffusion_request_{name}_seconds_sum") == pytest.approx(seconds, rel=1e-3, abs=1e-4)
        assert delta.get(f"diffusion_request_{name}_seconds_count") == count
    first = sum(metrics["time_to_first_step_ms"] for metrics in told) / 1e3
    assert delta.get("diffusion_time_to_first_step_seconds_sum") == pytest.approx(first, rel=1e-3)
    assert delta.get("diffusion_step_seconds_count") == 12 * count
    assert 0 < delta.get("diffusion_step_seconds_sum") < delta.get("diffusion_request_execute_seconds_sum") * 1.01


def test_counters_equal_what_was_sent_42(served):
    """Cases 39 to 42: each counter after a known mix, to the last digit; the conservation law of the outcomes."""
    before = served.metrics()
    served.infer(**{**SMALL, "num_inference_steps": 3}, prompt="a")
    served.infer(**{**SMALL, "num_inference_steps": 2}, prompt=["a", "b"], num_outputs_per_prompt=3)
    served.infer(**{**SMALL, "num_inference_steps": 4, "guidance_scale": 3.0}, prompt="a", output_format="png")
    with pytest.raises(InferenceServerException):
        served.infer(prompt="a", width=7)
    with pytest.raises(InferenceServerException):
        served.infer(**SMALL, prompt="a", extra_args=POISON)
    cancelled = served.stream(prompt="a", num_inference_steps=500, height=96, width=96)
    cancelled.wait_step(3)
    cancelled.cancel()
    seen = cancelled.answers[-1].step
    eventually(lambda: pending(served) == {}, "idle")
    delta = served.metrics() - before
    assert [delta.get("diffusion_requests_total", outcome=o) for o in OUTCOMES] == [3, 1, 1, 1]
    assert delta.get("diffusion_requests_total") == 6
    assert delta.get("diffusion_outputs_total", modality="image") == 1 + 6 + 1
    assert delta.get("diffusion_outputs_total") == 8
    assert delta.get("diffusion_request_duration_seconds_count") == 3
    steps = delta.get("diffusion_steps_total")
    of_cancelled = steps - (3 + 2 + 4 + 2)  # the poisoned one did two
    assert 3 <= of_cancelled <= seen + 4
    # Alone, every step is one forward; the poisoned one's third forward ran, its step did not end.
    assert delta.get("diffusion_batch_rows_count") == delta.get("diffusion_step_seconds_count")
    assert steps <= delta.get("diffusion_batch_rows_count") <= steps + 2
    rows_alone = 3 * 1 + 2 * 6 + 4 * 2 + 3 * 1
    rows_cancelled = delta.get("diffusion_batch_rows_sum") - rows_alone
    assert 2 * of_cancelled <= rows_cancelled <= 2 * (of_cancelled + 1)
    assert delta.get("diffusion_solo_calls_total") == 0


def test_conservation_after_a_random_mix_42(served, rng):
    """Case 42: accepted = completed + failed + cancelled after a random mix of aborts, errors and successes."""
    kinds = [rng.choice(["fine", "bad", "poison", "cancel", "gone"]) for _ in range(rounds(40, 400))]
    print(kinds)
    before = served.metrics()

    def call(kind: str) -> None:
        values = {"prompt": "a", "num_inference_steps": 6, "height": 32, "width": 32}
        if kind == "bad":
            values["height"] = 0
        elif kind == "poison":
            values["extra_args"] = POISON
        elif kind in ("cancel", "gone"):
            values["num_inference_steps"] = 900
        stream = served.stream(**values)
        if kind == "cancel":
            stream.wait_step(1)
        if kind in ("cancel", "gone"):
            stream.cancel()
            return
        stream.wait()
        stream.close()
        assert (stream.error is None) == (kind == "fine"), stream.error

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(call, kinds))
    eventually(lambda: pending(served) == {}, "idle")
    delta = served.metrics() - before
    count = {o: delta.get("diffusion_requests_total", outcome=o) for o in OUTCOMES}
    assert count["completed"] == kinds.count("fine")
    assert count["failed"] == kinds.count("poison")
    assert count["rejected"] == kinds.count("bad")
    assert delta.get("diffusion_errors_total", reason="pipeline") == kinds.count("poison")
    assert delta.get("diffusion_errors_total", reason="argument") == kinds.count("bad")
    assert delta.get("diffusion_errors_total") == count["failed"] + count["rejected"]
    # One that is gone may have been taken out of Triton's queue, before our engine heard of it.
    assert kinds.count("cancel") <= count["cancelled"] <= kinds.count("cancel") + kinds.count("gone")


def test_every_metric_is_there_with_its_kind(served):
    """The page holds what the contract says: names, kinds, buckets, and the label `model` everywhere."""
    served.infer(**SMALL, prompt="a")
    metrics = served.metrics()
    for spec in METRICS:
        if spec.name == "diffusion_solo_calls_total":
            continue  # there is none before the first such call
        family = spec.name.removesuffix("_total") if spec.kind == "counter" else spec.name
        assert metrics.kinds[family] == spec.kind
        sample = f"{spec.name}_bucket" if spec.kind == "histogram" else spec.name
        labels = metrics.labels(sample)
        assert labels, spec.name
        if spec.kind == "histogram":
            assert [float(label["le"]) for label in labels] == [*spec.buckets, float("inf")]
        else:
            assert all(set(label) == set(spec.labels) for label in labels)
    for model in ("tight", "limits"):
        assert metrics.labels("diffusion_requests_running", model), model
    assert not metrics.labels("diffusion_requests_running", "emoji_unary"), "the twin has none of its own"
