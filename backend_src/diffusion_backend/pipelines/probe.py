"""Learns, when a pipeline is loaded, how the calls of its denoisers can be merged, and proves it.

The pipeline runs for one row and for two, with and without guidance, and every denoiser call is recorded. Comparing
the two runs gives the layout of each shape of call; merging recorded calls of both (of different prompts, seeds and,
where the layout allows it, steps) and comparing with what each gave alone is the self-check. A denoiser that fails it
runs its calls one by one: right, only unbatched.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..engine.executor import Capabilities, WorkKind
from ..errors import ModelLoadError
from ..request import PICTURES, DiffusionRequest
from . import layout
from .arguments import OUTPUTS_PER_PROMPT, call_arguments, defaults_of, side_of, signature_of
from .audio import sample_rate_of
from .dummy import offers
from .layout import LayoutError
from .meeting_point import Call, CallLayout, MeetingPoint, RequestGreenlet
from .module_state import differs, snapshot
from .outputs import is_conventional, to_output
from .previews import can_preview
from .reference import components_of, own_copy, request_scheduler
from .upcast import upcast_within_calls

log = logging.getLogger(__name__)

DENOISERS = ("unet", "unet_2", "transformer", "transformer_2", "controlnet", "prior", "decoder", "dit")
"""Components whose `forward` is called at every step, wherever their class is from."""

DENOISER_PACKAGES = ("diffusers.models.unets", "diffusers.models.transformers", "diffusers.models.controlnets")
"""Where the classes of all other denoisers are from, whatever a pipeline calls them."""

DECODERS = ("vae", "vqvae", "vqgan", "movq", "audio_vae")
"""Components whose `decode` makes the output."""

DEFAULT_SIDE = 512
"""Pixels of the made-up pictures where the pipeline does not tell its size."""

DEFAULT_FRAMES = 9

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


def prepare(
    pipeline: Any,
    *,
    disabled: str | None = None,
    tolerance: float | None = None,
    params: Mapping[str, Any] | None = None,
    inputs: InputMaker | None = None,
    compile_mode: str | None = None,
) -> tuple[Capabilities, list[MeetingPoint], str]:
    """Install the meeting points of a freshly loaded pipeline, learn their layouts, and find out what it can do.

    Called once by the thread that loads the pipeline, before the engine starts.

    Args:
        disabled: why nothing is to be merged (the meeting points are for turn-taking then), or None.
        tolerance: of the self-check; by default that of the denoiser's dtype (`equality.TOLERANCES`).
        params: plain arguments of the probe runs (height, width, num_frames, …); the pipeline's own by default.
        inputs: makes the pictures and the like of a probe run from the seeds of its items; by default they are made up
            from the pipeline's signature.
        compile_mode: mode of `torch.compile` for the denoisers, or None to leave them as they are.

    Returns:
        The capabilities, the denoisers' meeting points, and the `output_type` to call the pipeline with.

    Raises:
        Exception: what the pipeline raised when it was run for one row.
    """
    points = install(pipeline, compile_mode)
    with torch.no_grad():
        runner = _first_run(pipeline, dict(params or {}), inputs)
        for point in points:
            point.tolerance = tolerance
            point.disabled = "module_state" if runner.changes_modules else disabled
        if not any(point.disabled for point in points):
            _learn_all(runner, points)
    rows = max((recorded.call.point.rows_of(recorded.call) for recorded in runner.first_calls), default=1)
    scheduler = getattr(pipeline, "scheduler", None)
    capabilities = Capabilities(
        pipeline_class=type(pipeline).__name__,
        modalities=runner.modalities,
        arguments=runner.arguments,
        defaults=defaults_of(pipeline),
        size_multiple=_size_multiple(pipeline),
        needs=tuple(name for name in PICTURES if name in runner.inputs([0])),
        sample_rate=sample_rate_of(pipeline),
        max_steps=_max_steps(scheduler),
        schedulers=_schedulers(scheduler),
        supports_previews=can_preview(pipeline),
        exclusive=runner.changes_modules,
        joint={point.name: point.solo_reason for point in points},
        rows_per_output=rows,
    )
    return capabilities, points, runner.output_type


def install(pipeline: Any, compile_mode: str | None = None) -> list[MeetingPoint]:
    """Put meeting points at the pipeline's denoisers and decoders; return those of the denoisers.

    What is compiled is the denoiser's own `forward`, not the meeting point in its place.
    """
    points = []
    for name, module in components_of(pipeline).items():
        if isinstance(module, torch.nn.Module) and (
            name in DENOISERS or type(module).__module__.startswith(DENOISER_PACKAGES)
        ):
            forward = module.forward
            if compile_mode is not None:
                forward = torch.compile(forward, mode=compile_mode, dynamic=True)
            point = MeetingPoint(name, WorkKind.FORWARD, forward)
            point.install(module, "forward")
            points.append(point)
        elif name in DECODERS and hasattr(module, "decode"):
            upcast_within_calls(module)
            MeetingPoint(name, WorkKind.DECODE, module.decode).install(module, "decode")
    return points


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


def _module_watch(runner: ProbeRunner) -> Callable[[], None]:
    """Return a function that compares the modules, in the middle of a call, with those of now."""
    before = snapshot(runner.pipeline)

    def look() -> None:
        runner.changes_modules = runner.changes_modules or differs(before, snapshot(runner.pipeline))

    return look


def _first_run(pipeline: Any, params: dict[str, Any], inputs: InputMaker | None) -> ProbeRunner:
    """Find inputs and an output type with which the pipeline runs. Few inputs, and tensors, are preferred.

    Tensors whose values or axes are laid out in a way of their own are not taken, if another type works.
    """
    parameters = signature_of(pipeline)
    defaults = {**defaults_of(pipeline), **params}
    native = side_of(pipeline) or DEFAULT_SIDE
    height, width = (defaults.get(side) or native for side in ("height", "width"))
    frames = defaults.get("num_frames") or DEFAULT_FRAMES
    makers = [inputs] if inputs is not None else offers(parameters, height=height, width=width, num_frames=frames)
    problem: Exception | None = None
    unconventional: ProbeRunner | None = None
    for maker in makers:
        for output_type in ("pt", "np", "pil"):
            runner = ProbeRunner(pipeline, frozenset(parameters), params, maker, output_type)
            try:
                raw, runner.first_calls = runner.run(1, 1)
                runner.modalities = to_output(raw).modalities
                # Watched the second time: what a first call sets up for good (the hooks that transformers puts into
                # its text encoders, say) is no change.
                runner.run(1, 1, on_call=_module_watch(runner))
                if is_conventional(raw):
                    return runner
                unconventional = unconventional or runner
            except Exception as error:
                log.info("a first run with output_type=%r did not work: %s", output_type, error)
                problem = error  # the last one had the most inputs, so it tells the most
        if unconventional is not None:
            return unconventional
    raise problem or ModelLoadError("the pipeline takes nothing that can be made up")


def _learn_all(runner: ProbeRunner, points: list[MeetingPoint]) -> None:
    """Learn and check the layouts of all shapes of call that the probe can bring about."""
    guidances: list[dict[str, Any]] = [{}]
    if "guidance_scale" in runner.arguments:
        guidances.append({"guidance_scale": 1.0})
        default = runner.params.get("guidance_scale", defaults_of(runner.pipeline).get("guidance_scale"))
        if not isinstance(default, int | float) or default <= 1.0:
            guidances.append({"guidance_scale": 5.0})
    doublings: list[dict[str, Any]] = [{"num_prompts": 2}, {"num_prompts": 2, "num_pictures": 1}]
    if runner.arguments.intersection(OUTPUTS_PER_PROMPT):
        doublings.append({"num_prompts": 1, "num_outputs": 2})
    for guidance in guidances:
        one = _try_run(runner, num_prompts=1, seed=1, **guidance)
        if one is None:
            continue
        for doubling in doublings:
            if all(point.find_layout(r.call) for point in points for r in one if r.call.point is point):
                break
            two = _try_run(runner, **doubling, seed=2, **guidance)
            if two is not None:
                for point in points:
                    _learn_doubled(point, _of(point, one), _of(point, two))
        else:
            other = _try_run(runner, num_prompts=1, seed=2, **guidance)
            for point in points:
                _learn_guessed(point, _of(point, one), _of(point, other or []))
    for point in points:
        if point.layouts:
            log.info("%s: calls are batched (%d shapes of call)", point.name, len(point.layouts))


def _try_run(runner: ProbeRunner, **options: Any) -> list[Recorded] | None:
    try:
        return runner.run(**options)[1]
    except Exception as error:
        log.info("a probe with %s did not run: %s", options, error)
        return None


def _of(point: MeetingPoint, calls: list[Recorded]) -> list[Recorded]:
    return [recorded for recorded in calls if recorded.call.point is point]


def _learn_doubled(point: MeetingPoint, ones: list[Recorded], twos: list[Recorded]) -> None:
    """Learn the layouts of one point from a run and its double, as far as they correspond."""
    for a, b in zip(ones, twos, strict=False):
        if point.find_layout(a.call) is not None:
            continue
        for each in (True, False):
            try:
                candidate = CallLayout(
                    layout.learn(a.call.arguments, b.call.arguments, each=each),
                    layout.learn(a.output, b.output, each=each, where="output"),
                )
            except LayoutError as error:
                log.info("%s: %s", point.name, error)
                break
            if _passes(point, candidate, ones, twos):
                point.layouts.append(candidate)
                break


def _learn_guessed(point: MeetingPoint, ones: list[Recorded], others: list[Recorded]) -> None:
    """Learn from two runs of one item each what the doubled runs did not teach; what fails is rejected."""
    for a in ones:
        if point.find_layout(a.call) is not None or any(layout.matches(r, a.call.arguments) for r, _ in point.rejected):
            continue
        candidates = []
        for items in (False, True):
            with contextlib.suppress(LayoutError):
                candidates.append(
                    CallLayout(
                        layout.guess(a.call.arguments, items=items, depth=2), layout.guess(a.output, items=items)
                    )
                )
        passed = next((c for c in candidates if _passes(point, c, ones, others)), None)
        if passed is not None:
            point.settle(passed, passed.arguments, "")
        elif candidates:
            point.settle(None, candidates[0].arguments, "self_check")


def _passes(point: MeetingPoint, candidate: CallLayout, ones: list[Recorded], twos: list[Recorded]) -> bool:
    """Whether calls of two runs, merged, give what they gave alone.

    Each call of the first run is merged with a mergeable one of the second run, of another step if there is one.
    """
    if not (layout.has_rows(candidate.arguments) and layout.has_rows(candidate.output)):
        return False
    checked = 0
    worst = 0.0
    for i, a in enumerate(ones):
        if not layout.matches(candidate.arguments, a.call.arguments):
            continue
        partners = twos[:i] + twos[i + 1 :] + twos[i : i + 1]
        partner = next((b for b in partners if _mergeable(candidate, a.call, b.call)), None)
        if partner is None:
            continue
        try:
            pair = (partner, a)
            worst = max(worst, point.try_out(candidate, [r.call for r in pair], [r.output for r in pair]))
        except Exception as error:
            log.warning("%s: a merged call failed: %s: %s", point.name, type(error).__name__, error)
            return False
        checked += 1
    if not checked:
        return False
    limit = point.limit(ones[0].output)
    log.info("%s: merged calls differ from alone by at most %.1e (allowed %.0e)", point.name, worst, limit)
    return worst <= limit


def _mergeable(candidate: CallLayout, a: Call, b: Call) -> bool:
    rule = candidate.arguments
    if not layout.matches(rule, b.arguments):
        return False
    keys = [layout.key(rule, c.arguments, layout.count_rows(rule, c.arguments)) for c in (a, b)]
    return keys[0] == keys[1]


def _schedulers(scheduler: Any) -> tuple[str, ...]:
    """Return the names of the schedulers that a request may ask for: those that can be made here."""
    if scheduler is None:
        return ()
    names = {type(scheduler).__name__}
    for cls in getattr(scheduler, "compatibles", []):
        try:
            request_scheduler(scheduler, cls.__name__)
        except Exception as error:  # it needs a package that is not there, or other settings
            log.debug("the scheduler %s is not offered: %s", cls.__name__, error)
        else:
            names.add(cls.__name__)
    return tuple(sorted(names))


def _max_steps(scheduler: Any) -> int | None:
    """Return the most steps a scheduler has: those it was trained for, less the offset that it adds to each."""
    config = getattr(scheduler, "config", {})
    trained = config.get("num_train_timesteps")
    return trained - (config.get("steps_offset") or 0) if isinstance(trained, int) else None


def _size_multiple(pipeline: Any) -> int:
    """Return the number that heights and widths must be multiples of: the decoder's scale times the patch."""
    scale = getattr(pipeline, "vae_scale_factor", None)
    if not isinstance(scale, int):
        return 1
    patch = getattr(getattr(getattr(pipeline, "transformer", None), "config", None), "patch_size", 1)
    packed = 2 if hasattr(pipeline, "_pack_latents") else 1
    return scale * max(packed, patch if isinstance(patch, int) else 1)
