"""What is done with a pipeline when it is loaded: meeting points, a first run, and what it can do.

The pipeline runs for one row and for two, with and without guidance (`recording`), and from that it is learned how the
calls of its denoisers can be merged (`learning`). A denoiser whose merged calls do not give what they give alone runs
its calls one by one: right, only unbatched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..engine.executor import Capabilities, WorkKind
from ..errors import ModelLoadError
from ..request import PICTURES
from .arguments import defaults_of, side_of, signature_of
from .audio import sample_rate_of
from .dummy import offers
from .learning import learn_all, try_run
from .meeting_point import MeetingPoint
from .module_state import differs, snapshot
from .outputs import is_conventional, to_output
from .previews import can_preview
from .recording import InputMaker, ProbeRunner
from .reference import components_of, request_scheduler
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
            learn_all(runner, points)
        needs = tuple(name for name in PICTURES if name in runner.inputs([0]))
        # Two prompts with a picture each: some pipelines take a list of pictures, others refuse it.
        pictures_in_lists = bool(needs) and try_run(runner, num_prompts=2, seed=1) is not None
    rows = max((recorded.call.point.rows_of(recorded.call) for recorded in runner.first_calls), default=1)
    scheduler = getattr(pipeline, "scheduler", None)
    capabilities = Capabilities(
        pipeline_class=type(pipeline).__name__,
        modalities=runner.modalities,
        arguments=runner.arguments,
        defaults=defaults_of(pipeline),
        size_multiple=_size_multiple(pipeline),
        needs=needs,
        pictures_in_lists=pictures_in_lists,
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
                log.info("looking for inputs that fit; these do not, with output_type=%r: %s", output_type, error)
                problem = error  # the last one had the most inputs, so it tells the most
        if unconventional is not None:
            return unconventional
    raise problem or ModelLoadError("the pipeline takes nothing that can be made up")


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
    """Return the most steps a scheduler has: those it was trained for, less the offset that `leading` ones add."""
    config = getattr(scheduler, "config", {})
    trained = config.get("num_train_timesteps")
    if not isinstance(trained, int):
        return None
    leading = config.get("timestep_spacing", "leading") == "leading"
    return trained - ((config.get("steps_offset") or 0) if leading else 0)


def _size_multiple(pipeline: Any) -> int:
    """Return the number that heights and widths must be multiples of: the decoder's scale times the patch."""
    scale = getattr(pipeline, "vae_scale_factor", None)
    if not isinstance(scale, int):
        return 1
    patch = getattr(getattr(getattr(pipeline, "transformer", None), "config", None), "patch_size", 1)
    packed = 2 if hasattr(pipeline, "_pack_latents") else 1
    return scale * max(packed, patch if isinstance(patch, int) else 1)
