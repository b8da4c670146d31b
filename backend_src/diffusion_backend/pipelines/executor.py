"""Runs unmodified `diffusers` pipelines, many at a time on one thread, joined at the denoiser.

Every request is the pipeline's own `__call__`, on a shallow copy of the pipeline with its own scheduler, in a greenlet.
The weights are shared, and so are the meeting points in them. Calling a meeting point parks the greenlet; the engine
chooses which parked calls run next; `execute` runs them and resumes each greenlet with its part of the output.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..engine.executor import Capabilities, Report, Work, WorkKind
from ..errors import DiffusionError, InvalidArgumentError, OutOfMemoryError, PipelineError, without_paths
from ..request import DeferredOutput, DiffusionOutput, DiffusionRequest, Event, EventKind
from ..timing import now
from . import dummy
from .adapters import Adapters, Selection, select
from .arguments import call_arguments, frame_rate_of, side_of, signature_of
from .known_device import KnownDevices
from .layout import LayoutError
from .meeting_point import Call, RequestGreenlet
from .module_state import restorer
from .offload import defer_output
from .oom import is_out_of_memory
from .previews import decode_preview
from .probe import DEFAULT_SIDE
from .prompt_cache import PromptCache
from .reference import own_copy
from .step_meter import StepMeter

log = logging.getLogger(__name__)

_MAX_THROWS = 8
"""How often an abort is thrown into a pipeline that goes on working in its `finally` clauses."""


class _Pause:
    """Handed over by a greenlet that gives others a turn, and can be aborted, without needing a forward."""


_PAUSE = _Pause()


class _Aborted(BaseException):
    """Thrown into a greenlet to end it; no `except Exception` of a pipeline can swallow it."""


@dataclass(frozen=True, slots=True)
class _Raised:
    """What a call raised, to be raised again in the greenlet that made it."""

    error: Exception


_BY_ARGUMENTS = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
    ArithmeticError,
    NotImplementedError,
)
"""What pipelines raise of arguments that they do not expect."""


@dataclass(slots=True)
class _Active:
    """A request that was taken in."""

    request: DiffusionRequest
    pipeline: Any
    greenlet: RequestGreenlet
    params: dict[str, object]
    meter: StepMeter | None = None
    call: Call | None = None
    events: list[Event] = field(default_factory=list)
    denoised: bool = False  # whether its first denoiser call was made
    previews_failed: bool = False
    met_at_step: bool = False  # whether it has met others since its last step
    selection: Selection | None = None  # its adapters, once it has started
    restore: Callable[[], None] | None = None  # puts back what its call changes in the shared modules


class PipelineExecutor:
    """The in-process executor; see `engine.executor.Executor` for what each method must do and who calls it.

    Args:
        pipeline: loaded, on its device, with its meeting points installed (`probe.prepare`).
        capabilities: what the probe found.
        output_type: the `output_type` that the pipeline is called with.
        adapters: of the pipeline, if it has some.
        prompt_cache: of the embeddings of prompts, or None to encode each one.
    """

    def __init__(
        self,
        pipeline: Any,
        capabilities: Capabilities,
        *,
        output_type: str = "pt",
        adapters: Adapters | None = None,
        prompt_cache: PromptCache | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.prompt_cache = prompt_cache
        self._devices = KnownDevices(pipeline)
        self._adapters = adapters
        if adapters is not None:
            capabilities = replace(capabilities, adapters=adapters.names, adapter_root=adapters.root)
        self._capabilities = capabilities
        self._output_type = output_type
        self._arguments = frozenset(signature_of(pipeline))
        self._active: dict[str, _Active] = {}
        self._mode = torch.no_grad()
        self._on_cuda = self._devices.device.type == "cuda"

    @property
    def capabilities(self) -> Capabilities:
        """What the probe found."""
        return self._capabilities

    def start(self) -> None:
        """Switch gradients off for the engine thread."""
        self._mode.__enter__()

    def close(self) -> None:
        """End what still runs."""
        for request_id in list(self._active):
            self.abort(request_id, PipelineError(RuntimeError("closed"), request_id=request_id))
        self._mode.__exit__(None, None, None)

    def add_req(self, request: DiffusionRequest) -> None:
        """Prepare the request's own copy of the pipeline, and the greenlet that will call it."""
        own = own_copy(self.pipeline, request.scheduler)
        self._devices.tell(own)
        active = _Active(request, own, RequestGreenlet(self._call), _params(request, self._capabilities))
        scheduler = getattr(own, "scheduler", None)
        if hasattr(scheduler, "step"):
            active.params["scheduler"] = type(scheduler).__name__
            active.meter = StepMeter(
                scheduler,
                lambda meter: self._on_step(active, meter),
                keep_sample=request.preview_interval > 0,
            )
        if self.prompt_cache is not None:
            self.prompt_cache.attach(own, lambda: active.selection)
        if self._capabilities.exclusive:
            active.restore = restorer(self.pipeline)
        self._active[request.request_id] = active

    def execute(self, kind: WorkKind, request_ids: Sequence[str]) -> list[Report]:
        """Run one unit of work; see the module's docstring."""
        reports = self._execute(kind, request_ids)
        if self.prompt_cache is not None:
            reports[0].prompt_cache = self.prompt_cache.take_use()
        return reports

    def _execute(self, kind: WorkKind, request_ids: Sequence[str]) -> list[Report]:
        actives = [self._active[request_id] for request_id in request_ids]
        try:
            self._use_adapters(actives[0])  # those of one forward have the same, as they are in its key
        except Exception as error:
            return [self._resume(active, _Raised(error)) for active in actives]
        if kind is WorkKind.START:
            return [self._resume(active, active) for active in actives]
        if kind is WorkKind.STEP:
            return [self._resume(active, None) for active in actives]
        calls = [active.call for active in actives]
        outputs = run_calls([call for call in calls if call is not None])
        if self._on_cuda:
            # Times, fairness and aborts are about work that is done, not about kernels that were queued.
            torch.cuda.current_stream(self._devices.device).synchronize()
        return [self._resume(active, output) for active, output in zip(actives, outputs, strict=True)]

    def abort(self, request_id: str, error: DiffusionError) -> Report:
        """Throw into the greenlet until it has ended; the report carries `error`."""
        active = self._active.pop(request_id)
        if active.selection is not None:
            try:
                self._use_adapters(active)  # its `finally` clauses may call modules
            except Exception as raised:
                log.debug("request %s is aborted without its adapters: %s", request_id, raised)
        for _ in range(_MAX_THROWS):
            try:
                active.greenlet.throw(_Aborted)
            except _Aborted:
                break
            except Exception as raised:  # while it cleaned up
                log.debug("request %s raised %r while it was aborted", request_id, raised)
                break
            if active.greenlet.dead:
                break
        if active.restore is not None:
            active.restore()
        self._leave(active)
        return Report(request_id, error=error, events=_take(active))

    def clear_prompt_cache(self) -> None:
        """Drop all cached embeddings: for `collective_rpc`, after a call that has changed a text encoder's weights."""
        if self.prompt_cache is not None:
            self.prompt_cache.clear()

    def _dummy_run(self, height: int | None, width: int | None) -> None:
        """Run one step of one request of this size."""
        side = side_of(self.pipeline) or DEFAULT_SIDE
        pictures = dummy.needed(self._capabilities.needs, height or side, width or side)
        # Of a single step a lower strength would leave none. The id is its own: other requests may be under way.
        strength = 1.0 if pictures and "strength" in self._arguments else None
        request = DiffusionRequest.make(
            "", seed=0, num_inference_steps=1, height=height, width=width, strength=strength, **pictures
        )
        cache, self.prompt_cache = self.prompt_cache, None  # nothing of it is kept, or counted
        try:
            self._run_to_its_end(request)
        finally:
            self.prompt_cache = cache

    def _run_to_its_end(self, request: DiffusionRequest) -> None:
        self.add_req(request)
        report = self.execute(WorkKind.START, [request.request_id])[0]
        while report.work is not None:
            report = self.execute(report.work.kind, [request.request_id])[0]
        if report.error is not None:
            raise report.error

    def _use_adapters(self, active: _Active) -> None:
        """Put a request's adapters in force before anything of it runs.

        Raises:
            InvalidArgumentError: this pipeline has no such adapters.
        """
        request = active.request
        if active.selection is None:
            names, root = self._capabilities.adapters, self._capabilities.adapter_root
            active.selection = select(request.lora, names, root, request_id=request.request_id)
        if self._adapters is not None:
            self._adapters.use(active.selection)

    # -- greenlets ----------------------------------------------------------------------------------------------

    def _call(self, active: _Active) -> DiffusionOutput | DeferredOutput:
        """Run in the greenlet: the whole of a request."""
        request, defaults = active.request, self._capabilities.defaults
        lists = self._capabilities.pictures_in_lists
        call = call_arguments(request, self._arguments, self._output_type, defaults, pictures_in_lists=lists)
        raw = active.pipeline(**call)
        rate = request.frame_rate if request.frame_rate is not None else frame_rate_of(defaults)
        return defer_output(raw, sample_rate=self._capabilities.sample_rate, frame_rate=rate)

    def _on_step(self, active: _Active, meter: StepMeter) -> None:
        """Note a step; called in the greenlet, by the request's scheduler."""
        request = active.request
        active.events.append(
            Event(EventKind.STEP, request.request_id, now(), step=meter.step, num_steps=meter.num_steps)
        )
        interval = request.preview_interval
        if interval and meter.step % interval == 0 and meter.step < meter.num_steps and meter.sample is not None:
            preview = self._preview(active, meter.sample)
            if preview is not None:
                active.events.append(
                    Event(
                        EventKind.PREVIEW,
                        request.request_id,
                        now(),
                        step=meter.step,
                        num_steps=meter.num_steps,
                        preview=preview,
                    )
                )
        if not active.met_at_step and meter.step < meter.num_steps:
            active.greenlet.park(_PAUSE)  # a pipeline without a meeting point takes turns between its steps
        active.met_at_step = False

    def _preview(self, active: _Active, sample: torch.Tensor) -> NDArray[np.uint8] | None:
        """Return a preview, or None: one that fails must not cost the request its result."""
        if active.previews_failed:
            return None
        try:
            return decode_preview(active.pipeline, sample)
        except Exception as error:
            log.warning("request %s goes on without previews: %s", active.request.request_id, error)
            active.previews_failed = True
            return None

    def _leave(self, active: _Active) -> None:
        """Forget a request that has ended; what it holds must not wait for the garbage collector."""
        self._active.pop(active.request.request_id, None)
        scheduler = getattr(active.pipeline, "scheduler", None)
        if active.meter is not None and scheduler is not None:
            vars(scheduler).pop("step", None)
        active.meter = active.pipeline = active.call = None

    def _resume(self, active: _Active, value: Any) -> Report:
        """Let a greenlet go on with `value` until it parks again or ends."""
        request_id = active.request.request_id
        active.call = None
        try:
            if isinstance(value, _Raised):
                outcome = active.greenlet.throw(value.error)
            else:
                outcome = active.greenlet.switch(value)
        except BaseException as error:  # one that calls sys.exit() must not end the engine thread for all
            if active.restore is not None:
                active.restore()
            explained = self._explain(active, error)
            self._leave(active)
            return Report(request_id, error=explained, events=_take(active), params=active.params)
        if active.greenlet.dead:
            self._leave(active)
            return Report(request_id, output=outcome, events=_take(active), params=active.params)
        if isinstance(outcome, _Pause):
            return Report(request_id, work=Work(WorkKind.STEP, ("step", request_id)), events=_take(active))
        assert isinstance(outcome, Call)
        active.call = outcome
        if outcome.point.kind is WorkKind.DECODE:
            work = Work(WorkKind.DECODE, (outcome.point.name, request_id))
        else:
            active.denoised = active.met_at_step = True
            key, rows, solo_reason = outcome.point.describe(outcome)
            if self._adapters is not None:
                key = (active.selection, key)
            work = Work(WorkKind.FORWARD, key, rows, solo_reason, max_rows=outcome.point.max_rows(outcome))
        return Report(request_id, work=work, events=_take(active), params=active.params)

    def _explain(self, active: _Active, error: BaseException) -> DiffusionError:
        """Return the error that a request ends with when its pipeline raised `error`."""
        request_id = active.request.request_id
        if isinstance(error, DiffusionError):
            return error
        if is_out_of_memory(error):
            return OutOfMemoryError(request_id=request_id, where=_where(active))
        if isinstance(error, ValueError | TypeError) and not active.denoised:
            # Pipelines check their arguments first, and say in a ValueError what is wrong.
            problem = f"{self._capabilities.pipeline_class} refuses it: {without_paths(str(error))}"
            return InvalidArgumentError("arguments", problem, request_id=request_id)
        has_stepped = active.meter is not None and active.meter.step > 0
        if isinstance(error, _BY_ARGUMENTS) and active.request.extra_args and not has_stepped:
            # The other arguments were checked before the request was queued; these the pipeline alone knows.
            what = f"{type(error).__name__}: {without_paths(str(error))}"
            problem = f"{self._capabilities.pipeline_class} does not take them ({what})"
            return InvalidArgumentError("extra_args", problem, request_id=request_id)
        log.error("request %s failed in the pipeline", request_id, exc_info=error)
        return PipelineError(error, request_id=request_id, where=_where(active))


