"""The plain loop that everything is compared with: one request at a time, the bare pipeline."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..request import DiffusionOutput, DiffusionRequest
from .arguments import call_arguments, signature_of
from .outputs import to_output


def run_alone(pipeline: Any, request: DiffusionRequest, *, output_type: str = "pt") -> DiffusionOutput:
    """Run one request on the bare pipeline; called by any thread that has the pipeline to itself.

    The pipeline's scheduler is left as it was.
    """
    kept = pipeline.scheduler
    try:
        pipeline.scheduler = request_scheduler(kept, request.scheduler)
        arguments = frozenset(signature_of(pipeline))
        with torch.inference_mode():
            return to_output(pipeline(**call_arguments(request, arguments, output_type)))
    finally:
        pipeline.scheduler = kept


def request_scheduler(base: Any, name: str | None) -> Any:
    """Return a scheduler for one request: a copy of the pipeline's own, or one of another class with its settings."""
    if name is None or name == type(base).__name__:
        return copy.deepcopy(base)
    import diffusers

    return getattr(diffusers, name).from_config(base.config)
