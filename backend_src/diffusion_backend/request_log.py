"""One line of JSON for each request that has ended, on the standard error stream.

Not through Triton's logger, which would put a prefix before it and quote it: what collects a container's output takes a
line of JSON as it is. Beside Triton's own log, which goes to the same stream, since their order tells what happened.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

MAX_LINE_BYTES = 4096
"""What a pipe takes in one piece (PIPE_BUF of Linux): longer lines of several processes could run into each other."""

MAX_TEXT = 256
"""Characters of a text in the line; an id of a request gets half of them."""

MAX_ITEMS = 16
"""Items of a list in the line; there may be four times as many seeds."""

_SAFE_TEXTS = ("param_scheduler", "param_lora")
"""Parameters with a text that was compared with a list of names; any other text might be a second prompt."""

_STDERR = 2


def write_to_stderr(line: bytes) -> None:
    """Write a line in one piece; that nobody reads it any more is no reason to fail."""
    with contextlib.suppress(OSError):
        os.write(_STDERR, line)


class RequestLog:
    """Writes the lines of one model; called by the threads that deliver the ends of requests.

    Args:
        model: the model's name.
        texts: whether to write what may quote a prompt: prompts, texts of errors, parameters that are texts.
        write: takes one line, with its end, in one call.
    """

    def __init__(self, model: str, *, texts: bool, write: Callable[[bytes], None] = write_to_stderr) -> None:
        self._model = model
        self._texts = texts
        self._write = write

    def write(
        self,
        *,
        request_id: str,
        outcome: str,
        identity: Mapping[str, object],
        seeds: Sequence[int],
        record: Mapping[str, object],
        texts: Mapping[str, object],
    ) -> None:
        """Write the line of one request.

        Args:
            identity: what belongs near the line's beginning: ids of the trace, codes of an error, counts.
            record: `time_*` and `param_*`.
            texts: what may quote a prompt.
        """
        line: dict[str, object] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": "error" if outcome == "failed" else "info",
            "event": "request",
            "model": self._model,
            "request_id": request_id[: MAX_TEXT // 2],
            "outcome": outcome,
            **identity,
            "seeds": list(seeds[: 4 * MAX_ITEMS]),
            **{name: _rounded(value) for name, value in record.items() if name.startswith("time_")},
        }
        params = {name: value for name, value in record.items() if name.startswith("param_") and name != "param_seeds"}
        if self._texts:
            whole = {**line, **_shortened(params), **_shortened(texts)}
        else:
            whole = {**line, **_shortened(tellable(params))}
        data = _encode(whole)
        if len(data) > MAX_LINE_BYTES:
            data = _encode({**line, "cut": True})
        self._write(data)


def tellable(params: Mapping[str, object]) -> dict[str, object]:
    """Return those of `param_*` that quote no prompt: numbers, lists of numbers, and texts of a known set."""
    return {name: value for name, value in params.items() if name in _SAFE_TEXTS or _is_number(value)}


def _encode(line: Mapping[str, object]) -> bytes:
    """Return a line: ASCII, with every control character escaped, so that no text can begin another line."""
    return json.dumps(line, ensure_ascii=True, separators=(",", ":"), default=str).encode("ascii") + b"\n"


def _shortened(values: Mapping[str, object]) -> dict[str, object]:
    return {name: _short(value) for name, value in values.items()}


def _short(value: Any) -> object:
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else f"{value[: MAX_TEXT - 1]}…"
    if isinstance(value, list | tuple):
        return [_short(item) for item in value[:MAX_ITEMS]]
    return value


def _is_number(value: object) -> bool:
    if isinstance(value, list):
        return all(_is_number(item) for item in value)
    return value is None or isinstance(value, bool | int | float)


def _rounded(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value
