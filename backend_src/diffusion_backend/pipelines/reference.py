"""The plain loop that everything is compared with: one request at a time, the bare pipeline."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import diffusers
import torch
from diffusers import SchedulerMixin

from ..request import DiffusionOutput, DiffusionRequest
from .arguments import call_arguments, defaults_of, frame_rate_of, signature_of
from .audio import sample_rate_of
from .outputs import to_output

if TYPE_CHECKING:
    from .adapters import Adapters


def run_alone(
    pipeline: Any, request: DiffusionRequest, *, output_type: str = "pt", adapters: Adapters | None = None
) -> DiffusionOutput:
    """Run one request on the bare pipeline; called by any thread that has the pipeline to itself.

    The pipeline's schedulers are left as they were; the request's adapters stay in force.

    Args:
        adapters: of this pipeline, for requests that ask for some.
    """
    if adapters is not None:
        adapters.use(adapters.select(request.lora, request_id=request.request_id))
    arguments = frozenset(signature_of(pipeline))
    own, defaults = own_copy(pipeline, request.scheduler), defaults_of(pipeline)
    with torch.no_grad():
        raw = own(**call_arguments(request, arguments, output_type, defaults))
    rate = request.frame_rate if request.frame_rate is not None else frame_rate_of(defaults)
    return to_output(raw, sample_rate=sample_rate_of(pipeline), frame_rate=rate)


def components_of(pipeline: Any) -> dict[str, Any]:
    """Return a pipeline's components by name, those of optional parameters too (`pipeline.components` has not all)."""
    attributes = vars(pipeline)
    return {name: attributes[name] for name in pipeline.config if name in attributes and not name.startswith("_")}


def own_copy(pipeline: Any, scheduler: str | None) -> Any:
    """Return a shallow copy of a pipeline for one request: all weights shared, every scheduler its own.

    Pipelines inside a combined pipeline are copied too, and keep sharing schedulers with it where they did.

    Args:
        scheduler: class name of the scheduler to use instead of the pipeline's own; None for its own.
    """
    return _own_copy(pipeline, scheduler, {})


def _own_copy(pipeline: Any, scheduler: str | None, copied: dict[int, Any]) -> Any:
    own = copy.copy(pipeline)
    # Past the pipeline's __setattr__, which writes to its shared configuration.
    attributes = own.__dict__
    # At its end a call takes the offloading hooks off the modules, which are in use by others.
    attributes["maybe_free_model_hooks"] = _nothing
    for name, component in components_of(pipeline).items():
        if isinstance(component, SchedulerMixin):
            if id(component) not in copied:
                copied[id(component)] = request_scheduler(component, scheduler if name == "scheduler" else None)
            attributes[name] = copied[id(component)]
        elif name == "guider":  # it keeps the step and the predictions of a call
            attributes[name] = copy.deepcopy(component)
    for name, value in vars(pipeline).items():
        if isinstance(value, diffusers.DiffusionPipeline):
            attributes[name] = _own_copy(value, None, copied)
    return own


def _nothing() -> None:
    """Do nothing."""


def request_scheduler(base: Any, name: str | None) -> Any:
    """Return a scheduler for one request: a copy of the pipeline's own, or one of another class with its settings."""
    if name is None or name == type(base).__name__:
        return copy.deepcopy(base)
    return getattr(diffusers, name).from_config(base.config)
