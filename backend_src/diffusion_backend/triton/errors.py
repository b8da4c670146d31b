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


def to_triton(error: Exception, *, name_code: bool = False) -> Any:
    """Return a `TritonError` with the code and the text that the caller is to see; no path, no traceback.

    Args:
        error: any error.
        name_code: whether the text begins with the code's name in brackets, for a twin (see `split_code`).
    """
    code, message = _explain(error)
    text = f"[{code}] {message}" if name_code else message
    return pb_utils.TritonError(text, getattr(pb_utils.TritonError, code))


def split_code(text: str) -> tuple[str, str]:
    """Return the code's name and the message of an error's text that may begin with a code's name.

    On a stream an error is a text without a code. (With the header `triton_grpc_error` it has one, but the server of
    release 24.10 crashes of a few hundred such errors at once.) What Triton itself refuses is known by its words.
    """
    match = re.match(r"\[([A-Z_]+)\] ", text)
    if match is not None and hasattr(pb_utils.TritonError, match[1]):
        return match[1], text[match.end() :]
    if text.endswith(("Exceeds maximum queue size", "Request timeout expired")):
        return "UNAVAILABLE", text
    return "INTERNAL", text


def _explain(error: Exception) -> tuple[str, str]:
    """Return the name of an error's code and its text."""
    if not isinstance(error, DiffusionError):
        log.error("internal error", exc_info=error)
        return "INTERNAL", f"internal error ({type(error).__name__}); the server's log has the details"
    if isinstance(error, InvalidArgumentError):
        return "INVALID_ARG", error.message
    if isinstance(error, RequestCancelledError):
        return "CANCELLED", error.message
    if isinstance(error, UnavailableError | DeadlineExceededError):
        return "UNAVAILABLE", error.message
    return "INTERNAL", error.message
