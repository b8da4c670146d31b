"""The end of a model whose engine hangs: tell the callers, then end the process for a supervisor to start it again."""

from __future__ import annotations

import faulthandler
import logging
import os
import time
from collections.abc import Callable

from ..engine import EXIT_HUNG, DiffusionEngine, Executor, Watchdog, WatchedExecutor
from ..errors import HungError

log = logging.getLogger(__name__)

_TELL_S = 5.0
"""How long the answers may take until the process ends without them."""

_LINGER_S = 1.0
"""For how long the process lives on after the answers: the server must pass them on before its launcher ends it, and
those who waited in its queue are refused in this time."""


def watch(executor: Executor, limit_s: float, engine: Callable[[], DiffusionEngine]) -> Executor:
    """Return the executor, watched: this process ends when a unit of its work takes longer than `limit_s` seconds.

    Args:
        engine: returns the engine that will drive it.
    """
    return WatchedExecutor(
        executor, Watchdog(limit_s, lambda what: _end_process(engine(), what, limit_s), is_hard=True)
    )


def _end_process(engine: DiffusionEngine, what: str, limit_s: float) -> None:
    log.error("%s was not done within watchdog_timeout_s (%g s); ending this process", what, limit_s)
    faulthandler.dump_traceback()  # where each thread is, to stderr: the server's log
    engine.break_down("the model hangs", lambda i: HungError(what, limit_s, request_id=i), wait_s=_TELL_S)
    time.sleep(_LINGER_S)
    os._exit(EXIT_HUNG)