def run_calls(calls: Sequence[Call]) -> list[Any]:
    """Run parked calls of equal keys, as one if they are several; return each one's output or what it raised.

    A fault stays with its request: if the joint call raises, the calls are tried by themselves; if it does not fit the
    device, in halves.
    """
    if len(calls) == 1:
        try:
            return [calls[0].point.run_one(calls[0])]
        except Exception as error:
            if is_out_of_memory(error):
                # What the failed forward had allocated must not be missing when its neighbours run.
                traceback.clear_frames(error.__traceback__)
            return [_Raised(error)]
    point = calls[0].point
    halve = False
    try:
        return point.run_joint(calls)
    except LayoutError as error:
        log.warning("%s: joint forwards of this shape are given up: %s", point.name, error)
        point.give_up(calls[0], error.reason)
    except Exception as error:
        halve = is_out_of_memory(error)
        if halve:
            log.warning("%s: out of memory with %d calls at once; trying halves", point.name, len(calls))
        else:
            log.warning("%s: a joint forward failed (%s); trying its calls one by one", point.name, error)
    # Not inside the except clause: until it is left, the exception keeps alive what the failed forward had allocated.
    if halve and torch.cuda.is_available():
        torch.cuda.empty_cache()
    size = (len(calls) + 1) // 2 if halve else 1
    outputs = [output for i in range(0, len(calls), size) for output in run_calls(calls[i : i + size])]
    if halve and not any(isinstance(output, _Raised) for output in outputs):  # else one was to blame, not their number
        rows = point.limit_rows(calls[:size])
        log.warning("%s: from now on at most %d rows of this size in one forward", point.name, rows)
    return outputs


