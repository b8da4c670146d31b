"""Loads a model and runs requests alone and together: what `diffusion-backend check` finds out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from ..config import ModelConfig
from ..engine import DiffusionEngine, EngineConfig
from ..errors import ConfigurationError, DiffusionError, PipelineError
from ..pipelines.arguments import signature_of
from ..pipelines.dummy import offers
from ..pipelines.equality import TOLERANCES
from ..pipelines.executor import PipelineExecutor
from ..pipelines.loader import DTYPES, load
from ..pipelines.module_state import restorer
from ..pipelines.probe import DEFAULT_FRAMES, DEFAULT_SIDE
from ..pipelines.reference import run_alone
from ..request import DiffusionOutput, DiffusionRequest
from ..timing import now
from .compare import difference
from .meter import Forward, Meter
from .result import Denoiser, Memory, Result

Tell = Callable[[str], None]

_PROMPTS = ("a red apple on a table", "a blue whale in a river")


def measure(config: ModelConfig, *, base: Path, device: str | None, steps: int, tell: Tell) -> Result:
    """Load a model, run two different requests alone and together, and as many as it runs at once.

    Args:
        config: the model's parameters.
        base: the model's folder.
        device: for the weights; None for the first GPU, or the CPU where there is none.
        steps: of the requests.
        tell: called with what is being done.

    Raises:
        ConfigurationError: a parameter, or the device, does not work.
        DiffusionError: the model does not load, or a request failed.
    """
    where = _device(device)
    tell("loading diffusers")
    import diffusers  # noqa: F401 - so that its own memory does not count as the model's

    before = psutil.Process().memory_info().rss
    tell(f"loading {config.model} and checking itself")
    begin = now()
    executor = load(config, device=str(where), base=base)
    load_s = now() - begin
    loaded = psutil.Process().memory_info().rss
    tell("running two requests alone")
    pair, alone = _run_alone(executor, config, steps)
    meter = Meter(executor, torch.cuda.synchronize if where.type == "cuda" else lambda: None)
    limits = EngineConfig(
        max_num_seqs=config.max_num_seqs, max_batch_rows=config.max_batch_rows, max_waiting=config.max_waiting
    )
    engine = DiffusionEngine(meter, limits)
    engine.start()
    try:
        runs = _run_engine(engine, meter, pair, tell)
    finally:
        engine.shutdown()
    tolerance = config.self_check_tolerance
    if tolerance is None:
        tolerance = TOLERANCES[DTYPES[config.dtype]]
    return Result(
        pipeline_class=executor.capabilities.pipeline_class,
        device=str(where),
        dtype=config.dtype,
        modalities=executor.capabilities.modalities,
        denoisers=_denoisers(executor, runs),
        shared=any(forward.requests > 1 for forward in runs.pair),
        difference=max(
            difference(alone[index % 2], output) for index, output in enumerate([*runs.outputs, *runs.many_outputs])
        ),
        allowed=max(1, math.ceil(255 * tolerance)),
        memory=Memory(
            before, loaded, _peak(), torch.cuda.max_memory_allocated(where) if where.type == "cuda" else None
        ),
        load_s=load_s,
    )


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigurationError("device", f"{name!r} is no device; give cpu or cuda:0, say") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError("device", f"there is no {name}; PyTorch sees {torch.cuda.device_count()} GPUs")
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError("device", f"models are not served on {name}; give cpu or cuda:0, say")
    return device


# -- requests ---------------------------------------------------------------------------------------------------


def _run_alone(
    executor: PipelineExecutor, config: ModelConfig, steps: int
) -> tuple[list[DiffusionRequest], list[DiffusionOutput]]:
    """Run two different requests on the bare pipeline, with the fewest made-up inputs that it runs with."""
    capabilities, pipeline = executor.capabilities, executor.pipeline
    params: dict[str, Any] = dict(config.defaults)
    if config.warmup_sizes:
        params["height"], params["width"] = config.warmup_sizes[0]
    known = {**capabilities.defaults, **params}
    makers = offers(
        signature_of(pipeline),
        height=known.get("height") or DEFAULT_SIDE,
        width=known.get("width") or DEFAULT_SIDE,
        num_frames=known.get("num_frames") or DEFAULT_FRAMES,
    )
    restore = restorer(pipeline)
    problem: Exception | None = None
    for maker in makers:
        requests = []
        for index in range(2):
            # Of different lengths: requests that end in each other's midst are the harder case.
            own = {**params, "num_inference_steps": steps + index}
            requests.append(
                DiffusionRequest.make(
                    _PROMPTS[index],
                    seed=index,
                    request_id=f"check-{index}",
                    extra_args=maker([index + 1]),
                    **{name: value for name, value in own.items() if name in capabilities.arguments},
                )
            )
        try:
            # The output type is the one that the probe found to work.
            outputs = [run_alone(pipeline, request, output_type=executor._output_type) for request in requests]
        except Exception as error:
            problem = problem or error
        else:
            return requests, outputs
        finally:
            restore()
    raise (
        problem
        if isinstance(problem, DiffusionError)
        else PipelineError(problem or TypeError("it takes nothing that can be made up"), where="with made-up inputs")
    )


@dataclass(frozen=True, slots=True)
class _Runs:
    """What the engine did with the two requests, with the first alone, and with many."""

    outputs: list[DiffusionOutput]
    pair: list[Forward]
    alone: list[Forward]
    alone_steps: int
    many_outputs: list[DiffusionOutput]
    many: list[Forward]


def _run_engine(engine: DiffusionEngine, meter: Meter, pair: list[DiffusionRequest], tell: Tell) -> _Runs:
    def run(requests: list[DiffusionRequest]) -> list[DiffusionOutput]:
        meter.reset()
        handles = [engine.submit(request) for request in requests]
        return [handle.result().output for handle in handles]

    tell("running two requests together")
    outputs = run(pair)
    pair_forwards = meter.forwards
    tell("timing a request alone")
    run(pair[:1])
    alone, alone_steps = meter.forwards, max(1, meter.steps)
    capabilities = engine.capabilities
    count = min(engine.config.max_num_seqs, engine.config.max_batch_rows // capabilities.rows_per_output)
    if count < 2 or capabilities.exclusive or all(forward.requests == 1 for forward in pair_forwards):
        return _Runs(outputs, pair_forwards, alone, alone_steps, [], [])
    tell(f"running {count} requests together")
    many = [replace(pair[index % 2], request_id=f"check-{index}") for index in range(count)]
    return _Runs(outputs, pair_forwards, alone, alone_steps, run(many), meter.forwards)


def _denoisers(executor: PipelineExecutor, runs: _Runs) -> tuple[Denoiser, ...]:
    found = []
    for name in dict.fromkeys(forward.denoiser for forward in runs.alone):
        alone = [forward for forward in runs.alone if forward.denoiser == name]
        together = [forward for forward in [*runs.pair, *runs.many] if forward.denoiser == name]
        reasons = {forward.solo_reason for forward in together} | {executor.capabilities.joint.get(name)}
        shared = [forward for forward in together if forward.requests > 1]
        most = max((forward.rows for forward in shared), default=0)
        largest = [forward for forward in shared if forward.rows == most]
        found.append(
            Denoiser(
                name=name,
                reasons=tuple(sorted(reason for reason in reasons if reason is not None)),
                calls_per_step=len(alone) / runs.alone_steps,
                rows_alone=max(forward.rows for forward in alone),
                seconds_alone=statistics.median(forward.seconds for forward in alone),
                requests=max((forward.requests for forward in largest), default=0),
                rows=most,
                seconds=statistics.median(forward.seconds for forward in largest) if largest else 0.0,
            )
        )
    return tuple(found)


def _peak() -> int:
    """Return the most memory that this process ever had, in bytes."""
    # Not from getrusage: that counts what its parent had before it started this program.
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)
