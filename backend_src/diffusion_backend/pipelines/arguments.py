"""From a request to the arguments of a pipeline's call, and the checks that need to know the pipeline."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from ..engine.executor import Capabilities
from ..errors import InvalidArgumentError, did_you_mean
from ..request import PICTURES, DiffusionRequest
from .adapters import check_arguments, select
from .extra_args import (
    DURATION,
    FRAME_RATE,
    OUTPUTS_PER_PROMPT,
    PLAIN,
    RESERVED,
    Limits,
    Refuse,
    check_extra_args,
)

__all__ = [
    "DURATION",
    "FRAME_RATE",
    "OUTPUTS_PER_PROMPT",
    "RESERVED",
    "Limits",
    "call_arguments",
    "defaults_of",
    "frame_rate_of",
    "side_of",
    "signature_of",
    "validate",
]

DEFAULT_FRAME_RATE = 16.0
"""Frames a second of a video for which neither the request nor the pipeline names a rate."""


def signature_of(pipeline: Any) -> Mapping[str, inspect.Parameter]:
    """Return the named parameters of a pipeline's call."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(type(pipeline).__call__).parameters
    return {name: p for name, p in parameters.items() if name != "self" and p.kind not in variadic}


def defaults_of(pipeline: Any) -> dict[str, Any]:
    """Return the defaults of the arguments that requests set, where the pipeline's signature tells them.

    A size of None means the pipeline's own: the size of its denoiser's sample times the scale of its decoder.
    """
    parameters = signature_of(pipeline)
    defaults = {
        name: parameters[name].default
        for name in (*PLAIN, *FRAME_RATE)
        if name in parameters and parameters[name].default is not inspect.Parameter.empty
    }
    side = side_of(pipeline)
    if side is not None:
        defaults = {k: (side if v is None and k in ("height", "width") else v) for k, v in defaults.items()}
    return defaults


def side_of(pipeline: Any) -> int | None:
    """Return the pixels a side of a pipeline's own pictures, or None if it does not tell."""
    size = getattr(pipeline, "default_sample_size", None)
    denoiser = getattr(pipeline, "unet", None) or getattr(pipeline, "transformer", None)
    if size is None and denoiser is not None:
        size = getattr(denoiser.config, "sample_size", None)
    scale = getattr(pipeline, "vae_scale_factor", None)
    return size * scale if isinstance(size, int) and isinstance(scale, int) else None


def frame_rate_of(defaults: Mapping[str, Any]) -> float:
    """Return the frames a second of a pipeline's video, from the defaults of its arguments."""
    rates = (defaults.get(name) for name in FRAME_RATE)
    return next((float(rate) for rate in rates if isinstance(rate, int | float)), DEFAULT_FRAME_RATE)


