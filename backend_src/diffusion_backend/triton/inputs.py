"""From the tensors of a Triton request to a `DiffusionRequest` and what its answer is to look like."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import InvalidArgumentError, did_you_mean
from ..media import OutputFormat, decode_image, decode_mask
from ..request import DiffusionRequest, resolve_seeds
from .trace_context import TRACE_CONTEXT


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request and how to answer it.

    Attributes:
        output_format: of the result and of previews.
        progress: whether STEP events are sent.
    """

    request: DiffusionRequest
    output_format: OutputFormat
    progress: bool


MAX_TEXT_BYTES = 4096
"""Longest text of an input that is no prompt and no `extra_args`."""

_MAX_DIGITS = 20
MAX_TIMEOUT_S = 2**63 / 1e6
"""Triton counts microseconds in 63 bits."""

_SHOWN = 80  # characters of what was sent that an error repeats

NAME_CODE = "error_codes"
"""The parameter of a request whose error's text is to begin with its code's name; the twin sends it."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a request says beside its inputs.

    Attributes:
        name_code: whether the text of an error is to begin with its code's name.
        timeout_us: of a request over `/generate`, where it is a field like any other; 0 for none.
    """

    name_code: bool
    timeout_us: int


def parameters_of(request: Any) -> str:
    """Return a Triton request's parameters as JSON, "" for none.

    Raises:
        InvalidArgumentError: one of them is not UTF-8; over `/generate` any field's name may be of any bytes.
    """
    try:
        return request.parameters() or ""
    except UnicodeDecodeError:
        raise InvalidArgumentError("parameters", "a name or a value among them is not UTF-8") from None


def asks_for_code(request: Any) -> bool:
    """Whether the errors of a Triton request are to begin with their code's name; for one that could not be read."""
    try:
        return NAME_CODE in parameters_of(request)
    except InvalidArgumentError:
        return False


def read_parameters(parameters: str, inputs: Iterable[str]) -> Parameters:
    """Read the parameters, and refuse what is none: `/generate` makes parameters of fields that are no inputs.

    Args:
        parameters: the request's parameters, as JSON; those of Triton's protocols (priority, timeout, ...) are not
            among them, but `/generate` has them as fields.
        inputs: names of the model's inputs.

    Raises:
        InvalidArgumentError: naming the first parameter, and the nearest input.
    """
    given: dict[str, Any] = json.loads(parameters or "{}")
    name_code = bool(given.pop(NAME_CODE, False))
    timeout_us = given.pop("timeout", 0)
    if isinstance(timeout_us, bool) or not isinstance(timeout_us, int) or not 0 <= timeout_us < 2**63:
        raise InvalidArgumentError("timeout", f"{timeout_us!r} is not allowed; it must be an integer, in microseconds")
    given = {name: value for name, value in given.items() if name.lower() not in TRACE_CONTEXT}
    if "priority" in given:
        raise InvalidArgumentError("priority", "it cannot be set here; send it with gRPC or HTTP infer")
    for name in given:
        raise InvalidArgumentError(
            name, f"there is no such input{did_you_mean(name, inputs)} (there are {', '.join(inputs)})"
        )
    return Parameters(name_code, timeout_us)


TIMEOUT = "timeout_s"
"""The input that limits a request as Triton's own `timeout` does, for clients that can send nothing but inputs."""


def read_timeout(request_us: int, field_us: int, tensors: Mapping[str, NDArray[Any]]) -> float | None:
    """Return the request's time-out in seconds: the smallest of those that it gives; None without any.

    Args:
        request_us: Triton's, in microseconds; 0 for none.
        field_us: that of `Parameters`.
        tensors: the inputs, one of which is the time-out in seconds.

    Raises:
        InvalidArgumentError: one of them is out of range.
    """
    if request_us >= 2**63:  # a negative one, as Triton hands it over
        raise InvalidArgumentError("timeout", "it is not allowed; it must be from 0 to 2^63 - 1 microseconds")
    given = [us / 1e6 for us in (request_us, field_us) if us]
    if TIMEOUT in tensors:
        seconds = _Reader(tensors, {}, ()).number(TIMEOUT)
        if seconds is None or not 0 < seconds < MAX_TIMEOUT_S:
            raise InvalidArgumentError(TIMEOUT, f"{seconds} is not allowed; it must be more than 0 and finite")
        given.append(seconds)
    return min(given, default=None)


