"""Documents whose figures a script writes: each stands between two markers, so that none is typed by hand."""

from __future__ import annotations

from pathlib import Path


def write_between(path: Path, begin: str, end: str, text: str) -> None:
    """Replace what is between two markers of a file.

    Raises:
        ValueError: the markers are not there, once each and in order.
    """
    old = path.read_text(encoding="utf-8")
    head, found_begin, rest = old.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found_begin or not found_end or begin in tail or end in head + tail:
        raise ValueError(
            f"{path.name} has no part between {begin!r} and {end!r}; it must hold each of the two markers once"
        )
    path.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")
