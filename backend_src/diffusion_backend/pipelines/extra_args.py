"""What `extra_args` may hold: plain values for the pipeline's own arguments, and none that reaches further.

A pipeline's arguments were made for its own programmer: some are functions, some are fetched as addresses or opened as
files, some are filled in as a format text, and some say how much work or memory a call takes. So an argument is judged
by its name and its value:

    RESERVED, _INTERNAL   never: the request has an input for it, or it reaches into the server
    _MEDIA                numbers only: pictures and the like come by inputs of their own
    _COUNTS               numbers up to the model's limit for what they count
    _TEXT                 any text, as long as a prompt may be
    all others            numbers, truth values, words; lists and objects of those
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import did_you_mean
from ..request import PICTURES

MAX_DEPTH = 16
"""Levels of lists and objects in a value."""

MAX_INTEGER = 2**63 - 1
"""Largest integer, of either sign: what a tensor can hold."""

MAX_TOKENS = 4096
"""Most tokens that an argument may ask a text encoder to make of a prompt, or a language model to write."""

OUTPUTS_PER_PROMPT = (
    "num_images_per_prompt",
    "num_videos_per_prompt",
    "num_waveforms_per_prompt",
    "num_outputs_per_prompt",
)
"""What pipelines call the number of outputs a prompt."""

DURATION = ("audio_length_in_s", "audio_end_in_s", "audio_duration", "duration_s")
"""What pipelines call the length of their sound."""

FRAME_RATE = ("frame_rate", "fps")
"""What pipelines call the frames a second of their video."""

PLAIN = ("num_inference_steps", "guidance_scale", "height", "width", "num_frames", "strength")
"""Fields of a request that are arguments of the same name."""

RESERVED = frozenset(
    {"generator", "output_type", "return_dict", "latents", "callback", "callback_steps", "callback_on_step_end"}
    | {"callback_on_step_end_tensor_inputs", "prompt_embeds", "negative_prompt_embeds", "prompt", "negative_prompt"}
    | {"batch_size", *PLAIN, *OUTPUTS_PER_PROMPT, *DURATION, *FRAME_RATE, *PICTURES}
)
"""Arguments that the request has inputs for, or that are the server's own."""

_INTERNAL = re.compile(r"^_|callback|generator|output_type|return_dict|_template$|^fonts$|^messages$|^state$")
"""Functions; format texts (`prompt_template`), in which `{:>999999999}` takes memory and `{0.__class__}` looks around;
names of files; chat messages, whose pictures are fetched as addresses."""

_MEDIA = re.compile(r"image|video|mask|frames|audio|latents|embed|depth_map|hint|conditions$")
"""Arguments that take pictures and the like; some pipelines would fetch a text as an address."""

_NUMBER = re.compile(r"\b(int|float|bool)\b")
"""In the type of an argument that, whatever its name, is no picture."""

