"""Learns, when a pipeline is loaded, how the calls of its denoisers can be merged, and proves it.

The pipeline runs for one row and for two, with and without guidance, and every denoiser call is recorded. Comparing
the two runs gives the layout of each shape of call; merging recorded calls of both (of different prompts, seeds and,
where the layout allows it, steps) and comparing with what each gave alone is the self-check. A denoiser that fails it
runs its calls one by one: right, only unbatched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.executor import Capabilities, WorkKind
from ..request import DiffusionRequest
from . import layout
from .arguments import OUTPUTS_PER_PROMPT, call_arguments, defaults_of, signature_of
from .layout import LayoutError
from .meeting_point import Call, CallLayout, MeetingPoint, RequestGreenlet, largest_difference, run_merged
from .outputs import to_output
from .previews import can_preview
from .reference import request_scheduler

log = logging.getLogger(__name__)

DENOISERS = ("unet", "unet_2", "transformer", "transformer_2", "controlnet", "prior", "decoder", "dit")
"""Components whose `forward` is called at every step."""

DECODERS = ("vae", "vqvae", "vqgan", "movq", "audio_vae")
"""Components whose `decode` makes the output."""

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest difference, relative to the larger of 1 and the largest output, between a merged call and the call alone.

A few units of the type's precision, grown by the depth of a network: other row counts take other matrix kernels.
"""

_PROMPTS = ("a red apple on a table", "a blue whale in a river")  # as many words: as many tokens
_STEPS = 2


@dataclass(frozen=True, slots=True)
class Recorded:
    """A denoiser call of a probe run, and what it gave alone."""

    call: Call
    output: Any


def prepare(
    pipeline: Any,
    *,
    step_batching: bool = True,
    tolerance: float | None = None,
    height: int | None = None,
    width: int | None = None,
) -> tuple[Capabilities, list[MeetingPoint], str]:
    """Install the meeting points of a freshly loaded pipeline, learn their layouts, and find out what it can do.

    Called once by the thread that loads the pipeline, before the engine starts.

    Args:
        step_batching: False installs them for turn-taking only: nothing is merged.
        tolerance: of the self-check; by default that of the denoiser's dtype in `TOLERANCES`.
        height, width: of the probe runs, in pixels; the pipeline's own by default.

    Returns:
        The capabilities, the denoisers' meeting points, and the `output_type` to call the pipeline with.
    """
    points = install(pipeline)
    arguments = frozenset(signature_of(pipeline))
    size = {"height": height, "width": width}

    def request(prompts: tuple[str, ...], seed: int, **params: Any) -> DiffusionRequest:
        wanted = {"num_inference_steps": _STEPS, **size, **params}
        usable = {k: v for k, v in wanted.items() if k in arguments or k == "num_outputs_per_prompt"}
        return DiffusionRequest.make(prompts, seed=seed, request_id="probe", **usable)

    with torch.inference_mode():
        output_type, modalities, calls = _try_output_types(pipeline, arguments, request(_PROMPTS[:1], 1))
        if not step_batching:
            for point in points:
                point.solo_reason = "disabled"
        else:
            _learn_all(pipeline, arguments, points, request, output_type, tolerance)
    rows = 1
    for recorded in calls:
        known = recorded.call.point.find_layout(recorded.call)
        if known is not None:
            rows = max(rows, layout.count_rows(known.arguments, recorded.call.arguments))
    scheduler = getattr(pipeline, "scheduler", None)
    names = {cls.__name__ for cls in getattr(scheduler, "compatibles", [])}
    if scheduler is not None:
        names.add(type(scheduler).__name__)
    capabilities = Capabilities(
        pipeline_class=type(pipeline).__name__,
        modalities=modalities,
        arguments=arguments,
        defaults=defaults_of(pipeline),
        size_multiple=_size_multiple(pipeline),
        schedulers=tuple(sorted(names)),
        supports_previews=can_preview(pipeline),
        joint={point.name: point.solo_reason for point in points},
        rows_per_output=rows,
    )
    return capabilities, points, output_type


