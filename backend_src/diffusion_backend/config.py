"""The configuration of one model, from the `parameters` of its config.pbtxt."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigurationError, did_you_mean
from .faults import Fault, parse_faults


def _integer(low: int) -> Callable[[str, str], int]:
    def parse(name: str, text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise ConfigurationError(name, f"{text!r} is not an integer")
        value = int(text)
        if value < low:
            raise ConfigurationError(name, f"{value} is not allowed; it must be at least {low}")
        return value

    return parse


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigurationError(name, f"{text!r} is not true or false")
    return text.lower() == "true"


def _choice(*allowed: str) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text not in allowed:
            raise ConfigurationError(name, f"{text!r} is not one of {', '.join(allowed)}{did_you_mean(text, allowed)}")
        return text

    return parse


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigurationError(name, f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise ConfigurationError(name, f"{text} is not allowed; it must be finite")
    return value


def _not_negative(name: str, text: str) -> float:
    value = _number(name, text)
    if value < 0:
        raise ConfigurationError(name, f"{value} is not allowed; it must be at least 0")
    return value


def _positive(name: str, text: str) -> float:
    value = _number(name, text)
    if value <= 0:
        raise ConfigurationError(name, f"{value} is not allowed; it must be more than 0")
    return value


def _tolerance(name: str, text: str) -> float:
    value = _number(name, text)
    if not 0 <= value < 1:
        raise ConfigurationError(name, f"{value} is not allowed; it must be at least 0 and less than 1")
    return value


def _sizes(name: str, text: str) -> tuple[tuple[int, int], ...]:
    sizes = []
    for part in filter(None, re.split(r"[,\s]+", text)):
        match = re.fullmatch(r"(\d+)x(\d+)", part)
        if match is None:
            raise ConfigurationError(name, f"{part!r} is not a size; write heights and widths as '512x512, 768x512'")
        if not int(match[1]) or not int(match[2]):
            raise ConfigurationError(name, f"{part!r} is not allowed; sizes are at least 1")
        sizes.append((int(match[1]), int(match[2])))
    return tuple(sizes)


def _named_paths(name: str, text: str) -> tuple[tuple[str, str], ...]:
    pairs: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = re.fullmatch(r"([\w][\w.-]*)\s*=\s*(\S.*)", part)
        if match is None:
            raise ConfigurationError(name, f"{part!r} is not of the form name=path; write 'name=path, name2=path2'")
        if match[1] in pairs:
            raise ConfigurationError(name, f"the name {match[1]!r} is there twice")
        pairs[match[1]] = match[2]
    return tuple(pairs.items())


def _text(name: str, text: str) -> str:
    if not text.strip():
        raise ConfigurationError(name, "it is empty")
    return text


def _param(default: Any, parse: Callable[[str, str], Any], help_text: str) -> Any:
    return dataclasses.field(default=default, metadata={"parse": parse, "help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The parameters of a model; each is one `parameters` entry of config.pbtxt with a `string_value`."""

    model: str = dataclasses.field(
        metadata={"parse": _text, "help": "hub id, or path (a relative one starts at the model's folder)"}
    )
    pipeline_class: str | None = _param(
        None, _text, "class to load the weights with, such as StableDiffusionImg2ImgPipeline; by default their own"
    )
    loras: tuple[tuple[str, str], ...] = _param(
        (), _named_paths, "LoRA adapters that requests may name, as 'name=path, name2=path2' (or hub ids)"
    )
    lora_root: str | None = _param(
        None, _text, "folder whose LoRA files requests may name by path; by default paths are refused"
    )
    allow_pickle: bool = _param(
        False, _flag, "true: also load weights in Python's pickle format, which can run code of whoever made them"
    )
    trust_remote_code: bool = _param(False, _flag, "true: run the Python code that comes with a model")
    dtype: str = _param("float32", _choice("float32", "float16", "bfloat16"), "type of the weights")
    step_batching: str = _param(
        "auto",
        _choice("auto", "off", "require"),
        "auto: joint forwards where the self-check passes; off: none; require: refuse to load without",
    )
    deterministic: bool = _param(
        False, _flag, "true: no joint forwards, so that a request's bits are the same whatever its neighbours"
    )
    self_check_tolerance: float | None = _param(
        None, _tolerance, "largest difference of a joint forward from the call alone; by default by dtype"
    )
    enable_model_cpu_offload: bool = _param(False, _flag, "true: keep weights on the host until they are used")
    vae_tiling: bool = _param(False, _flag, "true: decode large pictures in tiles")
    vae_slicing: bool = _param(False, _flag, "true: decode the pictures of a batch one by one")
    attention_backend: str | None = _param(None, _text, "kernel of the attention, by diffusers' name for it")
    quantization: str | None = _param(None, _text, "JSON object of the arguments of PipelineQuantizationConfig")
    compile: str | None = _param(
        None,
        _choice("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        "mode of torch.compile for the denoisers; not compiled by default",
    )
    prompt_cache_bytes: int = _param(
        256 * 2**20, _integer(0), "bytes of prompt embeddings kept in the host's memory; 0: none"
    )
    warmup_timeout_s: float = _param(600.0, _positive, "seconds that the probe and the warm-up may take at load")
    watchdog_timeout_s: float | None = _param(
        None, _positive, "seconds that a unit of work may take; then the model's process is ended; by default no limit"
    )
    faults: tuple[Fault, ...] = _param(
        (), parse_faults, "faults on purpose, as a JSON list; refused unless DIFFUSION_ALLOW_FAULTS=1"
    )
    log_requests: bool = _param(True, _flag, "true: a line of JSON in the log for each request that has ended")
    log_prompts: bool = _param(
        False, _flag, "true: prompts, and texts of errors that may quote them, in the log and in traces"
    )
    max_num_seqs: int = _param(16, _integer(1), "requests that run at once")
    max_batch_rows: int = _param(32, _integer(1), "rows of one forward of the denoiser")
    max_waiting: int = _param(4096, _integer(1), "requests in the engine's own queue")
    max_steps: int = _param(1000, _integer(1), "steps that a request may ask for")
    max_side: int = _param(4096, _integer(1), "height and width that a request may ask for, in pixels")
    max_outputs: int = _param(64, _integer(1), "outputs a prompt that a request may ask for")
    max_frames: int = _param(1024, _integer(1), "frames that a request may ask for")
    max_duration_s: float = _param(600.0, _positive, "seconds of sound or video that a request may ask for")
    default_num_inference_steps: int | None = _param(None, _integer(1), "steps where a request names none")
    default_guidance_scale: float | None = _param(None, _not_negative, "guidance scale where a request names none")
    default_num_frames: int | None = _param(None, _integer(1), "frames where a request names none; the probe's too")
    default_height: int | None = _param(None, _integer(1), "height where a request names none, in pixels")
    default_width: int | None = _param(None, _integer(1), "width where a request names none, in pixels")
    max_prompt_bytes: int = _param(16384, _integer(1), "bytes of a prompt")
    max_extra_args_bytes: int = _param(65536, _integer(1), "bytes of extra_args")
    max_picture_bytes: int = _param(32 * 2**20, _integer(1), "bytes of a picture's file")
    warmup_sizes: tuple[tuple[int, int], ...] = _param(
        (), _sizes, "sizes to warm up at load, as '512x512, 768x512' (height x width); the first is also the probe's"
    )

    @property
    def defaults(self) -> dict[str, int | float]:
        """What stands for the arguments that a request leaves out, instead of the pipeline's own defaults."""
        values = {
            "num_inference_steps": self.default_num_inference_steps,
            "guidance_scale": self.default_guidance_scale,
            "height": self.default_height,
            "width": self.default_width,
            "num_frames": self.default_num_frames,
        }
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> ModelConfig:
        """Parse the parameters.

        Raises:
            ConfigurationError: one is unknown (the nearest known one is named), missing, or has a bad value.
        """
        values = _parse(cls, parameters)
        if "model" not in values:
            raise ConfigurationError("model", "it is missing; give a hub id or the path of a pipeline's folder")
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnaryConfig:
    """The parameters of a unary twin."""

    stream_model: str | None = _param(None, _text, "the streaming model; by default the twin's name without _unary")
    grpc_endpoint: str | None = _param(
        None, _text, "host:port of this server's gRPC; by default DIFFUSION_GRPC_ENDPOINT, or 127.0.0.1:8001"
    )

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> UnaryConfig:
        """Parse the parameters; see `ModelConfig.from_parameters`."""
        return cls(**_parse(cls, parameters))


def _parse(cls: type, parameters: Mapping[str, str]) -> dict[str, Any]:
    known = {field.name: field for field in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for name, text in parameters.items():
        if name not in known:
            raise ConfigurationError(
                name, f"there is no such parameter{did_you_mean(name, known)} (known are {', '.join(known)})"
            )
        values[name] = known[name].metadata["parse"](name, text.strip())
    return values