def parse(
    request_id: str,
    tensors: Mapping[str, NDArray[Any]],
    *,
    defaults: Mapping[str, Any],
    timeout_s: float | None,
    max_outputs: int,
    max_side: int,
    max_picture_bytes: int,
    max_extra_args_bytes: int,
    arguments: Container[str],
) -> ParsedRequest:
    """Read the inputs of a request.

    Args:
        request_id: unique among the live requests.
        tensors: each input that was given, of shape (B, 1) for B prompts, raw pictures (B, H, W, C). `prompt`,
            `negative_prompt`, `seed` and the pictures hold for each prompt; the other inputs must be the same for all.
        defaults: values of inputs that are left out, by name.
        timeout_s: the request's timeout, or None.
        max_outputs: most outputs a prompt.
        max_side: largest height and width of a picture sent, in pixels.
        max_picture_bytes: largest file of a picture.
        max_extra_args_bytes: longest `extra_args`.
        arguments: names of the pipeline's arguments: a picture for which there is none is not even decoded.

    Raises:
        InvalidArgumentError: naming the input.
    """
    reader = _Reader(tensors, defaults, arguments)
    if "prompt" not in tensors:
        raise InvalidArgumentError("prompt", "it is missing; it is the one input that every request needs")
    prompt = reader.texts("prompt")
    extra_args, scheduler = _extra_args(reader.text("extra_args", max_extra_args_bytes))
    num_outputs = reader.integer("num_outputs_per_prompt")
    num_outputs = 1 if num_outputs is None else num_outputs
    if not 1 <= num_outputs <= max_outputs:  # before a seed is made for each
        raise InvalidArgumentError(
            "num_outputs_per_prompt", f"{num_outputs} is not allowed; it must be from 1 to {max_outputs}"
        )
    base: list[int | None] = [None] * len(prompt)
    if "seed" in tensors:
        base = [int(seed) for seed in tensors["seed"].reshape(-1)]
    request = DiffusionRequest(
        request_id=request_id,
        prompt=prompt,
        seeds=resolve_seeds(base, num_outputs),
        negative_prompt=reader.texts("negative_prompt") if "negative_prompt" in tensors else None,
        num_inference_steps=reader.integer("num_inference_steps"),
        guidance_scale=reader.number("guidance_scale"),
        height=reader.integer("height"),
        width=reader.integer("width"),
        num_frames=reader.integer("num_frames"),
        strength=reader.number("strength"),
        frame_rate=reader.number("frame_rate"),
        duration_s=reader.number("duration_s"),
        image=reader.pictures("image", max_side, max_picture_bytes),
        mask_image=reader.pictures("mask_image", max_side, max_picture_bytes),
        control_image=reader.pictures("control_image", max_side, max_picture_bytes),
        num_outputs_per_prompt=num_outputs,
        preview_interval=reader.integer("preview_interval") or 0,
        timeout_s=timeout_s,
        scheduler=scheduler,
        lora=_lora(reader.text("lora")),
        extra_args=extra_args,
    )
    progress = reader.one("progress")
    return ParsedRequest(request, OutputFormat.parse(reader.text("output_format")), progress is None or bool(progress))


