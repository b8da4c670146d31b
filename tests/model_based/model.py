"""What must hold of the engine, in the plainest words: lists and counts, no heap, no threads, no clock of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diffusion_backend.engine import EngineConfig
from diffusion_backend.errors import (
    DiffusionError,
    EngineStoppedError,
    ExecutorError,
    InvalidArgumentError,
    OutOfMemoryError,
    PipelineError,
    RequestCancelledError,
)
from diffusion_backend.request import Event, EventKind

FAULTS: Mapping[str, type[DiffusionError]] = {
    "add_req": ExecutorError,
    "start": ExecutorError,
    "forward": ExecutorError,
    "fail_at": PipelineError,
    "oom": OutOfMemoryError,
    "decode_fails": PipelineError,
    "deferred_fails": PipelineError,
    "finalize": InvalidArgumentError,
}
"""What a request with this fault ends with, if nothing else ends it first."""


@dataclass
class Known:
    """All that the model knows of one request.

    Attributes:
        may_end_with: the errors that it may end with; None stands for a result.
        events: as its caller got them.
    """

    request_id: str
    priority: int
    arrival: int
    steps: int
    deadline: float | None
    fault: str | None
    state: str = "waiting"  # waiting, slot (needs the device), done (needs it no more)
    may_end_with: set[type[DiffusionError] | None] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.may_end_with.add(FAULTS.get(self.fault or "", None))  # type: ignore[arg-type]

    @property
    def final(self) -> Event | None:
        return next((event for event in self.events if event.kind.is_final), None)


class Model:
    """The requests that were accepted, and the rules."""

    def __init__(self, limits: EngineConfig) -> None:
        self.limits = limits
        self.requests: dict[str, Known] = {}

    def of(self, state: str) -> list[Known]:
        return [known for known in self.requests.values() if known.state == state]

    @property
    def is_full(self) -> bool:
        free = self.limits.max_num_seqs - len(self.of("slot"))
        return len(self.of("waiting")) - free >= self.limits.max_waiting

    @property
    def num_free_slots(self) -> int:
        return max(0, self.limits.max_num_seqs - len(self.of("slot")) - len(self.of("waiting")))

    def admitted_next(self) -> list[str]:
        """The waiting that get the free slots: by priority, then in order of arrival."""
        line = sorted(self.of("waiting"), key=lambda known: (known.priority, known.arrival))
        return [known.request_id for known in line[: self.limits.max_num_seqs - len(self.of("slot"))]]

    def give_up(self, request_id: str, error: type[DiffusionError]) -> None:
        """A request is aborted: at once if it waits, soon if it needs the device, else not at all."""
        known = self.requests[request_id]
        if known.state == "waiting":
            known.state, known.may_end_with = "done", {error}
        elif known.state == "slot":
            known.may_end_with.add(error)

    def stop(self) -> None:
        """The engine stops."""
        for known in self.requests.values():
            if known.final is None:
                self.give_up(known.request_id, EngineStoppedError)

    def check_events(self, known: Known) -> None:
        """The story of a request up to now: in order, at most one end, and nothing after it."""
        kinds = [event.kind for event in known.events]
        finals = [kind for kind in kinds if kind.is_final]
        assert len(finals) <= 1, f"{known.request_id} ended twice: {kinds}"
        assert not finals or kinds[-1].is_final, f"{known.request_id} went on after its end: {kinds}"
        body = [event for event in known.events if not event.kind.is_final]
        order = [event.kind for event in body]
        expected = [EventKind.QUEUED, EventKind.STARTED, *[EventKind.STEP] * max(0, len(order) - 2)]
        assert order == expected[: len(order)], f"{known.request_id}: {order}"
        steps = [event.step for event in body if event.kind is EventKind.STEP]
        assert steps == list(range(1, len(steps) + 1)), f"{known.request_id}: steps {steps}"
        if finals:
            self._check_final(known, steps)

    def _check_final(self, known: Known, steps: list[int]) -> None:
        final = known.events[-1]
        error = None if final.error is None else type(final.error)
        assert error in known.may_end_with, f"{known.request_id} ended with {error}, not {known.may_end_with}"
        assert (final.kind is EventKind.FINISHED) == (error is None)
        assert (final.kind is EventKind.CANCELLED) == (error is RequestCancelledError)
        if final.error is not None:
            assert final.error.request_id == known.request_id
        else:
            assert len(steps) == known.steps, f"{known.request_id} finished after {steps} of {known.steps}"

    def counts(self) -> dict[str, int]:
        """How many ended in which way, of those whose end was told."""
        finals = [known.final.kind for known in self.requests.values() if known.final is not None]
        return {kind.value: finals.count(kind) for kind in (EventKind.FINISHED, EventKind.FAILED, EventKind.CANCELLED)}
