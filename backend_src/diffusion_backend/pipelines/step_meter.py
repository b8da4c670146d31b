"""Counts the denoising steps of one request, on the request's own copy of the scheduler.

Works with every pipeline, with or without callbacks: each step goes through `scheduler.step`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

OnStep = Callable[["StepMeter"], None]


class StepMeter:
    """Counts the steps of a scheduler that one request owns.

    A pipeline may copy its scheduler and step the copies, or several of them in turn: the first one that steps is
    counted, and the others are left alone, so that each step counts once.

    Attributes:
        step: steps done.
        num_steps: steps in all; known from the first step on.
        sample: the sample after the last step: the predicted clean one where the scheduler tells it, else the noisy
            one, with the layout of the pipeline's latents; None before the first step, or if `keep_sample` is False.
    """

    def __init__(self, scheduler: Any, on_step: OnStep, *, keep_sample: bool) -> None:
        self.step = 0
        self.num_steps = 0
        self.sample: torch.Tensor | None = None
        self._counted: Any = None
        self._on_step = on_step
        self._keep_sample = keep_sample
        scheduler.step = _MeteredStep(self, scheduler)

    def run(self, scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do a step of a scheduler, and count it if that is the counted one; called in the request's greenlet."""
        if self._counted is None:
            self._counted = scheduler
            self.num_steps = self._total(args[1] if len(args) > 1 else kwargs.get("timestep"))
        output = type(scheduler).step(scheduler, *args, **kwargs)
        if scheduler is self._counted:
            self.step += 1
            self.num_steps = max(self.num_steps, self.step)
            if self._keep_sample:
                self.sample = _clean_sample(output)
            self._on_step(self)
        return output

    def _total(self, timestep: Any) -> int:
        """Return the steps that follow, the current one included (image-to-image starts in the middle)."""
        timesteps = getattr(self._counted, "timesteps", None)
        if timesteps is None:
            return 0
        total = len(timesteps)
        begin = getattr(self._counted, "begin_index", None)
        if begin is not None:
            return total - int(begin)
        if isinstance(timestep, torch.Tensor) and timestep.numel() >= 1:
            timestep = float(timestep.reshape(-1)[0])
        if isinstance(timestep, int | float):
            found = (torch.as_tensor(timesteps).cpu() == timestep).nonzero()
            if len(found):
                return total - int(found[0])
        return total


class _MeteredStep:
    """Stands in the place of a scheduler's `step`, with its signature; a copy of the scheduler gets one of its own."""

    def __init__(self, meter: StepMeter, scheduler: Any) -> None:
        self._meter = meter
        self._scheduler = scheduler
        # Pipelines ask for the parameters of `step` to know whether it takes a generator or eta.
        bound = type(scheduler).step.__get__(scheduler)
        functools.update_wrapper(self, bound)
        self.__signature__ = inspect.signature(bound)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._meter.run(self._scheduler, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _MeteredStep:
        return _MeteredStep(self._meter, memo.get(id(self._scheduler), self._scheduler))


def _clean_sample(output: Any) -> torch.Tensor | None:
    """Return what the sample will look like in the end, as well as the scheduler tells."""
    for name in ("pred_original_sample", "prev_sample"):
        value = getattr(output, name, None)
        if isinstance(value, torch.Tensor):
            return value
    if isinstance(output, tuple) and output:
        # With return_dict=False: (prev_sample, pred_original_sample) for the schedulers that have both.
        value = output[1] if len(output) > 1 and isinstance(output[1], torch.Tensor) else output[0]
        return value if isinstance(value, torch.Tensor) else None
    return None
