"""How long a stage of the training lasts, and the learning rate that follows from it."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """A stage's length: minutes of wall time, a number of steps, or whichever is used up first."""

    minutes: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.minutes is None and self.steps is None:
            raise ValueError("a budget needs minutes or steps")

    def progress(self, step: int, seconds: float) -> float:
        """Return the part of the budget that is used, from 0 to 1."""
        by_time = _part(seconds, None if self.minutes is None else self.minutes * 60)
        return max(by_time, _part(step, self.steps))

    def __str__(self) -> str:
        limits = []
        if self.minutes is not None:
            limits.append(f"{self.minutes:g} minutes")
        if self.steps is not None:
            limits.append(f"{self.steps} steps")
        return " or ".join(limits)


def _part(used: float, limit: float | None) -> float:
    if limit is None:
        return 0.0
    return 1.0 if used >= limit else used / limit


class Stopwatch:
    """Seconds spent on a stage over all the runs that it took."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._before = seconds
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds so far."""
        return self._before + time.monotonic() - self._start


def learning_rate(peak: float, step: int, progress: float, warmup_steps: int) -> float:
    """Rise to `peak` over the first steps, then fall linearly to nothing at the end of the budget."""
    return peak * min(1.0, (step + 1) / warmup_steps) * (1.0 - progress)