def _where(active: _Active) -> str:
    """Say in words how far a request has come."""
    meter = active.meter
    if not active.denoised and (meter is None or meter.step == 0):
        return "in preprocess"
    if meter is None:
        return "while it denoised or decoded"  # a pipeline whose steps nobody counts
    if meter.num_steps and meter.step >= meter.num_steps:
        return f"in decode, after {meter.step} steps"
    return f"in step {meter.step + 1}" + (f" of {meter.num_steps}" if meter.num_steps else "")


def _take(active: _Active) -> list[Event]:
    events, active.events = active.events, []
    return events


def _params(request: DiffusionRequest, capabilities: Capabilities) -> dict[str, object]:
    """Return the parameters really used, by their `diffusers` names; unknown ones are left out."""
    defaults: Mapping[str, Any] = capabilities.defaults
    used = {
        name: given if (given := getattr(request, name)) is not None else defaults.get(name)
        for name in ("num_inference_steps", "guidance_scale", "height", "width", "num_frames", "strength", "frame_rate")
    }
    return {
        **{name: value for name, value in used.items() if value is not None},
        **({} if request.duration_s is None else {"duration_s": request.duration_s}),
        "num_outputs_per_prompt": request.num_outputs_per_prompt,
        "seeds": list(request.seeds),
        **({} if not request.lora else {"lora": ", ".join(f"{name}:{weight}" for name, weight in request.lora)}),
        **request.extra_args,
    }