def install(pipeline: Any) -> list[MeetingPoint]:
    """Put meeting points at the pipeline's denoisers and decoders; return those of the denoisers."""
    points = []
    for name, module in pipeline.components.items():
        if name in DENOISERS and isinstance(module, torch.nn.Module):
            point = MeetingPoint(name, WorkKind.FORWARD, module.forward, solo_reason="unknown_call")
            point.install(module, "forward")
            points.append(point)
        elif name in DECODERS and hasattr(module, "decode"):
            MeetingPoint(name, WorkKind.DECODE, module.decode).install(module, "decode")
    return points


def record(
    pipeline: Any, arguments: frozenset[str], request: DiffusionRequest, output_type: str
) -> tuple[Any, list[Recorded]]:
    """Run one request on the pipeline; return its raw output and its denoiser calls."""
    calls: list[Recorded] = []

    def run(call: Call) -> Any:
        if call.point.kind is not WorkKind.FORWARD:
            return call.point.run_one(call)
        kept = Call(call.point, *layout.map_tensors(torch.Tensor.clone, call.arguments))
        output = call.point.run_one(call)
        calls.append(Recorded(kept, layout.map_tensors(torch.Tensor.clone, output)))
        return output

    kept_scheduler = getattr(pipeline, "scheduler", None)
    if kept_scheduler is not None:
        pipeline.scheduler = request_scheduler(kept_scheduler, None)
    try:
        keywords = call_arguments(request, arguments, output_type)
        return drive(RequestGreenlet(lambda: pipeline(**keywords)), run), calls
    finally:
        if kept_scheduler is not None:
            pipeline.scheduler = kept_scheduler


def drive(task: RequestGreenlet, run: Callable[[Call], Any]) -> Any:
    """Run a greenlet to its end, answering each parked call with `run(call)`; return what it returned."""
    outcome = task.switch()
    while not task.dead:
        outcome = task.switch(run(outcome))
    return outcome


def _try_output_types(
    pipeline: Any, arguments: frozenset[str], request: DiffusionRequest
) -> tuple[str, tuple[str, ...], list[Recorded]]:
    """Return the first output type that works, what came out, and the denoiser calls. Tensors are preferred."""
    for output_type in ("pt", "np"):
        try:
            raw, calls = record(pipeline, arguments, request, output_type)
            return output_type, to_output(raw).modalities, calls
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            log.info("output_type=%r does not work: %s", output_type, error)
    raw, calls = record(pipeline, arguments, request, "pil")
    return "pil", to_output(raw).modalities, calls


def _learn_all(
    pipeline: Any,
    arguments: frozenset[str],
    points: list[MeetingPoint],
    request: Callable[..., DiffusionRequest],
    output_type: str,
    tolerance: float | None,
) -> None:
    """Learn and check the layouts of all points; points that end without one keep the reason why."""
    guidances: list[dict[str, Any]] = [{}]
    if "guidance_scale" in arguments:
        guidances.append({"guidance_scale": 1.0})
        default = defaults_of(pipeline).get("guidance_scale")
        if not isinstance(default, int | float) or default <= 1.0:
            guidances.append({"guidance_scale": 5.0})
    doublings: list[tuple[tuple[str, ...], dict[str, Any]]] = [(_PROMPTS, {})]
    if arguments.intersection(OUTPUTS_PER_PROMPT):
        doublings.append((_PROMPTS[:1], {"num_outputs_per_prompt": 2}))
    for guidance in guidances:
        try:
            _, one = record(pipeline, arguments, request(_PROMPTS[:1], 1, **guidance), output_type)
        except Exception as error:
            log.info("probe with %s did not run: %s", guidance or "defaults", error)
            continue
        for prompts, params in doublings:
            try:
                _, two = record(pipeline, arguments, request(prompts, 2, **params, **guidance), output_type)
            except Exception as error:
                log.info("probe with %d prompts and %s did not run: %s", len(prompts), params, error)
                continue
            if all(_learn(point, one, two, tolerance) for point in points):
                break
    for point in points:
        if point.layouts:
            point.solo_reason = None
            log.info("%s: calls are batched (%d shapes of call)", point.name, len(point.layouts))
        else:
            log.warning("%s: calls run one by one (%s)", point.name, point.solo_reason)


