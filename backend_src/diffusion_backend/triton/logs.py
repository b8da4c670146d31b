"""Log records of this package into Triton's log."""

from __future__ import annotations

import copy
import logging
import os
import traceback
import warnings
from types import TracebackType
from typing import Any


class _TritonHandler(logging.Handler):
    """Passes records to Triton's logger, which puts them into the server's log."""

    def __init__(self, logger: Any, formatter: logging.Formatter) -> None:
        super().__init__()
        self._logger = logger
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        # Triton's logger raises at half a surrogate pair, which JSON can bring in and an error can quote.
        text = self.format(record).encode(errors="backslashreplace").decode()
        if record.levelno >= logging.ERROR:
            self._logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            self._logger.log_warn(text)
        else:
            self._logger.log_info(text)


class _Formatter(logging.Formatter):
    """Writes errors with or without their texts, which quote what a pipeline refuses: a prompt, say.

    Without, an error is told by its type and the places in the traceback. PyTorch's own errors keep their texts: they
    are about devices and tensors.
    """

    def __init__(self) -> None:
        super().__init__("%(name)s: %(message)s")
        self.error_texts = True

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        args = record.args
        if not self.error_texts and isinstance(args, tuple):
            record = copy.copy(record)
            record.args = tuple(_named(arg) if isinstance(arg, BaseException) else arg for arg in args)
        return super().format(record)

    def formatException(  # noqa: N802 - the name is the base class's
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        """See `logging.Formatter.formatException`."""
        if self.error_texts or ei[1] is None:
            return super().formatException(ei)
        parts: list[str] = []
        error: BaseException | None = ei[1]
        while error is not None and len(parts) < 8:  # the causes of causes may be a circle
            parts.append("".join(traceback.format_tb(error.__traceback__)) + _named(error))
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return "\nwhich was caused by\n".join(parts)


def _named(error: BaseException) -> str:
    kind = type(error)
    if kind.__module__.partition(".")[0] == "torch":
        return f"{kind.__name__}: {error}"
    reason = getattr(error, "reason", "")
    why = f" ({reason})" if reason else ""
    return f"{kind.__name__}{why}: its text is left out, since it may quote a prompt (log_prompts shows it)"


_formatter = _Formatter()


def configure_logging(logger: Any) -> None:
    """Send this package's log to Triton's, and keep libraries' notices about themselves out of it.

    Args:
        logger: `pb_utils.Logger`.
    """
    for name, level, formatter in (
        ("diffusion_backend", logging.INFO, _formatter),
        ("opentelemetry", logging.WARNING, logging.Formatter("%(name)s: %(message)s")),  # knows of no prompt
    ):
        passed_on = logging.getLogger(name)
        passed_on.handlers = [_TritonHandler(logger, formatter)]
        passed_on.setLevel(level)
        passed_on.propagate = False
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its import has notices, and sets its level from this
    quiet_libraries()


def quiet_libraries() -> None:
    """Keep the libraries' notices out of the log; some quote a prompt, such as the part that a text encoder cuts off.

    To be called again once they are imported, as that sets their levels anew.
    """
    for name in ("diffusers", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def leave_out_error_texts() -> None:
    """Write errors without their texts from now on; called when a model is loaded, and requests come."""
    _formatter.error_texts = False
