"""What the engine itself costs: the time between two forwards of a denoiser that takes no time, and waiting callers.

As many requests run as have room, and further ones wait; none ends while it is measured. The time between two forwards
is all that the engine does for a step: charging, events, choosing the next group. It must not grow with the queue.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.idle import processor_seconds
from diffusion_backend.engine import DiffusionEngine, EngineConfig, Report, Work, WorkKind
from diffusion_backend.engine.executor import Capabilities
from diffusion_backend.errors import DiffusionError
from diffusion_backend.request import DiffusionRequest, Event, EventKind

RUNNING = 16
_WARM_STEPS = 20
_DEADLINE_S = 120.0
_SETTLE_S = 0.2


@dataclass(slots=True)
class NullExecutor:
    """An executor whose forwards take no time; it notes when they begin and end.

    Attributes:
        measured_steps: forwards after which `done` is set.
    """

    measured_steps: int
    gaps_s: list[float] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    _steps: dict[str, int] = field(default_factory=dict)
    _ended: float = 0.0

    @property
    def capabilities(self) -> Capabilities:
        """Those of a pipeline that makes pictures."""
        return Capabilities("Null", ("image",), frozenset({"prompt", "num_inference_steps"}), {})

    def start(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def add_req(self, request: DiffusionRequest) -> None:
        """Take a request in."""
        self._steps[request.request_id] = 0

    def execute(self, kind: WorkKind, request_ids: Sequence[str]) -> list[Report]:
        """Do a step of every request, with the events that a real one has."""
        begin = time.perf_counter()
        full = kind is WorkKind.FORWARD and len(request_ids) == RUNNING
        if full and self._ended:
            self.gaps_s.append(begin - self._ended)
            if len(self.gaps_s) >= _WARM_STEPS + self.measured_steps:
                self.done.set()
        reports = [self._step(kind, request_id) for request_id in request_ids]
        self._ended = time.perf_counter() if full else 0.0
        return reports

    def abort(self, request_id: str, error: DiffusionError) -> Report:
        """Forget a request."""
        return Report(request_id, error=error)

    def _dummy_run(self, height: int | None, width: int | None) -> None:
        """Nothing to do."""

    def _step(self, kind: WorkKind, request_id: str) -> Report:
        events = []
        if kind is WorkKind.FORWARD:
            self._steps[request_id] += 1
            events.append(Event(EventKind.STEP, request_id, time.monotonic(), self._steps[request_id], 10**6))
        return Report(request_id, work=Work(WorkKind.FORWARD, "null", rows=2), events=events)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds between two forwards.

    Attributes:
        median_s: what a step costs the engine's thread.
        mean_s: with the turns of Python's lock that it lost to the thread that delivers events; a real forward gives
            the lock away for longer than those need.
    """

    median_s: float
    mean_s: float


def measure_step(waiting: int, steps: int) -> StepCost:
    """Return the cost of a step of `RUNNING` requests while `waiting` further ones wait."""
    executor = NullExecutor(steps)
    engine = DiffusionEngine(executor, EngineConfig(max_num_seqs=RUNNING, max_batch_rows=2 * RUNNING))
    engine.start()
    held = threading.Event()
    released = threading.Event()

    def hold(_: object) -> None:
        held.set()
        released.wait(_DEADLINE_S)

    # The engine thread is held while the requests come in, so that all of them are there at the first step.
    holder = threading.Thread(target=engine.collective_rpc, args=(hold,))
    holder.start()
    held.wait(_DEADLINE_S)
    for _ in range(RUNNING + waiting):
        engine.submit(DiffusionRequest.make("null", seed=0), on_event=_ignore)
    released.set()
    holder.join()
    finished = executor.done.wait(_DEADLINE_S)
    engine.shutdown()
    if not finished:
        raise RuntimeError(f"the engine did not do {steps} steps within {_DEADLINE_S:.0f} s")
    gaps = executor.gaps_s[_WARM_STEPS : _WARM_STEPS + steps]
    return StepCost(statistics.median(gaps), statistics.fmean(gaps))


def measure_callers(callers: int, seconds: float) -> float:
    """Return the processor time, in percent of a core, while callers sleep until the device has done their requests.

    The device is held up for so long: what is used is used by waiting.
    """
    others = os.listdir("/proc/self/task")  # the threads of the benchmark itself do not count
    engine = DiffusionEngine(NullExecutor(1), EngineConfig(max_num_seqs=RUNNING, max_batch_rows=2 * RUNNING))
    engine.start()
    held = threading.Event()
    released = threading.Event()

    def hold(_: object) -> None:
        held.set()
        released.wait(_DEADLINE_S)

    def call() -> None:
        with contextlib.suppress(DiffusionError):  # the requests have no end of their own: the engine's stop ends them
            engine.add_req_and_wait_for_response(DiffusionRequest.make("null", seed=0))

    holder = threading.Thread(target=engine.collective_rpc, args=(hold,))
    threads = [threading.Thread(target=call) for _ in range(callers)]
    holder.start()
    held.wait(_DEADLINE_S)
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _DEADLINE_S
    while engine.stats()["waiting"] < callers and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(_SETTLE_S)
    begin, used = time.monotonic(), processor_seconds(os.getpid(), but=others)
    time.sleep(seconds)
    used = processor_seconds(os.getpid(), but=others) - used
    elapsed = time.monotonic() - begin
    released.set()
    engine.shutdown()
    for thread in (holder, *threads):
        thread.join()
    return 100 * used / elapsed


def _ignore(_: Event) -> None:
    """Take an event as a caller would, and do nothing with it."""
