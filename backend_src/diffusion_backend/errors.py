"""Every error that a request or a load can end with.

    DiffusionError
    ├── CallerError                  the caller can mend it
    │   ├── InvalidArgumentError     a field is wrong; names it and what is allowed
    │   ├── RequestCancelledError    the caller (or its disconnect) cancelled
    │   └── DeadlineExceededError    the caller's timeout passed
    ├── UnavailableError             nothing is wrong with the request; try again later
    │   ├── QueueFullError           as many requests wait as are allowed to
    │   └── EngineStoppedError       the engine is draining or has stopped
    └── ServerError                  ours
        ├── PipelineError            the pipeline raised while it ran this request
        ├── OutOfMemoryError         this request alone does not fit the device
        ├── NotFiniteError           the pipeline's output holds NaN or infinity
        ├── ExecutorError            the executor broke while it held this request
        ├── HungError                a unit of work took longer than the watchdog allows
        ├── ConfigurationError       a configuration parameter is wrong; names it
        └── ModelLoadError           the model cannot be loaded

They become Triton codes in one place only: `triton/errors.py`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import ClassVar

_PATH = re.compile(r"(?:\bfile://|(?<![\w/.]))(?:~|\.{1,2})?(?:/[\w.\-+@]+){2,}/?")


def without_paths(text: str) -> str:
    """Return `text` with file system paths replaced, so that no reply tells how the server is laid out."""
    return _PATH.sub("<path>", text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest of the `known` names, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


class DiffusionError(Exception):
    """Base of all errors of this package; `request_id` is empty where no request is concerned.

    Attributes:
        reason: what the kind of error is called in the metrics; one of `telemetry.ERROR_REASONS`.
    """

    reason: ClassVar[str] = "internal"

    def __init__(self, message: str, *, request_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id


class CallerError(DiffusionError):
    """The caller's fault or the caller's wish."""


class InvalidArgumentError(CallerError):
    """A field of a request is wrong.

    Args:
        field: the name of the input, as the caller wrote it.
        problem: what is wrong with which value, and what is allowed.
    """

    reason = "argument"

    def __init__(self, field: str, problem: str, *, request_id: str = "") -> None:
        super().__init__(f"{field}: {problem}", request_id=request_id)
        self.field = field


class RequestCancelledError(CallerError):
    """The request was cancelled before it was done."""

    def __init__(self, *, request_id: str = "") -> None:
        super().__init__("the request was cancelled", request_id=request_id)


class DeadlineExceededError(CallerError):
    """The request's timeout passed before it was done."""

    reason = "deadline"

    def __init__(self, timeout_s: float, *, request_id: str = "", where: str = "") -> None:
        super().__init__(
            f"deadline exceeded: not done within the timeout of {timeout_s:g} s{where and ' ' + where}; "
            "ask for fewer steps, or give a longer timeout",
            request_id=request_id,
        )


class UnavailableError(DiffusionError):
    """The request was right, but cannot be taken now."""


class QueueFullError(UnavailableError):
    """As many requests wait as `max_waiting` allows."""

    reason = "queue_full"

    def __init__(self, max_waiting: int, *, request_id: str = "") -> None:
        super().__init__(f"the queue is full ({max_waiting} requests wait); try again later", request_id=request_id)


class EngineStoppedError(UnavailableError):
    """The engine is draining or has stopped."""

    reason = "stopping"

    def __init__(self, reason: str = "the server is stopping", *, request_id: str = "") -> None:
        super().__init__(f"{reason}; send the request to another replica, or again later", request_id=request_id)


class ServerError(DiffusionError):
    """Our fault."""


class PipelineError(ServerError):
    """The pipeline raised while it ran this request."""

    reason = "pipeline"

    def __init__(self, cause: BaseException, *, request_id: str = "", where: str = "") -> None:
        # The text of an OSError names the file; what went wrong with it is enough.
        text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        detail = without_paths(text).strip().splitlines()
        super().__init__(
            f"the pipeline failed{where and ' ' + where}: {type(cause).__name__}{': ' + detail[0] if detail else ''}",
            request_id=request_id,
        )


class OutOfMemoryError(ServerError):
    """The device has too little memory for this request alone."""

    reason = "out_of_memory"

    def __init__(self, *, request_id: str = "", where: str = "") -> None:
        super().__init__(
            f"out of device memory{where and ' ' + where}: this request does not fit even alone; "
            "ask for a smaller size, fewer frames or fewer outputs",
            request_id=request_id,
        )


class NotFiniteError(ServerError):
    """The pipeline's output holds NaN or infinity, which would be handed out as a black picture or as silence."""

    reason = "not_finite"

    def __init__(self, name: str, *, request_id: str = "") -> None:
        super().__init__(
            f"the pipeline's output is not finite: {name} hold NaN or infinity after decode; ask for other arguments, "
            "or, if it happens often, load the model with a wider dtype (float16 overflows where bfloat16 does not)",
            request_id=request_id,
        )


class ExecutorError(ServerError):
    """The executor broke while it held this request."""

    reason = "executor"

    def __init__(self, cause: BaseException, *, request_id: str = "") -> None:
        super().__init__(
            f"the executor failed ({type(cause).__name__}); the request was lost, send it again",
            request_id=request_id,
        )


class HungError(ServerError):
    """A unit of work took longer than `watchdog_timeout_s`; the model's process is ended."""

    reason = "hung"

    def __init__(self, what: str, limit_s: float, *, request_id: str = "") -> None:
        super().__init__(
            f"the model hangs: {what} was not done within {limit_s:g} s, and its process is ended; "
            "send the request again when the server is back",
            request_id=request_id,
        )


class ConfigurationError(ServerError):
    """A configuration parameter is unknown or has a value that is not allowed."""

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"parameter {parameter!r}: {problem}")
        self.parameter = parameter


class ModelLoadError(ServerError):
    """The model cannot be loaded; the message says why and what to do."""