def _learn(point: MeetingPoint, one: list[Recorded], two: list[Recorded], tolerance: float | None) -> bool:
    """Learn the layouts of one point from a run and its double; return whether all its calls have one now."""
    ones = [r for r in one if r.call.point is point]
    twos = [r for r in two if r.call.point is point]
    if len(ones) != len(twos):
        point.solo_reason = "structure"
        return False
    complete = True
    for a, b in zip(ones, twos, strict=True):
        if point.find_layout(a.call) is not None:
            continue
        found = _learn_call(point, a, b, ones, twos, tolerance)
        if isinstance(found, CallLayout):
            point.layouts.append(found)
        else:
            point.solo_reason = found
            complete = False
    return complete


def _learn_call(
    point: MeetingPoint,
    a: Recorded,
    b: Recorded,
    ones: list[Recorded],
    twos: list[Recorded],
    tolerance: float | None,
) -> CallLayout | str:
    """Return the layout of one shape of call if it passes the self-check, else the reason why not."""
    reason = "self_check"
    for each in (True, False):
        try:
            found = CallLayout(
                layout.learn(a.call.arguments, b.call.arguments, each=each),
                layout.learn(a.output, b.output, each=each, where="output"),
            )
            if not (layout.has_rows(found.arguments) and layout.has_rows(found.output)):
                return "no_batch_axis"
            difference = self_check(found, point, ones, twos)
        except LayoutError as error:
            log.info("%s: %s", point.name, error)
            return error.reason
        except Exception as error:
            log.info("%s: a merged call failed: %s", point.name, error)
            continue
        limit = tolerance if tolerance is not None else _tolerance(a.output)
        log.info(
            "%s: merged calls differ from the same alone by at most %.1e (allowed %.0e)", point.name, difference, limit
        )
        if difference <= limit:
            return found
    return reason


def self_check(known: CallLayout, point: MeetingPoint, ones: list[Recorded], twos: list[Recorded]) -> float:
    """Return the largest difference between merged calls and the same calls alone.

    Each call of the first run is merged with a mergeable one of the second run, of another step if there is one.

    Raises:
        Exception: what the merged call raised.
    """
    worst = 0.0
    checked = 0
    for i, a in enumerate(ones):
        if not layout.matches(known.arguments, a.call.arguments):
            continue
        others = [b for j, b in enumerate(twos) if j != i] + ([twos[i]] if i < len(twos) else [])
        partner = next((b for b in others if _mergeable(known, a.call, b.call)), None)
        if partner is None:
            continue
        pair = [partner, a]
        outputs = run_merged(known, point.original, [r.call for r in pair])
        worst = max(worst, *(largest_difference(r.output, o) for r, o in zip(pair, outputs, strict=True)))
        checked += 1
    return worst if checked else float("inf")


def _mergeable(known: CallLayout, a: Call, b: Call) -> bool:
    if not layout.matches(known.arguments, b.arguments):
        return False
    keys = [layout.key(known.arguments, c.arguments, layout.count_rows(known.arguments, c.arguments)) for c in (a, b)]
    return keys[0] == keys[1]


def _tolerance(output: Any) -> float:
    return max((TOLERANCES.get(t.dtype, 1e-4) for t in layout.tensors(output)), default=1e-4)


def _size_multiple(pipeline: Any) -> int:
    """Return the number that heights and widths must be multiples of: the decoder's scale times the patch."""
    scale = getattr(pipeline, "vae_scale_factor", None)
    if not isinstance(scale, int):
        return 1
    patch = getattr(getattr(getattr(pipeline, "transformer", None), "config", None), "patch_size", 1)
    packed = 2 if hasattr(pipeline, "_pack_latents") else 1
    return scale * max(packed, patch if isinstance(patch, int) else 1)
