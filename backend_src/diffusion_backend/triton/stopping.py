"""The end of the time that a stopping server gives its running requests: the launcher tells, and the callers are told.

The launcher names a pipe in the environment. Opening it for reading sleeps until the launcher opens the other end,
which it does once, when the time is up. Without the launcher there is no such pipe, and Triton cuts off what runs.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping

STOP_VARIABLE = "DIFFUSION_STOP_FIFO"

log = logging.getLogger(__name__)


def on_stop(call: Callable[[], None], environment: Mapping[str, str] = os.environ) -> None:
    """Call a function, on a thread of its own, when the launcher says that the time is up; never without a launcher."""
    path = environment.get(STOP_VARIABLE)
    if path is not None:
        threading.Thread(target=_wait, args=(path, call), name="diffusion-stop", daemon=True).start()


def _wait(path: str, call: Callable[[], None]) -> None:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        log.info("the launcher cannot tell this model when its time is up: %s", error)
        return
    call()
