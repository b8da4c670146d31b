"""The real engine without its threads: a test makes each of them take its next step, so that every run is repeatable.

What runs is the engine's own code: `step` for the engine thread, `_keep_deadlines` for the deadline thread, the jobs of
the delivery thread and of the finishers one by one, on a clock that the test moves. What other threads do meanwhile
happens inside `execute`, where the engine holds no lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

from diffusion_backend.engine import DiffusionEngine, EngineConfig, Report, Work, WorkKind
from diffusion_backend.engine import engine as engine_module
from diffusion_backend.errors import DiffusionError, OutOfMemoryError, PipelineError
from diffusion_backend.request import DeferredOutput, DiffusionOutput, DiffusionRequest
from diffusion_backend.telemetry import MemorySink, Telemetry
from tests.support import fakes
from tests.support.fakes import DEADLINE_S, FakeExecutor


class Clock:
    """Plain numbers instead of the time of day."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


class EngineDiesError(BaseException):
    """What no executor may raise: it ends the engine thread."""


class ScriptedExecutor(FakeExecutor):
    """A `FakeExecutor` that checks what it is asked for, and lets things happen while it works.

    Further `extra_args`: `oom`, the step at which the request does not fit; `decode_fails` and `deferred_fails`,
    whether its decode and the copy of its output fail.

    Attributes:
        meanwhile: called once within the next `execute`.
        seconds: how long each forward takes.
        dies: whether the next `execute` ends the engine thread.
        violations: what the engine asked for and must not.
        gone: requests that need the device no more, since the last look.
        broken: requests in calls that raised.
    """

    def __init__(self, clock: Clock, limits: EngineConfig) -> None:
        super().__init__()
        self.clock = clock
        self.limits = limits
        self.meanwhile: Callable[[], None] = lambda: None
        self.seconds = 0.0
        self.dies = False
        self.violations: list[str] = []
        self.gone: set[str] = set()
        self.broken: set[str] = set()
        self._next: dict[str, Work] = {}

    def add_req(self, request: DiffusionRequest) -> None:
        try:
            super().add_req(request)
        except RuntimeError:
            self.gone.add(request.request_id)
            self.broken.add(request.request_id)
            raise
        self._next[request.request_id] = Work(WorkKind.START, "start", rows=0)
        if len(self.live) > self.limits.max_num_seqs:
            self.violations.append(f"{len(self.live)} run at once")

    def execute(self, kind: WorkKind, request_ids: Sequence[str]) -> list[Report]:
        self._check(kind, request_ids)
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        if kind is WorkKind.FORWARD:
            self.clock.at += self.seconds
        if self.dies:
            raise EngineDiesError
        try:
            reports = super().execute(kind, request_ids)
        except RuntimeError:
            self.broken.update(request_ids)
            raise
        for report in reports:
            if report.work is not None:
                self._next[report.request_id] = report.work
            else:
                self.gone.add(report.request_id)
        return reports

    def abort(self, request_id: str, error: DiffusionError) -> Report:
        self.gone.add(request_id)
        try:
            return super().abort(request_id, error)
        except RuntimeError:
            self.broken.add(request_id)
            raise

    def _one(self, kind: WorkKind, live: Any) -> Report:
        request, extra = live.request, live.request.extra_args
        if kind is WorkKind.FORWARD and extra.get("oom") == live.done + 1:
            del self.live[request.request_id]
            return Report(request.request_id, error=OutOfMemoryError(request_id=request.request_id))
        if kind is WorkKind.DECODE and extra.get("decode_fails"):
            del self.live[request.request_id]
            return Report(request.request_id, error=PipelineError(ValueError("no decode")))
        report = super()._one(kind, live)
        if isinstance(report.output, DiffusionOutput) and "deferred_fails" in extra:
            report.output = DeferredOutput(_failing if extra["deferred_fails"] else lambda made=report.output: made)
        return report

    def _check(self, kind: WorkKind, request_ids: Sequence[str]) -> None:
        works = [self._next[request_id] for request_id in request_ids]
        rows = sum(work.rows for work in works)
        problems = {
            "a request twice": len(set(request_ids)) != len(request_ids),
            "a request that is not live": not set(request_ids) <= self.live.keys(),
            "another kind of work than is needed": any(work.kind is not kind for work in works),
            "several, but no forward": len(works) > 1 and kind is not WorkKind.FORWARD,
            "different keys in one forward": len({work.key for work in works}) > 1,
            "company for one that must be alone": len(works) > 1 and any(w.solo_reason is not None for w in works),
            f"{rows} rows": len(works) > 1 and rows > self.limits.max_batch_rows,
        }
        self.violations += [f"{kind}: {problem}" for problem, found in problems.items() if found]