def validate(request: DiffusionRequest, capabilities: Capabilities, limits: Limits, max_batch_rows: int) -> None:
    """Refuse what this pipeline cannot do, before the request is queued; any thread may call it.

    Raises:
        InvalidArgumentError: naming the field, the value and what is allowed.
    """

    def refuse(field: str, problem: str) -> NoReturn:
        raise InvalidArgumentError(field, problem, request_id=request.request_id)

    for prompt_field in ("prompt", "negative_prompt"):
        for text in getattr(request, prompt_field) or ():
            size = len(text.encode())
            if size > limits.max_prompt_bytes:
                refuse(prompt_field, f"{size} bytes are too many; at most {limits.max_prompt_bytes} are allowed")
    most = limits.max_steps if capabilities.max_steps is None else min(limits.max_steps, capabilities.max_steps)
    _in_range("num_inference_steps", request.num_inference_steps, 1, most, refuse)
    _in_range("num_frames", request.num_frames, 1, limits.max_frames, refuse)
    _in_range("strength", request.strength, 0.0, 1.0, refuse)
    _in_range("frame_rate", request.frame_rate, 1.0, 240.0, refuse)
    _in_range("duration_s", request.duration_s, 0.1, limits.max_duration_s, refuse)
    _in_range("num_outputs_per_prompt", request.num_outputs_per_prompt, 1, limits.max_outputs, refuse)
    _in_range("preview_interval", request.preview_interval, 0, limits.max_steps, refuse)
    for name in ("height", "width"):
        side = getattr(request, name)
        _in_range(name, side, 1, limits.max_side, refuse)
        if side is not None and side % capabilities.size_multiple:
            refuse(name, f"{side} is not allowed; it must be a multiple of {capabilities.size_multiple}")
    guidance = request.guidance_scale
    if guidance is not None and not (math.isfinite(guidance) and 0 <= guidance <= 1000):
        refuse("guidance_scale", f"{guidance} is not allowed; it must be a number from 0 to 1000")
    if request.timeout_s is not None and not request.timeout_s > 0:
        refuse("timeout", f"{request.timeout_s} s is not allowed; it must be more than 0")
    rows = request.num_outputs * capabilities.rows_per_output
    if rows > max_batch_rows:
        refuse(
            "num_outputs_per_prompt",
            f"{request.num_outputs_per_prompt} for {len(request.prompt)} prompts are {request.num_outputs} outputs; "
            f"at most {max_batch_rows // capabilities.rows_per_output} a request are allowed",
        )
    if request.preview_interval and not capabilities.supports_previews:
        refuse("preview_interval", f"{capabilities.pipeline_class} has no previews; leave it out, or give 0")
    if request.scheduler is not None and request.scheduler not in capabilities.schedulers:
        refuse(
            "scheduler",
            f"{request.scheduler!r} is not one of {', '.join(capabilities.schedulers) or 'none'}"
            + did_you_mean(request.scheduler, capabilities.schedulers),
        )
    select(request.lora, capabilities.adapters, capabilities.adapter_root, request_id=request.request_id)
    if capabilities.adapters or capabilities.adapter_root is not None:
        check_arguments(request.extra_args, request_id=request.request_id)
    _check_arguments(request, capabilities, replace(limits, max_steps=most), refuse)
    _check_strength(request, capabilities, refuse)
    _check_texts(request, refuse)
    _check_pictures(request, capabilities, refuse)
    if request.duration_s is not None and not capabilities.arguments.intersection(DURATION):
        rate = request.frame_rate or frame_rate_of(capabilities.defaults)
        frames = _frames_in(request.duration_s, rate)
        if frames > limits.max_frames:
            refuse(
                "duration_s",
                f"{request.duration_s} s at {rate} frames a second are {frames} frames; "
                f"at most {limits.max_frames} are allowed",
            )


def _check_strength(request: DiffusionRequest, capabilities: Capabilities, refuse: Refuse) -> None:
    """Refuse a strength that leaves no step."""
    steps = request.num_inference_steps or capabilities.defaults.get("num_inference_steps")
    if request.strength is not None and isinstance(steps, int) and int(request.strength * steps) < 1:
        least = math.ceil(1000 / steps) / 1000
        refuse("strength", f"{request.strength} of {steps} steps leaves none; it must be at least {least}")


def _check_pictures(request: DiffusionRequest, capabilities: Capabilities, refuse: Refuse) -> None:
    """Refuse pictures that set the output's size, but would be rounded down to no pixels, or resized to another's."""
    least = capabilities.size_multiple
    if request.height is not None or capabilities.defaults.get("height") is not None:
        return
    for name in PICTURES:
        pictures = getattr(request, name) or ()
        for picture in pictures:
            if min(picture.size) < least:
                refuse(name, f"{picture.width}×{picture.height} pixels are too few; each side must be at least {least}")
        if len({picture.size for picture in pictures}) > 1:
            refuse(name, "its pictures have several sizes, and set the output's; send each in a request of its own")


def _check_arguments(request: DiffusionRequest, capabilities: Capabilities, limits: Limits, refuse: Refuse) -> None:
    known = capabilities.arguments
    for name, targets in {
        **{name: (name,) for name in (*PLAIN, "negative_prompt", *PICTURES)},
        "frame_rate": FRAME_RATE,
        "duration_s": (*DURATION, "num_frames"),
    }.items():
        if getattr(request, name) is not None and not known.intersection(targets):
            refuse(name, f"{capabilities.pipeline_class} has no such argument; leave it out")
    for name in capabilities.needs:
        if getattr(request, name) is None:
            refuse(name, f"it is missing; {capabilities.pipeline_class} needs a picture here")
    if request.duration_s is not None and request.num_frames is not None:
        refuse("duration_s", "num_frames says the length already; leave one of them out")
    if request.num_outputs_per_prompt > 1 and not known.intersection(OUTPUTS_PER_PROMPT):
        refuse("num_outputs_per_prompt", f"{capabilities.pipeline_class} makes one output a prompt")
    check_extra_args(request.extra_args, known, capabilities.pipeline_class, limits, refuse)


def _in_range(name: str, value: float | None, low: float, high: float, refuse: Refuse) -> None:
    if value is not None and not low <= value <= high:  # a NaN is in no range
        refuse(name, f"{value} is not allowed; it must be from {low} to {high}")


