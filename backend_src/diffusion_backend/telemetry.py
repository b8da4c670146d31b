"""The metrics: their names, their meaning, and the one object that moves them.

`METRICS` is the whole contract; a test freezes it and compares it with the table in the docs. Where the values go is a
`MetricSink`: Triton's custom metrics in the server (`triton/metrics.py`), a plain dictionary in tests (`MemorySink`).
`Telemetry` calls it under a lock of its own, so a sink needs none.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from .timing import PHASES, RequestRecord

Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)

OUTCOMES = ("completed", "failed", "cancelled", "rejected")
ERROR_REASONS = (
    "argument",
    "deadline",
    "queue_full",
    "stopping",
    "pipeline",
    "out_of_memory",
    "not_finite",
    "hung",
    "executor",
    "internal",
)
"""Why a request failed or was rejected: the `reason` of each kind of error in `errors`."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric family; every family also has the label `model`.

    Attributes:
        labels: further label names.
        buckets: upper bounds of a histogram, ascending, without infinity.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"{self.name}: buckets must ascend, each once")
        if bool(self.buckets) != (self.kind == "histogram"):
            raise ValueError(f"{self.name}: buckets are for histograms, which need them")


REQUESTS_TOTAL = MetricSpec("diffusion_requests_total", "counter", "Requests ended, by outcome", ("outcome",))
ERRORS_TOTAL = MetricSpec("diffusion_errors_total", "counter", "Requests failed or rejected, by reason", ("reason",))
REQUESTS_RUNNING = MetricSpec("diffusion_requests_running", "gauge", "Requests being worked on")
REQUESTS_WAITING = MetricSpec("diffusion_requests_waiting", "gauge", "Requests waiting in the engine's own queue")
PHASE_SECONDS = {
    phase: MetricSpec(f"diffusion_request_{phase}_seconds", "histogram", text, (), SECONDS)
    for phase, text in zip(
        PHASES,
        (
            "Time in the engine's own queue (Triton's queue comes before it)",
            "Time from the start to the first denoiser call",
            "Time from the first denoiser call to the end of the last step",
            "Time from the last step to the finished result",
        ),
        strict=True,
    )
}
REQUEST_SECONDS = MetricSpec(
    "diffusion_request_duration_seconds",
    "histogram",
    "Time from entering the engine to the finished result",
    (),
    SECONDS,
)
FIRST_STEP_SECONDS = MetricSpec(
    "diffusion_time_to_first_step_seconds",
    "histogram",
    "Time from entering the engine to the end of the first denoising step",
    (),
    SECONDS,
)
STEP_TIME = MetricSpec(
    "diffusion_step_seconds",
    "histogram",
    "Time of one forward of the denoiser and of the scheduler steps of the requests in it",
    (),
    STEP_SECONDS,
)
BATCH_ROWS = MetricSpec("diffusion_batch_rows", "histogram", "Rows in one forward of the denoiser", (), ROWS)
STEPS_TOTAL = MetricSpec("diffusion_steps_total", "counter", "Denoising steps done, over all requests")
OUTPUTS_TOTAL = MetricSpec("diffusion_outputs_total", "counter", "Outputs made", ("modality",))
SOLO_CALLS_TOTAL = MetricSpec(
    "diffusion_solo_calls_total", "counter", "Denoiser calls that could not share a forward, by reason", ("reason",)
)
STEP_BATCHING = MetricSpec(
    "diffusion_step_batching",
    "gauge",
    "1 if the calls of a denoiser share forwards, 0 if they run one by one, for the reason given",
    ("denoiser", "reason"),
)

PROMPT_CACHE_HITS = MetricSpec(
    "diffusion_prompt_cache_hits_total", "counter", "Prompts whose embeddings were taken from the cache"
)
PROMPT_CACHE_MISSES = MetricSpec(
    "diffusion_prompt_cache_misses_total", "counter", "Prompts that were encoded while the cache was on"
)
PROMPT_CACHE_BYTES = MetricSpec("diffusion_prompt_cache_bytes", "gauge", "Bytes of the cached prompt embeddings")

UNARY_TWIN = MetricSpec(
    "diffusion_unary_twin",
    "gauge",
    "1 for each unary twin; its requests are counted by the streaming model that it names",
    ("stream_model",),
)
"""The one metric that is a twin's and not a streaming model's."""

METRICS: tuple[MetricSpec, ...] = (
    REQUESTS_TOTAL,
    ERRORS_TOTAL,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    *PHASE_SECONDS.values(),
    REQUEST_SECONDS,
    FIRST_STEP_SECONDS,
    STEP_TIME,
    BATCH_ROWS,
    STEPS_TOTAL,
    OUTPUTS_TOTAL,
    SOLO_CALLS_TOTAL,
    STEP_BATCHING,
    PROMPT_CACHE_HITS,
    PROMPT_CACHE_MISSES,
    PROMPT_CACHE_BYTES,
)


class MetricSink(Protocol):
    """Where values go; called by one thread at a time."""

    def add(self, spec: MetricSpec, labels: Mapping[str, str], amount: float) -> None:
        """Add to a counter (`amount` >= 0) or a gauge."""

    def observe(self, spec: MetricSpec, labels: Mapping[str, str], value: float) -> None:
        """Put a value into a histogram."""


