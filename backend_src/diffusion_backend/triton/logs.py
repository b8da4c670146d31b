"""Log records of this package into Triton's log."""

from __future__ import annotations

import logging
import warnings
from typing import Any


class _TritonHandler(logging.Handler):
    """Passes records to Triton's logger, which puts them into the server's log."""

    def __init__(self, logger: Any) -> None:
        super().__init__()
        self._logger = logger
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        text = self.format(record)
        if record.levelno >= logging.ERROR:
            self._logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            self._logger.log_warn(text)
        else:
            self._logger.log_info(text)


def configure_logging(logger: Any) -> None:
    """Send this package's log to Triton's, and keep libraries' notices about themselves out of it.

    Args:
        logger: `pb_utils.Logger`.
    """
    ours = logging.getLogger("diffusion_backend")
    ours.handlers = [_TritonHandler(logger)]
    ours.setLevel(logging.INFO)
    ours.propagate = False
    warnings.filterwarnings("ignore", category=FutureWarning)
    for name in ("diffusers", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
