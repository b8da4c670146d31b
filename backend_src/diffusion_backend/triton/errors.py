"""The one place where errors become Triton's."""

from __future__ import annotations

import logging
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


def to_triton(error: Exception) -> Any:
    """Return a `TritonError` with the code and the text that the caller is to see; no path, no traceback."""
    codes = pb_utils.TritonError
    if not isinstance(error, DiffusionError):
        log.error("internal error", exc_info=error)
        return codes(f"internal error ({type(error).__name__}); the server's log has the details", codes.INTERNAL)
    if isinstance(error, InvalidArgumentError):
        return codes(error.message, codes.INVALID_ARG)
    if isinstance(error, RequestCancelledError):
        return codes(error.message, codes.CANCELLED)
    if isinstance(error, UnavailableError | DeadlineExceededError):
        return codes(error.message, codes.UNAVAILABLE)
    return codes(error.message, codes.INTERNAL)
