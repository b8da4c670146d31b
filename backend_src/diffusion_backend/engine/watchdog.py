"""Notices a unit of work that does not end: a forward, a text encoding, a decode that hangs.

A thread that hangs in the device's driver cannot be interrupted, so all that can be done is to tell the callers and to
end the process, for a supervisor to start it again. The limit is the model's parameter `watchdog_timeout_s`; without it
nothing of this is made.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..errors import DiffusionError
from ..request import DiffusionRequest
from ..timing import now
from .executor import Capabilities, Executor, Report, WorkKind

log = logging.getLogger(__name__)

EXIT_HUNG = 86
"""Exit code of a model's process that ended itself because it hung; the launcher says so."""

_EXPIRY_S = 15.0
"""What `on_expiry` may take, of a hard watchdog, until the process is ended without it."""

_WORDS = {
    WorkKind.START: "the preprocessing of a request",
    WorkKind.FORWARD: "a forward of {} requests",
    WorkKind.STEP: "a step of a request",
    WorkKind.DECODE: "a decode",
}


class Watchdog:
    """A thread that sleeps until the unit of work under way has taken too long, then calls `on_expiry` and ends.

    While nothing is under way it sleeps for ever, and while units end in time it wakes about once in `limit_s`.

    Args:
        limit_s: seconds that a unit may take.
        on_expiry: called once, by the watchdog's thread, with what was under way, in words.
        is_hard: whether to end the process after twice the limit even if nothing of Python runs any more (a native call
            that hangs and keeps the interpreter's lock); the stack of each thread is written to stderr then.
    """

    def __init__(self, limit_s: float, on_expiry: Callable[[str], None], *, is_hard: bool = False) -> None:
        self.limit_s = limit_s
        self._on_expiry = on_expiry
        self._is_hard = is_hard
        self._changed = threading.Condition()
        self._unit: tuple[float, str] | None = None  # when it began, and what it is
        self._is_idle = True  # whether the thread sleeps without a limit (or has not begun)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="diffusion-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching; called by the thread that did the work."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    @contextlib.contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Watch the block; one at a time."""
        with self._changed:
            self._unit = (now(), what)
            if self._is_idle:
                self._is_idle = False
                self._set_alarm(2 * self.limit_s)  # here, as the watchdog's thread may not come to run before a hang
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._unit = None

    def _run(self) -> None:
        what = self._wait()
        if what is not None:
            self._on_expiry(what)

    def _wait(self) -> str | None:
        """Sleep until a unit has taken too long; return what it is, or None at the end."""
        with self._changed:
            while not self._is_closed:
                left = None if self._unit is None else self._unit[0] + self.limit_s - now()
                if self._unit is not None and left is not None and left <= 0:
                    self._set_alarm(_EXPIRY_S)
                    return self._unit[1]
                self._set_alarm(None if left is None else left + self.limit_s)
                self._is_idle = left is None
                self._changed.wait(left)
            self._set_alarm(None)
            return None

    def _set_alarm(self, seconds: float | None) -> None:
        """End the process in so many seconds, unless this is called again before; None takes that back."""
        if not self._is_hard:
            return
        if seconds is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(seconds, exit=True)


class WatchedExecutor:
    """Another executor, each of whose units of work is watched; see `Executor` for its methods.

    Control calls (`collective_rpc`) are not watched: to load an adapter may take any time.
    """

    def __init__(self, executor: Executor, watchdog: Watchdog) -> None:
        self._executor = executor
        self._watchdog = watchdog

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)  # for control calls by name

    @property
    def capabilities(self) -> Capabilities:
        """Those of the executor."""
        return self._executor.capabilities

    def start(self) -> None:
        """Start the watchdog, too."""
        self._executor.start()
        self._watchdog.start()

    def close(self) -> None:
        """Stop the watchdog, too."""
        try:
            self._executor.close()
        finally:
            self._watchdog.close()

    def add_req(self, request: DiffusionRequest) -> None:
        """See `Executor.add_req`."""
        with self._watchdog.watching("taking a request in"):
            self._executor.add_req(request)

    def execute(self, kind: WorkKind, request_ids: Sequence[str]) -> list[Report]:
        """See `Executor.execute`."""
        with self._watchdog.watching(_WORDS[kind].format(len(request_ids))):
            return self._executor.execute(kind, request_ids)

    def abort(self, request_id: str, error: DiffusionError) -> Report:
        """See `Executor.abort`."""
        with self._watchdog.watching("the abort of a request"):
            return self._executor.abort(request_id, error)

    def _dummy_run(self, height: int | None, width: int | None) -> None:
        self._executor._dummy_run(height, width)