def _failing() -> NoReturn:
    raise RuntimeError("the copy failed")


class ManualDelivery:
    """Stands for `Delivery`: its jobs run when the test says so, those of the finishers in any order."""

    def __init__(self) -> None:
        self.jobs: deque[Callable[[], None]] = deque()
        self.slow: list[Callable[[], None]] = []

    def put(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)

    def put_slow(self, job: Callable[[], None]) -> None:
        self.jobs.append(lambda: self.slow.append(job))

    def pump(self, count: int) -> None:
        """Let the delivery thread do up to `count` jobs."""
        for _ in range(min(count, len(self.jobs))):
            self.jobs.popleft()()

    def run_all(self) -> None:
        """Let the delivery thread and the finishers do all there is."""
        while self.jobs or self.slow:
            self.pump(len(self.jobs))
            while self.slow:
                self.slow.pop(0)()


class _AsleepError(Exception):
    """The deadline thread would sleep now."""


class _DeadlineSleep:
    """Stands for the condition that the deadline thread sleeps on."""

    def wait(self, _left: float | None) -> NoReturn:
        raise _AsleepError

    def notify(self) -> None:
        pass

    notify_all = notify


class SteppedEngine:
    """A `DiffusionEngine` and whoever drives it."""

    def __init__(self, limits: EngineConfig) -> None:
        self.clock = Clock()
        self.sink = MemorySink()
        self.executor = ScriptedExecutor(self.clock, limits)
        self.delivery = ManualDelivery()
        self._patches = [patch.object(engine_module, "now", self.clock), patch.object(fakes, "now", self.clock)]
        for change in self._patches:
            change.start()
        self.engine = DiffusionEngine(self.executor, limits, Telemetry(self.sink))
        self._inside: Any = self.engine
        self._inside._delivery = self.delivery
        self._inside._thread = SimpleNamespace(is_alive=lambda: self.is_alive, ident=None)
        self._inside._deadlines = _DeadlineSleep()
        self._inside._stopped_reason = None
        self.is_alive = True
        self.executor.start()

    def close(self) -> None:
        for change in self._patches:
            change.stop()

    @property
    def has_work(self) -> bool:
        """Whether the engine thread would wake up."""
        return bool(self._inside._controls or self._inside._doomed or self._inside._scheduler.has_work)

    @property
    def num_free_slots(self) -> int:
        return self._inside._scheduler.num_free_slots

    def turn(self) -> None:
        """Let the engine thread go once around its loop."""
        assert self._inside._wait_for_work()
        try:
            self.engine.step()
        except BaseException as error:
            self.is_alive = False
            self._inside._die(error)
            if not isinstance(error, EngineDiesError):
                raise

    def keep_deadlines(self) -> None:
        """Let the deadline thread do what is due, until it would sleep or has ended."""
        try:
            self._inside._keep_deadlines()
        except _AsleepError:
            return

    def shutdown(self, drain_s: float) -> None:
        """Stop: `shutdown` sleeps on a thread of its own, while all others go on."""
        stopping = threading.Thread(target=lambda: self.engine.shutdown(drain_s=drain_s), daemon=True)
        stopping.start()
        give_up = threading.Event()
        timer = threading.Timer(DEADLINE_S, give_up.set)
        timer.start()
        while stopping.is_alive():
            assert not give_up.is_set(), "shutdown does not return"
            if self.is_alive and self.has_work:
                self.turn()
            self.delivery.run_all()
            stopping.join(0.001)
        timer.cancel()
        self.delivery.run_all()