class MemorySink:
    """A sink that keeps exact values: `values[name, labels]` for counters and gauges, `samples[...]` for histograms."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        self.samples: dict[tuple[str, tuple[str, ...]], list[float]] = defaultdict(list)

    def add(self, spec: MetricSpec, labels: Mapping[str, str], amount: float) -> None:
        """See `MetricSink.add`."""
        self.values[spec.name, tuple(labels.values())] += amount

    def observe(self, spec: MetricSpec, labels: Mapping[str, str], value: float) -> None:
        """See `MetricSink.observe`."""
        self.samples[spec.name, tuple(labels.values())].append(value)


class Telemetry:
    """Turns what happens in an engine into metric values.

    Called by the engine's delivery thread and by the threads that finish requests; a lock makes each call whole, and no
    call is made while an engine lock is held.
    """

    def __init__(self, sink: MetricSink) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._gauges = {REQUESTS_RUNNING.name: 0, REQUESTS_WAITING.name: 0}

    def _enter(self, spec: MetricSpec) -> None:
        self._gauges[spec.name] += 1
        self._sink.add(spec, {}, 1)

    def _leave(self, spec: MetricSpec) -> None:
        assert self._gauges[spec.name] > 0, f"{spec.name}: leave without enter"
        self._gauges[spec.name] -= 1
        self._sink.add(spec, {}, -1)

    def verdicts(self, joint: Mapping[str, str | None]) -> None:
        """Tell once, when an engine starts, for each denoiser why its calls are not batched, or None if they are."""
        with self._lock:
            for denoiser, reason in joint.items():
                labels = {"denoiser": denoiser, "reason": reason or ""}
                self._sink.add(STEP_BATCHING, labels, 1.0 if reason is None else 0.0)

    def waiting(self) -> None:
        """A request entered the engine's queue."""
        with self._lock:
            self._enter(REQUESTS_WAITING)

    def running(self) -> None:
        """A waiting request was admitted."""
        with self._lock:
            self._leave(REQUESTS_WAITING)
            self._enter(REQUESTS_RUNNING)

    def rejected(self, reason: str) -> None:
        """A request was refused, for `reason` (of `ERROR_REASONS`), before it entered the queue."""
        with self._lock:
            self._sink.add(REQUESTS_TOTAL, {"outcome": "rejected"}, 1)
            self._sink.add(ERRORS_TOTAL, {"reason": reason}, 1)

    def ended(
        self,
        outcome: Literal["completed", "failed", "cancelled"],
        record: RequestRecord,
        *,
        ran: bool,
        reason: str | None = None,
    ) -> None:
        """A request ended; `ran` tells whether it had been admitted, `reason` (of `ERROR_REASONS`) why it failed.

        Histograms of times are filled by completed requests only: a failed one's times say nothing of the service.
        """
        with self._lock:
            self._leave(REQUESTS_RUNNING if ran else REQUESTS_WAITING)
            self._sink.add(REQUESTS_TOTAL, {"outcome": outcome}, 1)
            if reason is not None:
                self._sink.add(ERRORS_TOTAL, {"reason": reason}, 1)
            if outcome != "completed":
                return
            seconds = record.seconds()
            for phase, spec in PHASE_SECONDS.items():
                self._sink.observe(spec, {}, seconds[phase])
            self._sink.observe(REQUEST_SECONDS, {}, seconds["total"])
            to_first = record.time_to_first_step()
            if to_first is not None:
                self._sink.observe(FIRST_STEP_SECONDS, {}, to_first)

    def outputs(self, modality: str, count: int) -> None:
        """`count` outputs of one modality were made."""
        with self._lock:
            self._sink.add(OUTPUTS_TOTAL, {"modality": modality}, count)

    def forward(self, rows: int, seconds: float, steps: int) -> None:
        """One joint forward of `rows` rows took `seconds`, and `steps` denoising steps came out of it."""
        with self._lock:
            self._sink.observe(BATCH_ROWS, {}, rows)
            self._sink.observe(STEP_TIME, {}, seconds)
            if steps:
                self._sink.add(STEPS_TOTAL, {}, steps)

    def steps(self, count: int) -> None:
        """`count` denoising steps were done outside joint forwards."""
        with self._lock:
            self._sink.add(STEPS_TOTAL, {}, count)

    def prompt_cache(self, hits: int, misses: int, bytes_added: int) -> None:
        """Prompts were found in the cache of embeddings, or encoded, and its entries have grown by so many bytes."""
        with self._lock:
            self._sink.add(PROMPT_CACHE_HITS, {}, hits)
            self._sink.add(PROMPT_CACHE_MISSES, {}, misses)
            self._sink.add(PROMPT_CACHE_BYTES, {}, bytes_added)

    def solo(self, reason: str) -> None:
        """A denoiser call could not share a forward, for `reason`."""
        with self._lock:
            self._sink.add(SOLO_CALLS_TOTAL, {"reason": reason}, 1)
