"""A null executor for tests of the engine: no torch, and forwards that can be held by a gate."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diffusion_backend.engine import Report, Work, WorkKind
from diffusion_backend.engine.executor import Capabilities
from diffusion_backend.errors import DiffusionError, PipelineError
from diffusion_backend.request import DiffusionOutput, DiffusionRequest, Event, EventKind
from diffusion_backend.timing import now

DEADLINE_S = 60.0
"""For what should take milliseconds; generous, as other work may share the machine."""

CAPABILITIES = Capabilities(
    pipeline_class="NullPipeline",
    modalities=("image",),
    arguments=frozenset({"prompt", "num_inference_steps"}),
    defaults={},
)


def eventually(predicate: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait until `predicate` holds; fails with `what` was waited for."""
    never = threading.Event()
    end = now() + deadline_s
    while not predicate():
        assert now() < end, f"not within {deadline_s} s: {what}"
        never.wait(0.002)


class Gate:
    """A door in the executor: while it is closed, each passage needs a permit."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = True
        self._permits = 0
        self._waiting = 0

    def close(self) -> None:
        """Hold all that come, but those with a permit."""
        with self._changed:
            self._open = False

    def open(self) -> None:
        """Let all pass from now on."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def let(self, count: int = 1) -> None:
        """Let `count` pass, now or when they come."""
        with self._changed:
            self._permits += count
            self._changed.notify_all()

    def wait_held(self) -> None:
        """Sleep until somebody stands before the closed door without a permit."""
        with self._changed:
            held = self._changed.wait_for(lambda: self._waiting > 0 and self._permits == 0, DEADLINE_S)
        assert held, "nobody came to the gate"

    def pass_through(self) -> None:
        """Called by whoever is to be held."""
        with self._changed:
            if not self._open:
                self._waiting += 1
                self._changed.notify_all()
                passed = self._changed.wait_for(lambda: self._open or self._permits > 0, DEADLINE_S)
                self._waiting -= 1
                assert passed, "the gate was never opened"
                if not self._open:
                    self._permits -= 1


@dataclass
class _Live:
    request: DiffusionRequest
    done: int = 0
    decoded: int = 0


@dataclass
class FakeExecutor:
    """Counts steps instead of denoising.

    What a request does is told by its `extra_args`: `key`, `rows`, `solo_reason` of its works; `raise_in`, one of
    `add_req`, `start`, `forward`, `abort`, where the whole executor call raises; `fail_at`, the step at which only this
    request is reported as failed; `decode`, how many DECODE works come last.

    Attributes:
        gate: every FORWARD passes through it.
        log: what was called, in order: (method or kind, request ids).
        threads: the threads that called.
        overlapped: whether two calls ever ran at once.
    """

    gate: Gate = field(default_factory=Gate)
    log: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    overlapped: bool = False
    warm_ups: list[tuple[int | None, int | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.live: dict[str, _Live] = {}
        self._busy = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def _note(self, what: str, *ids: str) -> None:
        self.log.append((what, ids))
        self.threads.add(threading.get_ident())

    def start(self) -> None:
        self._note("start_executor")

    def close(self) -> None:
        self._note("close")

    def add_req(self, request: DiffusionRequest) -> None:
        self._note("add_req", request.request_id)
        if request.extra_args.get("raise_in") == "add_req":
            raise RuntimeError("add_req breaks in /srv/models/secret")
        self.live[request.request_id] = _Live(request)

    def execute(self, kind: WorkKind, request_ids: Sequence[str]) -> list[Report]:
        self._note(kind.value, *request_ids)
        if not self._busy.acquire(blocking=False):
            self.overlapped = True
        try:
            if kind is WorkKind.FORWARD:
                self.gate.pass_through()
            raising = "start" if kind is WorkKind.START else "forward"
            for request_id in request_ids:
                if self.live[request_id].request.extra_args.get("raise_in") == raising:
                    raise RuntimeError("execute breaks in /srv/models/secret")
            return [self._one(kind, self.live[request_id]) for request_id in request_ids]
        finally:
            if self._busy.locked():
                self._busy.release()

    def abort(self, request_id: str, error: DiffusionError) -> Report:
        self._note("abort", request_id)
        live = self.live.pop(request_id)
        if live.request.extra_args.get("raise_in") == "abort":
            raise RuntimeError("abort breaks")
        return Report(request_id, error=error)

    def _dummy_run(self, height: int | None, width: int | None) -> None:
        self._note("_dummy_run")
        self.warm_ups.append((height, width))

    def echo(self, value: Any) -> Any:
        """For `collective_rpc` by name."""
        self._note("echo")
        return value

    def _one(self, kind: WorkKind, live: _Live) -> Report:
        request = live.request
        extra, steps = request.extra_args, request.num_inference_steps or 1
        report = Report(request.request_id)
        if kind is WorkKind.START:
            report.params = {"num_inference_steps": steps}
        if kind is WorkKind.FORWARD:
            live.done += 1
            if extra.get("fail_at") == live.done:
                del self.live[request.request_id]
                report.error = PipelineError(ValueError("poisoned"), request_id=request.request_id)
                return report
            report.events.append(Event(EventKind.STEP, request.request_id, now(), step=live.done, num_steps=steps))
        if kind is WorkKind.DECODE:
            live.decoded += 1
        if live.done < steps:
            key = extra.get("key", "denoiser")
            solo = extra.get("solo_reason")
            report.work = Work(
                WorkKind.FORWARD, (key, request.request_id) if solo else key, extra.get("rows", 1), solo_reason=solo
            )
        elif live.decoded < extra.get("decode", 0):
            report.work = Work(WorkKind.DECODE, ("decode", request.request_id))
        else:
            del self.live[request.request_id]
            report.output = DiffusionOutput(images=np.zeros((request.num_outputs, 1, 1, 3), np.uint8))
        return report

    def count(self, what: str) -> int:
        """How often a method or a kind was called."""
        return sum(name == what for name, _ in self.log)


def make(request_id: str, steps: int = 2, **params: Any) -> DiffusionRequest:
    """Return a request for `FakeExecutor`; unknown parameters become its `extra_args`."""
    known = {k: params.pop(k) for k in ("priority", "timeout_s", "num_outputs_per_prompt") if k in params}
    return DiffusionRequest.make(
        "a prompt", seed=1, request_id=request_id, num_inference_steps=steps, extra_args=params, **known
    )


class Recorder:
    """An `on_event` that keeps every request's events, and tells whether two calls for one request ever overlapped."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.events: dict[str, list[Event]] = defaultdict(list)

    def __call__(self, event: Event) -> None:
        with self.changed:
            self.events[event.request_id].append(event)
            self.changed.notify_all()

    def wait_for(self, request_id: str, kind: EventKind, count: int = 1) -> Event:
        """Sleep until a request had `count` events of a kind; return the last of them."""

        def found() -> list[Event]:
            return [e for e in self.events[request_id] if e.kind is kind]

        with self.changed:
            arrived = self.changed.wait_for(lambda: len(found()) >= count, DEADLINE_S)
            assert arrived, f"{request_id}: no {kind} (x{count}); had {[e.kind for e in self.events[request_id]]}"
            return found()[count - 1]

    def kinds(self, request_id: str) -> list[EventKind]:
        """The kinds of a request's events, in order."""
        with self.changed:
            return [e.kind for e in self.events[request_id]]