_TEXT = re.compile(r"prompt|phrase|lyrics|instruction|transcription|category")
_WORD = re.compile(r"[\w .,+#-]{0,200}")  # no slash: neither a path nor an address


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request may ask for at most; each is a configuration parameter of the same name."""

    max_steps: int = 1000
    max_side: int = 4096
    max_outputs: int = 64
    max_frames: int = 1024
    max_duration_s: float = 600.0
    max_prompt_bytes: int = 16384


_COUNTS: tuple[tuple[re.Pattern[str], Callable[[Limits], float]], ...] = (
    # The first pattern that a name matches tells its limit.
    (re.compile(r"seed"), lambda _: MAX_INTEGER),
    (re.compile(r"(?<!time)steps|iter|jump|cooldown|warmup"), lambda limits: limits.max_steps),
    (re.compile(r"seconds|duration|_in_s$"), lambda limits: limits.max_duration_s),
    (re.compile(r"frames|video_length|frame_length|window|overlap"), lambda limits: limits.max_frames),
    (re.compile(r"tokens|length"), lambda _: MAX_TOKENS),
    (re.compile(r"area"), lambda limits: limits.max_side**2),
    (re.compile(r"batch|ensemble|reps|parallel|chunk|layers|^num_"), lambda limits: limits.max_outputs),
    (re.compile(r"resolution|height|width|size|crop"), lambda limits: limits.max_side),
)

Refuse = Callable[[str, str], NoReturn]


def check_extra_args(
    extra_args: Mapping[str, Any], known: Collection[str], pipeline_class: str, limits: Limits, refuse: Refuse
) -> None:
    """Refuse what may not be set, before the request is queued; any thread may call it.

    Args:
        extra_args: as parsed from JSON.
        known: names of the arguments of the pipeline's call.
        pipeline_class: its name, for errors.
        limits: of the model.
        refuse: raises the error, given the field and the problem.
    """
    allowed = sorted(name for name in known if name not in RESERVED and not _INTERNAL.search(name))
    for name, value in extra_args.items():
        if name in RESERVED or (name in known and name not in allowed):
            refuse("extra_args", f"{name!r} cannot be set here; allowed are {', '.join(allowed)}")
        if name not in known:
            refuse(
                "extra_args",
                f"{name!r} is not an argument of {pipeline_class}{did_you_mean(name, allowed)} "
                f"(allowed are {', '.join(allowed)})",
            )
        problem = _problem(name, value, limits, 0)
        if problem is not None:
            refuse("extra_args", problem)


def carries(argument: inspect.Parameter) -> bool:
    """Return whether JSON can give an argument of a pipeline's call a value, told by its name, default and type."""
    if argument.name in RESERVED or _INTERNAL.search(argument.name):
        return False
    is_number = isinstance(argument.default, int | float) or _NUMBER.search(str(argument.annotation)) is not None
    return is_number or _MEDIA.search(argument.name) is None


def _problem(name: str, value: Any, limits: Limits, depth: int) -> str | None:
    """Return what is wrong with a value, or None. `name` is the innermost one that it stands under."""
    if depth > MAX_DEPTH:
        return f"{name!r} must be a plain JSON value, nested {MAX_DEPTH} deep at most"
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return _number_problem(name, value, limits)
    if isinstance(value, str) and not _MEDIA.search(name):
        return _text_problem(name, value, limits)
    if _MEDIA.search(name):
        return f"{name!r} can only be a number here: extra_args carries no pictures, sounds or files"
    if isinstance(value, list):
        # Lists of timesteps or sigmas are steps under another name.
        if len(value) > limits.max_steps:
            return f"{name!r} has {len(value)} entries; at most {limits.max_steps} are allowed"
        return _first(_problem(name, item, limits, depth + 1) for item in value)
    if isinstance(value, dict):
        return _first(_entry_problem(name, key, item, limits, depth) for key, item in value.items())
    return f"{name!r} must be a plain JSON value, nested {MAX_DEPTH} deep at most"


def _entry_problem(name: str, key: Any, item: Any, limits: Limits, depth: int) -> str | None:
    if not isinstance(key, str) or not _WORD.fullmatch(key) or _INTERNAL.search(key):
        return f"{name!r} must be a plain JSON value; the key {key!r} cannot be set in it"
    return _problem(key, item, limits, depth + 1)


def _first(problems: Any) -> str | None:
    return next((problem for problem in problems if problem is not None), None)


def _number_problem(name: str, value: float, limits: Limits) -> str | None:
    most = next((limit(limits) for pattern, limit in _COUNTS if pattern.search(name)), MAX_INTEGER)
    least = 1 if name.endswith("num_inference_steps") else -most
    if name.endswith("num_inference_steps") and not isinstance(value, int):
        return f"{name!r}: {value!r} is not allowed; it must be a whole number from 1 to {most}"
    if not least <= value <= most:  # a NaN is in no range
        return f"{name!r}: {value!r} is not allowed; it must be from {least} to {most}"
    return None


def _text_problem(name: str, value: str, limits: Limits) -> str | None:
    if _TEXT.search(name):
        size = len(value.encode(errors="replace"))
        if size > limits.max_prompt_bytes:
            return f"{name!r}: {size} bytes are too many; at most {limits.max_prompt_bytes} are allowed"
        return None
    if not _WORD.fullmatch(value):
        return f"{name!r}: {value[:80]!r} is not allowed; it must be a word, without slashes and 200 characters at most"
    return None
