"""The plain loop that everything is compared with: one request at a time, the bare pipeline."""

from __future__ import annotations

import copy
from typing import Any

import diffusers
import torch
from diffusers import SchedulerMixin

from ..request import DiffusionOutput, DiffusionRequest
from .arguments import call_arguments, defaults_of, signature_of
from .audio import sample_rate_of
from .outputs import to_output


def run_alone(pipeline: Any, request: DiffusionRequest, *, output_type: str = "pt") -> DiffusionOutput:
    """Run one request on the bare pipeline; called by any thread that has the pipeline to itself.

    The pipeline's schedulers are left as they were.
    """
    arguments = frozenset(signature_of(pipeline))
    own = own_copy(pipeline, request.scheduler)
    with torch.no_grad():
        raw = own(**call_arguments(request, arguments, output_type, defaults_of(pipeline)))
    return to_output(raw, sample_rate=sample_rate_of(pipeline))


def components_of(pipeline: Any) -> dict[str, Any]:
    """Return a pipeline's components by name, those of optional parameters too (`pipeline.components` has not all)."""
    attributes = vars(pipeline)
    return {name: attributes[name] for name in pipeline.config if name in attributes and not name.startswith("_")}


def own_copy(pipeline: Any, scheduler: str | None) -> Any:
    """Return a shallow copy of a pipeline for one request: all weights shared, every scheduler its own.

    Args:
        scheduler: class name of the scheduler to use instead of the pipeline's own; None for its own.
    """
    own = copy.copy(pipeline)
    for name, component in components_of(pipeline).items():
        # Past the pipeline's __setattr__, which writes to its shared configuration.
        if isinstance(component, SchedulerMixin):
            own.__dict__[name] = request_scheduler(component, scheduler if name == "scheduler" else None)
        elif name == "guider":  # it keeps the step and the predictions of a call
            own.__dict__[name] = copy.deepcopy(component)
    return own


def request_scheduler(base: Any, name: str | None) -> Any:
    """Return a scheduler for one request: a copy of the pipeline's own, or one of another class with its settings."""
    if name is None or name == type(base).__name__:
        return copy.deepcopy(base)
    return getattr(diffusers, name).from_config(base.config)
