"""The limit: how long the same work would take if the engine, the server and the network cost nothing.

Of the requests in flight, all rows are in one forward at every step, and a forward of r rows takes what a forward of r
rows takes on this machine. Everything else (text encoding, scheduler steps, decoding) takes what it takes in the bare
pipeline. A request leaves when its steps are done, and the next one starts with the next forward.

Nothing of it overlaps: on a machine whose cores are all used by a forward there is nothing to gain from that. Where a
server does overlap work, it may get past this limit.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """What one request needs.

    Attributes:
        steps: forwards, one after another.
        rows: rows of each of them.
        other_s: seconds for everything but the forwards.
    """

    steps: int
    rows: int
    other_s: float


@dataclass(frozen=True, slots=True)
class Ideal:
    """An ideal schedule.

    Attributes:
        seconds: from the first request's start to the last one's end.
        forwards: joint forwards that were run.
        mean_rows: rows a forward, on average.
    """

    seconds: float
    forwards: int
    mean_rows: float


def simulate(works: Sequence[Work], concurrency: int, forward_s: Callable[[int], float]) -> Ideal:
    """Return the ideal schedule of a closed loop: at most `concurrency` in flight, taken up in the order given.

    Args:
        works: at least one.
        concurrency: at least 1.
        forward_s: seconds of a forward of so many rows.
    """
    assert works
    assert concurrency >= 1
    waiting = list(reversed(works))
    running: list[list[int]] = []  # of each: steps left, rows
    seconds = sum(work.other_s for work in works)
    forwards = total_rows = 0
    while waiting or running:
        while waiting and len(running) < concurrency:
            work = waiting.pop()
            running.append([work.steps, work.rows])
        rows = sum(rows for _, rows in running)
        seconds += forward_s(rows)
        forwards += 1
        total_rows += rows
        for entry in running:
            entry[0] -= 1
        running = [entry for entry in running if entry[0] > 0]
    return Ideal(seconds, forwards, total_rows / forwards)


def interpolate(measured: Mapping[int, float], rows: int) -> float:
    """Return the seconds of a forward of `rows` rows: measured, or on the straight line between two that were.

    Raises:
        ValueError: `rows` is outside what was measured; a guess would be no limit.
    """
    known = sorted(measured)
    if not known or not known[0] <= rows <= known[-1]:
        raise ValueError(f"forwards of {rows} rows were not measured (measured were {known})")
    right = bisect.bisect_left(known, rows)
    high = known[right]
    if high == rows:
        return measured[high]
    low = known[right - 1]
    share = (rows - low) / (high - low)
    return measured[low] + share * (measured[high] - measured[low])


def row_counts(rows: Sequence[int], concurrency: int) -> list[int]:
    """Return the row counts to measure for requests of these rows: dense where small, with both ends."""
    lowest, highest = min(rows), max(rows) * concurrency
    grid = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256)
    step = lowest if len(set(rows)) == 1 else 1
    between = (count for count in grid if lowest < count < highest and count % step == 0)
    return sorted({lowest, highest, *between})
