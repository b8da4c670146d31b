"""The metrics are a contract: dashboards break when a name, a unit or a bucket changes."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from diffusion_backend.errors import DeadlineExceededError, DiffusionError
from diffusion_backend.telemetry import ERROR_REASONS, METRICS, UNARY_TWIN, MemorySink, MetricSpec, Telemetry
from diffusion_backend.timing import RequestRecord

ALL = (*METRICS, UNARY_TWIN)

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)

FROZEN = [
    ("diffusion_requests_total", "counter", ("outcome",), ()),
    ("diffusion_errors_total", "counter", ("reason",), ()),
    ("diffusion_requests_running", "gauge", (), ()),
    ("diffusion_requests_waiting", "gauge", (), ()),
    ("diffusion_request_queue_seconds", "histogram", (), SECONDS),
    ("diffusion_request_preprocess_seconds", "histogram", (), SECONDS),
    ("diffusion_request_execute_seconds", "histogram", (), SECONDS),
    ("diffusion_request_postprocess_seconds", "histogram", (), SECONDS),
    ("diffusion_request_duration_seconds", "histogram", (), SECONDS),
    ("diffusion_time_to_first_step_seconds", "histogram", (), SECONDS),
    ("diffusion_step_seconds", "histogram", (), STEP),
    ("diffusion_batch_rows", "histogram", (), ROWS),
    ("diffusion_steps_total", "counter", (), ()),
    ("diffusion_outputs_total", "counter", ("modality",), ()),
    ("diffusion_solo_calls_total", "counter", ("reason",), ()),
    ("diffusion_step_batching", "gauge", ("denoiser", "reason"), ()),
    ("diffusion_prompt_cache_hits_total", "counter", (), ()),
    ("diffusion_prompt_cache_misses_total", "counter", (), ()),
    ("diffusion_prompt_cache_bytes", "gauge", (), ()),
    ("diffusion_unary_twin", "gauge", ("stream_model",), ()),
]
"""A change here is a breaking change: write it into the CHANGELOG and the docs."""


def test_the_metrics_are_frozen() -> None:
    assert [(spec.name, spec.kind, spec.labels, spec.buckets) for spec in ALL] == FROZEN


def test_the_docs_table_is_the_same() -> None:
    text = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| `diffusion_")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    documented = [(name.strip("`"), kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in rows]
    assert documented == [(spec.name, spec.kind, spec.labels) for spec in ALL]
    for spec, (*_, meaning) in zip(ALL, rows, strict=True):
        assert meaning.startswith(spec.help.split(",")[0]), spec.name


def test_the_metrics_follow_the_conventions_of_prometheus() -> None:
    for spec in ALL:
        assert spec.name.startswith("diffusion_")
        assert spec.name.endswith("_total") == (spec.kind == "counter")
        assert spec.help
        assert not spec.help.endswith(".")
        # Nothing in a label that grows without end, and nothing private.
        assert set(spec.labels) <= {"outcome", "modality", "reason", "denoiser", "stream_model"}


@pytest.mark.parametrize("buckets", [(2.0, 1.0), (1.0, 1.0), (1.0, 3.0, 2.0)])
def test_buckets_that_do_not_ascend_raise_instead_of_being_sorted(buckets: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="x: buckets must ascend, each once"):
        MetricSpec("x", "histogram", "help", (), buckets)


@pytest.mark.parametrize(("kind", "buckets"), [("counter", (1.0,)), ("gauge", (1.0,)), ("histogram", ())])
def test_buckets_are_for_histograms_and_histograms_need_them(kind: str, buckets: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="x: buckets are for histograms, which need them"):
        MetricSpec("x", kind, "help", (), buckets)  # type: ignore[arg-type]


def done() -> RequestRecord:
    return RequestRecord(1.0, started=3.0, first_forward=3.5, first_step=4.0, last_step=11.5, finished=12.0)


def test_a_request_moves_from_waiting_to_running_to_its_outcome() -> None:
    sink = MemorySink()
    telemetry = Telemetry(sink)
    telemetry.waiting()
    assert sink.values == {("diffusion_requests_waiting", ()): 1}
    telemetry.running()
    assert sink.values == {("diffusion_requests_waiting", ()): 0, ("diffusion_requests_running", ()): 1}
    telemetry.ended("completed", done(), ran=True)
    assert sink.values == {
        ("diffusion_requests_waiting", ()): 0,
        ("diffusion_requests_running", ()): 0,
        ("diffusion_requests_total", ("completed",)): 1,
    }
    assert sink.samples == {
        ("diffusion_request_queue_seconds", ()): [2.0],
        ("diffusion_request_preprocess_seconds", ()): [0.5],
        ("diffusion_request_execute_seconds", ()): [8.0],
        ("diffusion_request_postprocess_seconds", ()): [0.5],
        ("diffusion_request_duration_seconds", ()): [11.0],
        ("diffusion_time_to_first_step_seconds", ()): [3.0],
    }


def subclasses(kind: type[DiffusionError]) -> list[type[DiffusionError]]:
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in subclasses(child))]


def test_every_error_has_a_reason_that_is_a_label_and_in_the_docs() -> None:
    assert {kind.reason for kind in subclasses(DiffusionError)} == set(ERROR_REASONS)
    text = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    section = text.split("## Errors", 1)[1].split("\n## ", 1)[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert [name for cell in cells[1:] for name in re.findall(r"`(\w+)`", cell)] == list(ERROR_REASONS)


@pytest.mark.parametrize("ran", [True, False])
def test_a_failed_request_is_counted_by_its_reason(ran: bool) -> None:
    sink = MemorySink()
    telemetry = Telemetry(sink)
    telemetry.waiting()
    if ran:
        telemetry.running()
    telemetry.ended("failed", done(), ran=ran, reason=DeadlineExceededError.reason)
    assert sink.values["diffusion_requests_total", ("failed",)] == 1
    assert sink.values["diffusion_errors_total", ("deadline",)] == 1


@pytest.mark.parametrize("ran", [True, False])
@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
def test_a_request_that_did_not_complete_is_counted_and_not_timed(outcome: str, ran: bool) -> None:
    sink = MemorySink()
    telemetry = Telemetry(sink)
    telemetry.waiting()
    if ran:
        telemetry.running()
    telemetry.ended(outcome, done(), ran=ran)  # type: ignore[arg-type]
    assert sink.values["diffusion_requests_total", (outcome,)] == 1
    assert sink.values["diffusion_requests_waiting", ()] == 0
    assert sink.values["diffusion_requests_running", ()] == 0
    assert sink.samples == {}


def test_a_completed_request_without_steps_has_no_time_to_its_first() -> None:
    sink = MemorySink()
    telemetry = Telemetry(sink)
    telemetry.waiting()
    telemetry.running()
    telemetry.ended("completed", RequestRecord(1.0, started=2.0, finished=3.0), ran=True)
    assert ("diffusion_time_to_first_step_seconds", ()) not in sink.samples
    assert sink.samples["diffusion_request_duration_seconds", ()] == [2.0]


def test_gauges_cannot_be_left_without_being_entered() -> None:
    telemetry = Telemetry(MemorySink())
    with pytest.raises(AssertionError, match="diffusion_requests_waiting: leave without enter"):
        telemetry.running()
    with pytest.raises(AssertionError, match="diffusion_requests_running: leave without enter"):
        telemetry.ended("failed", done(), ran=True)


def test_forwards_outputs_and_refusals_are_counted() -> None:
    sink = MemorySink()
    telemetry = Telemetry(sink)
    telemetry.forward(4, 0.25, 2)
    telemetry.forward(1, 0.5, 0)
    telemetry.solo("self_check")
    telemetry.prompt_cache(2, 1, 4096)
    telemetry.prompt_cache(0, 1, -96)
    telemetry.outputs("image", 3)
    telemetry.outputs("audio", 1)
    telemetry.rejected("argument")
    assert sink.values == {
        ("diffusion_steps_total", ()): 2,
        ("diffusion_solo_calls_total", ("self_check",)): 1,
        ("diffusion_prompt_cache_hits_total", ()): 2,
        ("diffusion_prompt_cache_misses_total", ()): 2,
        ("diffusion_prompt_cache_bytes", ()): 4000,
        ("diffusion_outputs_total", ("image",)): 3,
        ("diffusion_outputs_total", ("audio",)): 1,
        ("diffusion_requests_total", ("rejected",)): 1,
        ("diffusion_errors_total", ("argument",)): 1,
    }
    assert sink.samples == {("diffusion_batch_rows", ()): [4, 1], ("diffusion_step_seconds", ()): [0.25, 0.5]}


def test_calls_from_several_threads_are_each_whole() -> None:
    """A sink may rely on one thread at a time (Triton's may not be called by two)."""

    class Exclusive(MemorySink):
        def __init__(self) -> None:
            super().__init__()
            self.busy = threading.Lock()
            self.overlaps = 0

        def add(self, *args) -> None:
            if not self.busy.acquire(blocking=False):
                self.overlaps += 1
                return
            super().add(*args)
            self.busy.release()

    sink = Exclusive()
    telemetry = Telemetry(sink)

    def client() -> None:
        for _ in range(500):
            telemetry.waiting()
            telemetry.running()
            telemetry.ended("completed", done(), ran=True)

    threads = [threading.Thread(target=client) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sink.overlaps == 0
    assert sink.values["diffusion_requests_total", ("completed",)] == 2000
    assert sink.values["diffusion_requests_running", ()] == 0
    assert len(sink.samples["diffusion_request_duration_seconds", ()]) == 2000


def test_the_verdict_on_each_denoiser_is_told_with_its_reason() -> None:
    sink = MemorySink()
    Telemetry(sink).verdicts({"unet": None, "controlnet": "self_check"})
    assert sink.values == {
        ("diffusion_step_batching", ("unet", "")): 1,
        ("diffusion_step_batching", ("controlnet", "self_check")): 0,
    }
