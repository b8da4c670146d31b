"""One pipeline class: four different requests alone on the bare pipeline, then together through the engine."""

from __future__ import annotations

import dataclasses
import logging
import time
import warnings
from typing import Any

import numpy as np
import torch

from diffusion_backend.engine import DiffusionEngine, EngineConfig
from diffusion_backend.pipelines.arguments import call_arguments, signature_of
from diffusion_backend.pipelines.executor import PipelineExecutor
from diffusion_backend.pipelines.probe import prepare
from diffusion_backend.pipelines.reference import own_copy
from diffusion_backend.request import DiffusionOutput, DiffusionRequest
from diffusion_backend.telemetry import MemorySink, Telemetry
from tests.support.families import Case, all_cases

PROMPTS = ("a red apple on a table", "a blue whale in a river", "a green frog on a leaf", "a white swan in a lake")

TOLERANCE = 1e-4
"""Largest difference of an output together from alone, in float32, relative to the larger of 1 and its maximum."""

LEVEL = 1 / 255
"""Where a pipeline itself rounds its output to bytes, a difference of any size can flip one level."""

_FIELDS = {field.name for field in dataclasses.fields(DiffusionRequest)} - {
    "extra_args",
    "seeds",
    "request_id",
    "prompt",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What was found of one class.

    Attributes:
        verdict: `batched`, `in part` (some of its calls), `solo`, or `failed`.
        reason: why calls were run by themselves, or why it failed.
        difference: largest difference of the four outputs together from alone; NaN if it failed.
        joint_share: share of the denoiser calls that shared a forward's row layout (were not solo).
        in_bytes: whether the pipeline rounds its output to bytes itself.
        rows: mean rows of a forward together, divided by the mean rows of a call alone.
        seconds: that the class took in all.
    """

    pipeline: str
    modality: str
    kind: str
    verdict: str
    reason: str
    difference: float
    in_bytes: bool
    joint_share: float
    rows: float
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether every output is as alone."""
        return self.difference <= (LEVEL * 1.001 if self.in_bytes else TOLERANCE)


@dataclasses.dataclass(frozen=True)
class _RawOutput(DiffusionOutput):
    """The pipeline's own output, unconverted: bytes would hide small differences."""

    raw: Any = None


class _RawExecutor(PipelineExecutor):
    def _call(self, active: Any) -> DiffusionOutput:
        arguments = call_arguments(active.request, self._arguments, self._output_type)
        return _RawOutput(raw=active.pipeline(**arguments))


def measure(case: Case) -> Row:
    """Measure one class; never raises for what its pipeline does."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    begin = time.monotonic()
    try:
        verdict, reason, difference, in_bytes, share, rows = _measure(case)
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0][:160]
        verdict, reason, difference, in_bytes = "failed", f"{type(error).__name__}: {text}", float("nan"), False
        share = rows = 0.0
    seconds = time.monotonic() - begin
    return Row(case.pipeline, case.modality, case.kind, verdict, reason, difference, in_bytes, share, rows, seconds)


def measure_by_name(pipeline: str) -> Row:
    """Measure the class of this name; run in a process of the pool (a `Case` cannot be sent to one)."""
    return measure(next(case for case in all_cases() if case.pipeline == pipeline))


def _measure(case: Case) -> tuple[str, str, float, bool, float, float]:
    torch.manual_seed(0)
    pipeline = case.build()
    pipeline.set_progress_bar_config(disable=True)
    requests = [request_of(case, index) for index in range(len(case.steps))]
    arguments = frozenset(signature_of(pipeline))
    output_type = _output_type(pipeline, case, arguments)
    alone = [_run_bare(pipeline, request, arguments, output_type) for request in requests]

    def inputs(seeds: list[int]) -> dict[str, Any]:
        # Plain values (a control mode) are the same in all runs of the probe: only what has rows is to differ.
        plain = {name: value for name, value in case.inputs(1).items() if _is_plain(value)}
        made = [{**case.inputs(seed % 4), **plain} for seed in seeds]
        if len(made) == 1:
            return made[0]
        return {name: _batch([m[name] for m in made]) for name in made[0]}

    capabilities, points, _ = prepare(pipeline, params={**case.params, **case.first_params()}, inputs=inputs)
    sink = MemorySink()
    engine = DiffusionEngine(
        _RawExecutor(pipeline, capabilities, output_type=output_type),
        EngineConfig(max_num_seqs=len(requests), max_batch_rows=256),
        Telemetry(sink),
    )
    engine.start()
    try:
        handles = [engine.submit(request) for request in requests]
        together = [arrays(handle.result(120).output.raw) for handle in handles]
    finally:
        engine.shutdown()
    difference = max(largest(a, b) for a, b in zip(alone, together, strict=True))
    in_bytes = all(np.allclose(a * 255, np.round(a * 255), atol=1e-3) for output in alone for a in output)
    return (*_verdict(sink, points), difference, in_bytes, *_shares(sink))


def request_of(case: Case, index: int) -> DiffusionRequest:
    """Return the i-th of the four requests of a case."""
    params = dict(case.params)
    extra = {name: params.pop(name) for name in list(params) if name not in _FIELDS}
    if case.guidance_scale[index] is not None:
        params["guidance_scale"] = case.guidance_scale[index]
    return DiffusionRequest.make(
        PROMPTS[index] if case.has_prompt else "",
        seed=index,
        request_id=f"{case.pipeline}-{index}",
        num_inference_steps=case.steps[index],
        extra_args={**extra, **case.inputs(index)},
        **params,
    )


def arrays(raw: Any) -> list[np.ndarray[Any, Any]]:
    """Return everything numeric in a pipeline's output, as float64 arrays."""
    if isinstance(raw, torch.Tensor):
        return [raw.detach().double().cpu().numpy()]
    if isinstance(raw, np.ndarray):
        return [raw.astype(np.float64)] if raw.dtype != object else [a for item in raw for a in arrays(item)]
    if hasattr(raw, "convert") and hasattr(raw, "size"):  # a PIL picture
        return [np.asarray(raw).astype(np.float64) / 255]
    if isinstance(raw, dict):
        return [array for value in raw.values() for array in arrays(value)]
    if isinstance(raw, list | tuple):
        return [array for value in raw for array in arrays(value)]
    return [np.asarray(float(raw))] if isinstance(raw, int | float) and not isinstance(raw, bool) else []


def largest(one: list[np.ndarray[Any, Any]], two: list[np.ndarray[Any, Any]]) -> float:
    """Return the largest difference of two outputs; infinite if they differ in shape or in where they are NaN."""
    if [a.shape for a in one] != [b.shape for b in two] or not one:
        return float("inf")
    worst = 0.0
    for a, b in zip(one, two, strict=True):
        if not np.array_equal(np.isnan(a), np.isnan(b)):
            return float("inf")
        if a.size:
            scale = max(1.0, float(np.nan_to_num(np.abs(a)).max()))
            worst = max(worst, float(np.nan_to_num(np.abs(a - b)).max()) / scale)
    return worst


def _run_bare(pipeline: Any, request: DiffusionRequest, arguments: frozenset[str], output_type: str) -> Any:
    with torch.no_grad():
        return arrays(own_copy(pipeline, None)(**call_arguments(request, arguments, output_type)))


def _output_type(pipeline: Any, case: Case, arguments: frozenset[str]) -> str:
    """Return the first output type that works with the bare pipeline; floats are preferred."""
    problem: Exception | None = None
    for output_type in ("pt", "np", "pil"):
        try:
            if _run_bare(pipeline, request_of(case, 0), arguments, output_type):
                return output_type
        except Exception as error:
            problem = problem or error
    raise problem or ValueError("the output holds no numbers")


def _batch(values: list[Any]) -> Any:
    """Return the inputs of several prompts as one argument: tensors joined, all else in a list."""
    if all(isinstance(value, torch.Tensor) for value in values):
        return torch.cat(values)
    return values[0] if _is_plain(values[0]) and all(value == values[0] for value in values) else values


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return isinstance(value, bool | int | float | str | type(None))


def _verdict(sink: MemorySink, points: list[Any]) -> tuple[str, str]:
    solo = {labels[0]: int(n) for (name, labels), n in sink.values.items() if name == "diffusion_solo_calls_total"}
    forwards = len(sink.samples["diffusion_batch_rows", ()])
    reasons = ", ".join(sorted(solo)) + "".join(f"; {p.name}: {p.solo_reason}" for p in points if p.solo_reason)
    if not forwards:
        return "solo", "no_meeting_point"
    if not solo:
        return "batched", ""
    return ("solo" if sum(solo.values()) == forwards else "in part"), reasons


def _shares(sink: MemorySink) -> tuple[float, float]:
    rows = sink.samples["diffusion_batch_rows", ()]
    solo = sum(n for (name, _), n in sink.values.items() if name == "diffusion_solo_calls_total")
    if not rows:
        return 0.0, 0.0
    return 1 - solo / len(rows), sum(rows) / len(rows)
