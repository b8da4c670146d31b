"""Runs a pipeline with made-up inputs, and keeps every denoiser call and what it gave alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..engine.executor import WorkKind
from ..request import DiffusionRequest
from . import layout
from .arguments import call_arguments
from .meeting_point import Call, RequestGreenlet
from .reference import own_copy

_PROMPTS = ("a red apple on a table", "a blue whale in a river")  # as many words: as many tokens
_STEPS = 2
_REQUEST_FIELDS = ("num_inference_steps", "guidance_scale", "height", "width", "num_frames")

InputMaker = Callable[[list[int]], dict[str, Any]]
"""Makes the arguments of a call from the seeds of its items: single values for one, lists for several."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A denoiser call of a probe run, and what it gave alone."""

    call: Call
    output: Any


@dataclass(slots=True)
class ProbeRunner:
    """Runs a pipeline with made-up inputs, recording its denoiser calls.

    Attributes:
        arguments: names of the arguments of the pipeline's call.
        params: plain arguments of every run.
        inputs: makes the pictures and the like.
        output_type: that the pipeline is called with.
        modalities: that came out of the first run.
        first_calls: the denoiser calls of the first run.
        changes_modules: whether a call changes the modules that all requests share.
    """

    pipeline: Any
    arguments: frozenset[str]
    params: dict[str, Any]
    inputs: InputMaker
    output_type: str = "pt"
    modalities: tuple[str, ...] = ()
    first_calls: list[Recorded] = field(default_factory=list)
    changes_modules: bool = False

    def run(
        self,
        num_prompts: int,
        seed: int,
        *,
        num_outputs: int = 1,
        num_pictures: int | None = None,
        on_call: Callable[[], None] | None = None,
        **params: Any,
    ) -> tuple[Any, list[Recorded]]:
        """Run once; return the raw output and the denoiser calls.

        Args:
            num_prompts: items of the call.
            seed: of the first item; the others follow.
            num_outputs: outputs a prompt.
            num_pictures: pictures for the items; as many as prompts by default.
            on_call: called at each denoiser call.
            params: further plain arguments.
        """
        wanted = {"num_inference_steps": _STEPS, **self.params, **params}
        usable = {name: value for name, value in wanted.items() if name in self.arguments}
        own = {name: usable.pop(name) for name in list(usable) if name in _REQUEST_FIELDS}
        items = list(range(seed, seed + (num_prompts if num_pictures is None else num_pictures)))
        request = DiffusionRequest.make(
            tuple(_PROMPTS[(seed + i) % len(_PROMPTS)] for i in range(num_prompts)),
            seed=seed,
            request_id="probe",
            num_outputs_per_prompt=num_outputs,
            extra_args={**usable, **self.inputs(items)},
            **own,
        )
        return record(self.pipeline, call_arguments(request, self.arguments, self.output_type), on_call)


def record(
    pipeline: Any, keywords: dict[str, Any], on_call: Callable[[], None] | None = None
) -> tuple[Any, list[Recorded]]:
    """Run a pipeline's call on a copy with schedulers of its own; return its output and its denoiser calls."""
    calls: list[Recorded] = []

    def run(call: Call) -> Any:
        if call.point.kind is not WorkKind.FORWARD:
            return call.point.run_one(call)
        if on_call is not None:
            on_call()
        kept = Call(call.point, *layout.map_tensors(torch.Tensor.clone, call.arguments))
        output = call.point.run_one(call)
        calls.append(Recorded(kept, layout.map_tensors(torch.Tensor.clone, output)))
        return output

    own = own_copy(pipeline, None)
    return drive(RequestGreenlet(lambda: own(**keywords)), run), calls


def drive(task: RequestGreenlet, run: Callable[[Call], Any]) -> Any:
    """Run a greenlet to its end, answering each parked call with `run(call)`; return what it returned."""
    outcome = task.switch()
    while not task.dead:
        try:
            answer = run(outcome)
        except Exception as error:
            outcome = task.throw(error)
        else:
            outcome = task.switch(answer)
    return outcome