class _Reader:
    """Typed access to the inputs; one that was not given is its default, or None."""

    def __init__(
        self, tensors: Mapping[str, NDArray[Any]], defaults: Mapping[str, Any], arguments: Container[str]
    ) -> None:
        self._tensors = tensors
        self._defaults = defaults
        self._arguments = arguments

    def one(self, name: str) -> Any:
        """Return the value that an input has for all prompts."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return self._defaults.get(name)
        values = tensor.reshape(-1)
        if values.size == 0:
            raise InvalidArgumentError(name, "it is empty")
        if values.size > 1 and any(value != values[0] for value in values):  # a NaN differs from itself
            raise InvalidArgumentError(name, "it must be the same for all prompts of a request")
        return values[0]

    def integer(self, name: str) -> int | None:
        value = self.one(name)
        return None if value is None else int(value)

    def number(self, name: str) -> float | None:
        value = self.one(name)
        # The shortest decimal that gives this float32, so that 3.3 is echoed as 3.3.
        return None if value is None else float(str(np.float32(value)))

    def pictures(self, name: str, max_side: int, max_bytes: int) -> tuple[Image.Image, ...] | None:
        """Return the picture for each prompt, sent raw as NAME or as a file as NAME_file."""
        file_name = f"{name}_file"
        given = [field for field in (name, file_name) if field in self._tensors]
        if not given:
            return None
        field = given[-1]
        if len(given) > 1:
            raise InvalidArgumentError(file_name, f"{name} was sent too; send one of them")
        if name not in self._arguments:
            raise InvalidArgumentError(field, "this pipeline has no such argument; leave it out")
        decode = decode_mask if name == "mask_image" else decode_image
        sent = self._tensors[field]
        data = sent if field == name else [_file_bytes(field, item, max_bytes) for item in sent.reshape(-1)]
        pictures = tuple(decode(item, max_pixels=max_side**2, field=field) for item in data)
        for picture in pictures:
            if max(picture.size) > max_side:
                width, height = picture.size
                raise InvalidArgumentError(field, f"{width}×{height} pixels are too many; at most {max_side} a side")
        return pictures

    def text(self, name: str, max_bytes: int = MAX_TEXT_BYTES) -> str | None:
        value = self.one(name)
        if value is None:
            return None
        _check_length(name, value, max_bytes)
        return _decode(name, value)

    def texts(self, name: str) -> tuple[str, ...]:
        values = tuple(_decode(name, value) for value in self._tensors[name].reshape(-1))
        if not values:
            raise InvalidArgumentError(name, "it is empty")
        return values


def _check_length(name: str, value: bytes | str, most: int) -> None:
    if len(value) > most:
        raise InvalidArgumentError(name, f"{len(value)} bytes are too many; at most {most} are allowed")


def _file_bytes(name: str, data: Any, max_bytes: int) -> bytes:
    """Return the bytes of a file that was sent as such, or as base64 text (or a data URL), as JSON needs it."""
    _check_length(name, data, 2 * max_bytes)  # before it is copied and searched; base64 takes a third more
    raw = data.encode() if isinstance(data, str) else bytes(data)
    text = raw.partition(b",")[2] if raw.startswith(b"data:") else raw
    # No picture file is made of the letters of base64 alone: all begin with a byte or a sign that is none of them.
    text = b"".join(text.split())
    if re.fullmatch(rb"[A-Za-z0-9+/]+={0,2}", text):
        try:
            raw = base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise InvalidArgumentError(name, f"it is not base64: {error}") from None
    _check_length(name, raw, max_bytes)
    return raw


def _decode(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(name, f"it is not UTF-8 (byte {error.start})") from None


def _lora(text: str | None) -> tuple[tuple[str, float], ...]:
    """Return the adapters and their weights, from `name, name:0.8`."""
    if text is None or not text.strip():
        return ()
    adapters = []
    for part in text.split(","):
        name, colon, number = part.rpartition(":")
        name, number = (name.strip(), number.strip()) if colon else (number.strip(), "1")
        if not name:
            raise InvalidArgumentError("lora", f"{text!r} has an empty name; write 'name' or 'name:0.5, name2:1'")
        try:
            adapters.append((name, float(number)))
        except ValueError:
            raise InvalidArgumentError("lora", f"the weight {number!r} of {name!r} is not a number") from None
    return tuple(adapters)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:_SHOWN]} is too large")
    return value


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"the number {text[:_SHOWN]}… has {len(text)} digits; at most {_MAX_DIGITS} are allowed")
    return int(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; which of two equal names counts, the sender and we might see differently."""
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"{name[:_SHOWN]!r} is there twice")
        made[name] = value
    return made


def _extra_args(text: str | None) -> tuple[dict[str, Any], str | None]:
    """Return the further arguments, and the scheduler's name if it is among them."""
    if text is None or not text.strip():
        return {}, None
    try:
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
            object_pairs_hook=_unique,
        )
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidArgumentError("extra_args", f"it is not JSON: {reason}") from None
    if not isinstance(value, dict):
        raise InvalidArgumentError("extra_args", f"it must be a JSON object, not {type(value).__name__}")
    scheduler = value.pop("scheduler", None)
    if scheduler is not None and not isinstance(scheduler, str):
        raise InvalidArgumentError("extra_args", "'scheduler' must be the name of a scheduler's class")
    return value, scheduler
