"""Read the server's log: which lines a person wants to see, and how far the loading has got."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_PREFIX = re.compile(r"^(?P<level>[IWEF])\d{4} [\d:.]+ +\d+ (?P<source>[^ :\]]+):\d+\] ?(?P<text>.*)$")
_LOADING = re.compile(r"^loading: (?P<model>.+):\d+$")
_LOADED = re.compile(r"^successfully loaded '(?P<model>.+)'$")
_FAILED = re.compile(r"^failed to load '(?P<model>.+)'$")
_FAILED_WHY = re.compile(r"^failed to load '.+' version \d+: ")
_UNLOADED = re.compile(r"^successfully unloaded '(?P<model>.+)' version \d+$")
_ALL_UNLOADED = re.compile(r"Found 0 live models")
_REFUSED = re.compile(r"^Poll failed for model directory '(?P<model>.+?)': (?P<reason>.+)$")

_NOISE = (
    # Said on every machine without a GPU.
    "Unable to allocate pinned system memory",
    "CudaDriverHelper has not been initialized",
    "DCGM unable to start",
    "Error: Failed to initialize NVML",
    # Said again, and better, by the line that begins with "failed to load".
    "ERROR: Failed to create instance",
    "Internal: failed to load all models",
    # The launcher says itself that the server stops.
    "Signal (15) received",
)
"""Warnings and errors of the server that say nothing to the one who runs it."""


@dataclass(frozen=True)
class LogLine:
    """One line that the server, a stub or a model wrote.

    Attributes:
        raw: the line as it came.
        level: "I", "W", "E" or "F" for lines in the server's own form, "" for what was simply printed.
        source: the file that wrote it (``model.py``, ``server.cc``), "" for what was simply printed.
        text: the message, unquoted.
    """

    raw: str
    level: str = ""
    source: str = ""
    text: str = ""

    @property
    def is_error(self) -> bool:
        """Whether the server calls this an error."""
        return self.level in ("E", "F")

    @property
    def is_load_failure(self) -> bool:
        """Whether this line gives the reason why a model did not load."""
        return self.is_error and _FAILED_WHY.match(self.text) is not None

    @property
    def is_readable(self) -> bool:
        """Whether to show the line by default: warnings, errors, and what the models themselves say."""
        if any(noise in self.raw for noise in _NOISE):
            return False
        if self.level:
            return self.level != "I" or self.source.endswith(".py")
        return bool(self.raw.strip()) and not self.raw.startswith(("+-", "| "))  # the server's tables


def parse_line(raw: str) -> LogLine:
    """Take a line of the server's log apart."""
    raw = raw.rstrip("\n")
    match = _PREFIX.match(raw)
    if match is None:
        return LogLine(raw, text=raw)
    return LogLine(raw, match["level"], match["source"], _unquoted(match["text"]))


@dataclass
class LoadProgress:
    """Which models the server is loading, as told by its log; fed by the thread that reads the log.

    Attributes:
        loading: models whose loading has begun and not ended, in that order.
        loaded: models that are loaded.
        refused: models whose configuration the server refused before it tried to load them, with the reason.
        unloaded: whether the server has said, while stopping, that no model is left.
    """

    loading: list[str] = field(default_factory=list)
    loaded: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    unloaded: bool = False

    def feed(self, line: LogLine) -> None:
        """Take note of one line."""
        if match := _LOADING.match(line.text):
            if match["model"] not in self.loading:
                self.loading.append(match["model"])
        elif match := (_LOADED.match(line.text) or _FAILED.match(line.text)):
            if match["model"] in self.loading:
                self.loading.remove(match["model"])
            if match.re is _LOADED:
                self.loaded.add(match["model"])
        elif match := _UNLOADED.match(line.text):
            self.loaded.discard(match["model"])
        elif match := _REFUSED.match(line.text):
            self.refused[match["model"]] = match["reason"]
        elif _ALL_UNLOADED.search(line.text):
            self.unloaded = True


LineCallback = Callable[[LogLine], None]
"""Called with every line by the thread that reads the server's log."""


def first_line(reason: str) -> str:
    """Return the first line of a reason as the server gives it, without the kind of status in front of it.

    The server appends the traceback of a Python model to the message; who wants it runs with ``--verbose``.
    """
    head = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
    return re.sub(r"^(Internal|Invalid argument|Unavailable|Not found|Unsupported|Unknown|Already exists): ", "", head)


def printable(text: str) -> str:
    """Return a text of the log so that nothing in it can pass for another line, or steer the terminal.

    Requests bring in what they like (their id, say): the lines after the first are indented, and what is not printable
    is shown as its escape.
    """
    lines = ("".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in line) for line in text.split("\n"))
    return "\n    ".join(lines)


def explain_end(lines: Sequence[LogLine]) -> list[str]:
    """Return the few lines of a log that tell best why the server ended."""
    usage = next((n for n, line in enumerate(lines) if line.raw.startswith("Usage: tritonserver")), None)
    if usage is not None:  # it did not like an argument, which it says before or after four hundred lines of help
        said = lines[:usage] or [line for line in lines[-5:] if line.raw.strip()][-2:]
    else:
        said = [line for line in lines if line.is_error and line.is_readable][-5:] or lines[-10:]
    return [line.text for line in said]


def _unquoted(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] == '"':
        text = text[1:-1].replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")
    return text