def call_arguments(
    request: DiffusionRequest,
    arguments: frozenset[str],
    output_type: str,
    defaults: Mapping[str, Any] | None = None,
    *,
    pictures_in_lists: bool = False,
) -> dict[str, Any]:
    """Return the keyword arguments for a pipeline's call; what the request leaves out is left to the pipeline.

    But for a height without a width, or the reverse: some pipelines ignore one alone, so the other one is filled in
    from `defaults` (see `defaults_of`).

    Each output has a generator of its own, on the CPU, so that it is the same on every device and among any
    neighbours, and can be made again alone from its seed.

    Of several prompts each output becomes a prompt of the call, with its own pictures: left to repeat them by
    themselves, pipelines make A, A, B, B of the prompts, but many make A, B, A, B of masks and pictures.

    Args:
        request: validated for this pipeline.
        arguments: names of the arguments of the pipeline's call.
        output_type: the pipeline's argument of this name.
        defaults: see `defaults_of`.
        pictures_in_lists: whether the pipeline takes a list of pictures, one for each prompt. Then several outputs of
            one picture are given so, too: pipelines that take lists often want a picture for each generator.
    """
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in request.seeds]
    has_pictures = any(getattr(request, name) is not None for name in PICTURES)
    spread = has_pictures and pictures_in_lists and request.num_outputs_per_prompt > 1
    single = len(request.prompt) == 1 and not spread

    def each(values: Sequence[Any]) -> Any:
        return values[0] if single else [v for v in values for _ in range(request.num_outputs_per_prompt)]

    call: dict[str, Any] = {
        "prompt": each(request.prompt),
        "generator": generators[0] if len(generators) == 1 else generators,
        "output_type": output_type,
        "return_dict": True,
        **{name: _each_text(name, value, len(request.prompt), each) for name, value in request.extra_args.items()},
    }
    if request.negative_prompt is not None:
        call["negative_prompt"] = each(request.negative_prompt)
    for name in PLAIN:
        value = getattr(request, name)
        if value is not None:
            call[name] = value
    for name in PICTURES:
        pictures = getattr(request, name)
        if pictures is not None:
            call[name] = each(pictures)
    call.update(_time_arguments(request, arguments, frame_rate_of(defaults or {})))
    for side, other in (("height", "width"), ("width", "height")):
        if side in call and other not in call and isinstance((defaults or {}).get(other), int):
            call[other] = (defaults or {})[other]
    if "prompt" not in arguments and "batch_size" in arguments:
        call["batch_size"] = request.num_outputs  # an unconditional pipeline
    if single and request.num_outputs_per_prompt > 1:
        call[next(n for n in OUTPUTS_PER_PROMPT if n in arguments)] = request.num_outputs_per_prompt
    return {name: value for name, value in call.items() if name in arguments}


_OTHER_PROMPT = re.compile(r"(negative_)?prompt_\d")
"""The prompts for a pipeline's further text encoders."""


def _each_text(name: str, value: Any, num_prompts: int, each: Callable[[Sequence[Any]], Any]) -> Any:
    """Return a further argument; one that has a text for each prompt goes the same way as the prompts."""
    if isinstance(value, str) and _OTHER_PROMPT.fullmatch(name):
        value = [value] * num_prompts
    if _is_text_of_each(name, value) and len(value) == num_prompts:
        return each(value)
    return value


def _is_text_of_each(name: str, value: Any) -> bool:
    is_texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return is_texts and ("prompt" in name or name == "lyrics")


def _check_texts(request: DiffusionRequest, refuse: Refuse) -> None:
    """Refuse a further prompt that cannot be told to belong to one of the prompts."""
    for name, value in request.extra_args.items():
        if _is_text_of_each(name, value) and _OTHER_PROMPT.fullmatch(name) and len(value) != len(request.prompt):
            refuse(
                "extra_args",
                f"{name!r} has {len(value)} texts for {len(request.prompt)} prompts; give one for each, or one text",
            )


def _time_arguments(request: DiffusionRequest, arguments: frozenset[str], frame_rate: float) -> dict[str, Any]:
    """Return the arguments for the frame rate and the length, by the pipeline's own names for them."""
    made: dict[str, Any] = {}
    rate = request.frame_rate if request.frame_rate is not None else frame_rate
    if request.frame_rate is not None:
        name = next(n for n in FRAME_RATE if n in arguments)
        made[name] = request.frame_rate if name == "frame_rate" else round(request.frame_rate)
    if request.duration_s is not None:
        length = next((n for n in DURATION if n in arguments), None)
        if length is not None:
            made[length] = request.duration_s
        else:
            made["num_frames"] = _frames_in(request.duration_s, rate)
    return made


def _frames_in(duration_s: float, frame_rate: float) -> int:
    return max(1, round(duration_s * frame_rate))
