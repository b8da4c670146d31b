"""The clock, and one typed record of where a request's time went.

All times come from `now()`, the monotonic clock of this process, so that differences of two of them are exact
durations and are never compared with another process's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

now = time.monotonic
"""Seconds of the one clock that all records use."""

PHASES = ("queue", "preprocess", "execute", "postprocess")
"""The phases of a request, in order; they partition its life."""


@dataclass(slots=True)
class RequestRecord:
    """The instants of a request, in seconds of `now()`, and the parameters that were really used.

    Written by the engine thread until the pipeline has returned, then by the thread that finishes the request.

    Attributes:
        submitted: `submit` was called.
        started: admitted; the pipeline's call begins.
        first_forward: the first denoiser call is ready to run.
        last_step: the last denoising step is done.
        finished: the result is ready to be handed out (decoded, encoded, on the host).
        first_step: the first denoising step is done.
        step, num_steps: denoising steps done and in all, as far as is known.
        params: `param_*` values, JSON scalars or lists.
    """

    submitted: float
    started: float | None = None
    first_forward: float | None = None
    first_step: float | None = None
    last_step: float | None = None
    finished: float | None = None
    step: int = 0
    num_steps: int = 0
    params: dict[str, object] = field(default_factory=dict)

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each phase and in all; a phase that was never reached took none.

        The phases are differences of consecutive instants, so they add up to `total` by construction.
        """
        end = self.finished if self.finished is not None else now()
        marks = [self.submitted, self.started, self.first_forward, self.last_step]
        # A mark that was never set takes the next one that was: its phase is empty and the sum stays exact.
        filled = [end]
        for mark in reversed(marks):
            filled.insert(0, mark if mark is not None else filled[0])
        parts = {name: filled[i + 1] - filled[i] for i, name in enumerate(PHASES)}
        return {**parts, "total": end - self.submitted}

    def time_to_first_step(self) -> float | None:
        """Return the seconds from `submit` to the end of the first denoising step, or None before it."""
        return None if self.first_step is None else self.first_step - self.submitted

    def as_dict(self) -> dict[str, object]:
        """Return the flat record of the `metrics` output: `time_*_ms` and `param_*`."""
        times: dict[str, object] = {f"time_{name}_ms": value * 1e3 for name, value in self.seconds().items()}
        to_first = self.time_to_first_step()
        if to_first is not None:
            times["time_to_first_step_ms"] = to_first * 1e3
        return {**times, **{f"param_{name}": value for name, value in self.params.items()}}
