"""Whether, and after which pause, a server that died is started again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 3600.0
"""Restarts of the last hour count: a server that dies now and then is kept, one that dies again and again is not."""

MAX_PAUSE_S = 60.0


class Restarts:
    """Allows so many restarts within an hour, with pauses of 1, 2, 4, … seconds, at most `MAX_PAUSE_S`.

    Args:
        max_restarts: restarts within an hour; 0 for none.
        clock: tells the seconds.
    """

    def __init__(self, max_restarts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max = max_restarts
        self._clock = clock
        self._times: deque[float] = deque()

    def next_pause(self) -> float | None:
        """Count a restart; return the seconds to wait before it, or None if there were too many."""
        now = self._clock()
        while self._times and self._times[0] <= now - WINDOW_S:
            self._times.popleft()
        if len(self._times) >= self._max:
            return None
        self._times.append(now)
        return min(MAX_PAUSE_S, 2.0 ** (len(self._times) - 1))
