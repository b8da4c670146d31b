"""What a caller holds of a request: its events, its result, and the way to abort it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import DiffusionError
from ..request import DiffusionOutput, DiffusionRequest, DiffusionResult, Event
from ..timing import RequestRecord
from .executor import Report
from .scheduler import Group

if TYPE_CHECKING:
    from .engine import DiffusionEngine

log = logging.getLogger(__name__)

OnEvent = Callable[[Event], None]
Finalize = Callable[[DiffusionOutput], Any]
OnWork = Callable[[Group, Report], None]


class RequestHandle:
    """Made by `DiffusionEngine.submit`; its methods may be called by any thread.

    Attributes:
        request: as submitted.
        record: the instants of the request; complete after the final event.
    """

    def __init__(
        self,
        engine: DiffusionEngine,
        request: DiffusionRequest,
        record: RequestRecord,
        on_event: OnEvent | None,
        finalize: Finalize | None,
        on_work: OnWork | None = None,
    ) -> None:
        self.request = request
        self.record = record
        self.finalize = finalize
        self.on_work = on_work
        self._engine = engine
        self._on_event = on_event
        self._changed = threading.Condition()
        self._events: list[Event] = []  # not yet taken by `events`, or not yet passed to `on_event`
        self._passing = False  # whether a thread is calling `on_event`
        self._final: Event | None = None

    def result(self, timeout: float | None = None) -> DiffusionResult:
        """Sleep until the request has ended; return its result.

        Args:
            timeout: seconds to wait at most; the request goes on when they have passed.

        Raises:
            DiffusionError: what the request ended with, if not with a result.
            TimeoutError: `timeout` passed first.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._final is not None, timeout):
                raise TimeoutError(f"request {self.request.request_id} has not ended within {timeout} s")
            final = self._final
        assert final is not None
        if final.error is not None:
            raise final.error
        assert final.result is not None
        return final.result

    def events(self) -> Iterator[Event]:
        """Yield the events from the first to the final one, sleeping between them; for one consumer.

        Not with `on_event`: then the events go there.
        """
        assert self._on_event is None, "the events of this request go to its on_event function"
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._events)
                fresh, self._events = self._events, []
            for event in fresh:
                yield event
                if event.kind.is_final:
                    return

    @property
    def done(self) -> bool:
        """Whether the final event was delivered."""
        return self._final is not None

    def abort(self, error: DiffusionError | None = None) -> None:
        """Give the request up: at once if it waits, at its next step if it runs, not at all if it has ended.

        Args:
            error: what it ends with instead of `RequestCancelledError`.
        """
        self._engine.abort(self.request.request_id, error)

    def deliver(self, event: Event) -> bool:
        """Hand an event over; called by the engine only. Nothing is handed over after the final event.

        Returns:
            Whether it was handed over.
        """
        with self._changed:
            if self._final is not None:
                return False
            if event.kind.is_final:
                self._final = event
            self._events.append(event)
            self._changed.notify_all()
            if self._on_event is None or self._passing:
                return True  # the thread that is passing events on takes this one too
            self._passing = True
        self._pass_on(self._on_event)
        return True

    def _pass_on(self, on_event: OnEvent) -> None:
        """Call `on_event` with what is kept, one by one and in order, whichever threads deliver meanwhile.

        A function that raises is logged: the threads that deliver (one keeps all deadlines) must go on.
        """
        while True:
            with self._changed:
                if not self._events:
                    self._passing = False
                    return
                event = self._events.pop(0)
            try:
                on_event(event)
            except Exception:
                log.exception("the on_event function of request %s failed", self.request.request_id)
