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

    The scheduler's class becomes a subclass whose `step` reports here. A pipeline may copy its scheduler and step the
    copies, or several of them in turn: the first one that steps is counted, and the others are left alone, so that each
    step counts once.

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
        base = type(scheduler)
        original = base.step
        meter = self

        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            return meter._run(scheduler, functools.partial(original, scheduler), args, kwargs)

        # Pipelines ask for the parameters of `step` to know whether it takes a generator or eta.
        step.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        names = {"step": step, "__module__": base.__module__, "__doc__": base.__doc__}
        scheduler.__class__ = type(base.__name__, (base,), names)

    def _run(self, scheduler: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do a step of a scheduler, and count it if that is the counted one."""
        if self._counted is None:
            self._counted = scheduler
            self.num_steps = self._total(args[1] if len(args) > 1 else kwargs.get("timestep"))
        output = original(*args, **kwargs)
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
