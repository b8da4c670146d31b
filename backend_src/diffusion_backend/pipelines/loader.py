"""Loads a pipeline, and everything around it, into an executor."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..config import ModelConfig
from ..errors import ConfigurationError, DiffusionError, ModelLoadError, did_you_mean
from ..faults import FaultPlan, check_allowed
from .adapters import Adapters
from .executor import PipelineExecutor
from .faults import FaultyExecutor
from .memory import place, quantization_config
from .probe import prepare
from .prompt_cache import PromptCache
from .roots import check_hub, check_path

log = logging.getLogger(__name__)
T = TypeVar("T")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


_HINTS = {
    "safetensors": " (weights in the pickle format, .bin, .pt or .ckpt, are loaded only with allow_pickle: true)",
    "trust_remote_code": " (the model's own code is run only with its parameter trust_remote_code: true)",
}
"""What to try, by a word in the error of `from_pretrained`."""


def load(config: ModelConfig, *, device: str, base: Path | None = None) -> PipelineExecutor:
    """Load a pipeline, learn how it can be batched, warm it up, and return what the engine runs it with.

    Called once by the thread that loads the model; takes as long as the weights and a few steps take.

    Args:
        config: the model's parameters.
        device: for the weights and the work, such as `cpu` or `cuda:0`.
        base: the folder that a relative `model` path starts from.

    Raises:
        ConfigurationError: a parameter has a value that does not work.
        ModelLoadError: the pipeline cannot be loaded, with the reason.
    """
    check_allowed(config.faults)
    pipeline = load_pipeline(
        config.model,
        pipeline_class=config.pipeline_class,
        dtype=config.dtype,
        base=base,
        quantization_config=quantization_config(config.quantization),
        allow_pickle=config.allow_pickle,
        trust_remote_code=config.trust_remote_code,
    )
    place(pipeline, config, device)
    adapters = None
    if config.loras or config.lora_root is not None:
        adapters = Adapters(pipeline, dict(config.loras), root=config.lora_root, base=base)
        with torch.no_grad():
            adapters.load_registered()
    executor = _within(config.warmup_timeout_s, lambda: _warm_up(pipeline, config, adapters))
    solo = {name: reason for name, reason in executor.capabilities.joint.items() if reason is not None}
    if config.step_batching == "require" and solo:
        raise ModelLoadError(
            f"step_batching is 'require', but {', '.join(f'{n} cannot be batched ({r})' for n, r in solo.items())}; "
            "set it to 'auto' to serve this model one call at a time"
        )
    return executor


def _warm_up(pipeline: Any, config: ModelConfig, adapters: Adapters | None) -> PipelineExecutor:
    """Probe a pipeline and run each size of the configuration once."""
    sizes = config.warmup_sizes
    height, width = sizes[0] if sizes else (None, None)
    params: dict[str, Any] = {} if height is None else {"height": height, "width": width}
    if config.default_num_frames is not None:
        params["num_frames"] = config.default_num_frames
    plan = FaultPlan(config.faults)
    try:
        plan.strike("load", [])
        capabilities, _, output_type = prepare(
            pipeline,
            disabled="deterministic" if config.deterministic else "disabled" if config.step_batching == "off" else None,
            tolerance=config.self_check_tolerance,
            params=params,
            compile_mode=config.compile,
        )
        make = partial(FaultyExecutor, plan=plan) if config.faults else PipelineExecutor
        executor = make(
            pipeline,
            capabilities,
            output_type=output_type,
            adapters=adapters,
            prompt_cache=PromptCache(config.prompt_cache_bytes) if config.prompt_cache_bytes else None,
        )
        with torch.no_grad():
            for height, width in sizes[1:]:
                executor._dummy_run(height, width)
    except Exception as error:
        has_size = height is not None and isinstance(error, DiffusionError)
        problem = f"does not run at a size of warmup_sizes ({height}x{width})" if has_size else "a first run failed"
        raise ModelLoadError(f"{type(pipeline).__name__} was loaded, but {problem}: {error}") from error
    return executor


def _within(seconds: float, function: Callable[[], T]) -> T:
    """Call a function on a thread of its own, and give it up when the time has passed.

    Raises:
        ModelLoadError: the time has passed. (The thread cannot be ended; the process is, when the load has failed.)
        Exception: what the function raised.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="diffusion-warm-up", daemon=True).start()
    try:
        return outcome.result(seconds)
    except FutureTimeoutError:
        raise ModelLoadError(
            f"the first runs have not ended within {seconds:g} s; set warmup_timeout_s higher if they need longer"
        ) from None


def load_pipeline(
    model: str,
    *,
    pipeline_class: str | None = None,
    dtype: str = "float32",
    base: Path | None = None,
    quantization_config: Any = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Any:
    """Load a bare `diffusers` pipeline, onto the CPU.

    Args:
        model: a local path (absolute, or relative to `base`), or a hub id such as `owner/name`.
        pipeline_class: name of the `diffusers` class to load the weights with; their own by default.
        dtype: one of `DTYPES`.
        quantization_config: as `from_pretrained` takes it, or None.
        allow_pickle: whether weights may be in Python's pickle format, which can run code of whoever made them.
        trust_remote_code: whether Python code that comes with the model is run.

    Raises:
        ConfigurationError: `dtype` is unknown.
        ModelLoadError: with the reason, in one line.
    """
    import diffusers
    import transformers

    if dtype not in DTYPES:
        raise ConfigurationError("dtype", f"{dtype!r} is not one of {', '.join(DTYPES)}{did_you_mean(dtype, DTYPES)}")
    loader = _pipeline_class(pipeline_class)
    source = _source(model, base)
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    try:
        options = {} if quantization_config is None else {"quantization_config": quantization_config}
        pipeline = loader.from_pretrained(
            source,
            dtype=DTYPES[dtype],
            use_safetensors=None if allow_pickle else True,
            trust_remote_code=trust_remote_code,
            **options,
        )
    except Exception as error:
        reason = next((line for line in str(error).strip().splitlines() if line.strip()), type(error).__name__)
        hint = "".join(hint for word, hint in _HINTS.items() if word in str(error))
        raise ModelLoadError(f"cannot load the pipeline {model!r}: {type(error).__name__}: {reason}{hint}") from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _pipeline_class(name: str | None) -> Any:
    """Return the class to load with.

    Raises:
        ConfigurationError: `diffusers` has no such pipeline.
    """
    import diffusers

    if name is None:
        return diffusers.DiffusionPipeline
    found = getattr(diffusers, name, None)
    if not (isinstance(found, type) and issubclass(found, diffusers.DiffusionPipeline)):
        known = [n for n in dir(diffusers) if n.endswith("Pipeline")]
        raise ConfigurationError("pipeline_class", f"diffusers has no pipeline {name!r}{did_you_mean(name, known)}")
    return found


def _source(model: str, base: Path | None) -> str:
    """Return what `from_pretrained` takes: an existing folder, or a hub id."""
    path = Path(model).expanduser()
    if not path.is_absolute() and base is not None:
        path = base / path
    if path.is_dir():
        if not (path / "model_index.json").is_file():
            raise ModelLoadError(f"the folder {model!r} holds no diffusers pipeline (model_index.json is missing)")
        check_path(path, "model")
        return str(path.resolve())
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ModelLoadError(
            f"the model {model!r} is neither a folder that exists nor a hub id of the form owner/name; "
            "a relative path starts at the model's folder in the repository of models"
        )
    check_hub(model, "model")
    return model
