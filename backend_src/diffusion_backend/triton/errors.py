"""The one place where errors become Triton's."""

from __future__ import annotations

import logging
import re
from typing import Any

import triton_python_backend_utils as pb_utils

from ..errors import (
    DeadlineExceededError,
    DiffusionError,
    InvalidArgumentError,
    RequestCancelledError,
    UnavailableError,
)

log = logging.getLogger(__name__)

MAX_TEXT_BYTES = 4000
"""Longest text of an error."""


def to_triton(error: Exception, *, name_code: bool = False) -> Any:
    """Return a `TritonError` with the code and the text that the caller is to see; no path, no traceback.

    Args:
        error: any error.
        name_code: whether the text begins with the code's name in brackets, for a twin (see `split_code`).
    """
    code, message = _explain(error)
    message = shortened(message)
    text = f"[{code}] {message}" if name_code else message
    return pb_utils.TritonError(text, getattr(pb_utils.TritonError, code))


def shortened(text: str) -> str:
    """Return a text without control characters, its middle left out if it is long.

    It may repeat what the caller sent. gRPC refuses to carry a status of more than 16 KiB, in which a byte beyond ASCII
    takes three.
    """
    if len(text) > 2 * MAX_TEXT_BYTES:
        text = text[:MAX_TEXT_BYTES] + text[-MAX_TEXT_BYTES:]
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    raw = text.encode(errors="replace")
    if len(raw) <= MAX_TEXT_BYTES:
        return raw.decode()
    head, tail = raw[: MAX_TEXT_BYTES * 3 // 4], raw[-MAX_TEXT_BYTES // 4 :]
    return f"{head.decode(errors='ignore')} […] {tail.decode(errors='ignore')}"


def split_code(text: str) -> tuple[str, str]:
    """Return the code's name and the message of an error's text that may begin with a code's name.

    On a stream an error is a text without a code. (With the header `triton_grpc_error` it has one, but the server of
    release 24.10 crashes of a few hundred such errors at once.) What Triton itself refuses is known by its words.
    """
    match = re.match(r"\[([A-Z_]+)\] ", text)
    if match is not None and hasattr(pb_utils.TritonError, match[1]):
        return match[1], text[match.end() :]
    if text.endswith(("Exceeds maximum queue size", "Request timeout expired", "has no available versions")):
        return "UNAVAILABLE", text
    if text.startswith("Request for unknown model"):
        return "NOT_FOUND", text
    if text.startswith("[request id: "):  # what Triton says of inputs that do not fit the model's
        return "INVALID_ARG", text
    return "INTERNAL", text


def code_of(error: Exception) -> str:
    """Return the name of an error's code."""
    if isinstance(error, InvalidArgumentError):
        return "INVALID_ARG"
    if isinstance(error, RequestCancelledError):
        return "CANCELLED"
    if isinstance(error, UnavailableError | DeadlineExceededError):
        return "UNAVAILABLE"
    return "INTERNAL"


def _explain(error: Exception) -> tuple[str, str]:
    """Return the name of an error's code and its text."""
    if not isinstance(error, DiffusionError):
        log.error("internal error", exc_info=error)
        return code_of(error), f"internal error ({type(error).__name__}); the server's log has the details"
    return code_of(error), error.message
