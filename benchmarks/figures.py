"""From what the arms measured, round by round, to the figures of the table; no arm is run here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.engine_overhead import RUNNING, StepCost
from benchmarks.report import Figure, Goal


def single_figures(rounds: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return the figures of the arm `single`."""
    served = [statistics.median(each["served_s"]) for each in rounds]
    bare = [statistics.median(each["bare_s"]) for each in rounds]
    return [
        Figure("single.bare_ms", "one at a time: bare pipeline", [value * 1e3 for value in bare], "ms"),
        Figure("single.served_ms", "one at a time: served", [value * 1e3 for value in served], "ms"),
        Figure(
            "single.ratio",
            "one at a time: served / bare",
            [s / b for s, b in zip(served, bare, strict=True)],
            "×",
            Goal("<=", 1.05),
        ),
    ]


def load_figures(rounds: Sequence[dict[str, Any]], concurrencies: Sequence[int]) -> list[Figure]:
    """Return the figures of the arm `load`."""
    count = len(rounds[0]["bare"]["latencies_s"])
    figures = [
        Figure(
            "load.bare_per_s",
            "bare pipeline, one after another",
            [count / each["bare"]["seconds"] for each in rounds],
            "requests/s",
        ),
        Figure(
            "load.forward_check",
            "check: a forward timed alone / in the bare pipeline",
            [each["forward_check"] for each in rounds],
            "×",
        ),
    ]
    for k in concurrencies:
        served = [each["served"][k] for each in rounds]
        limit = [each["limit"][k]["seconds"] for each in rounds]
        bare = [each["bare"]["seconds"] for each in rounds]
        label = f"{k} at once"
        figures += [
            Figure(f"load.{k}.per_s", f"{label}: served", [count / s["seconds"] for s in served], "requests/s"),
            Figure(
                f"load.{k}.speedup",
                f"{label}: served against bare",
                [b / s["seconds"] for b, s in zip(bare, served, strict=True)],
                "× as fast",
            ),
            Figure(
                f"load.{k}.limit",
                f"{label}: the limit against bare",
                [b / best for b, best in zip(bare, limit, strict=True)],
                "× as fast",
            ),
            Figure(
                f"load.{k}.of_limit",
                f"{label}: served, of the limit",
                [100 * best / s["seconds"] for best, s in zip(limit, served, strict=True)],
                "%",
                Goal(">=", 90),
            ),
            Figure(
                f"load.{k}.rows",
                f"{label}: rows a forward (ideal {rounds[0]['limit'][k]['mean_rows']:.1f})",
                [s["mean_rows"] for s in served],
                "rows",
            ),
            *(
                Figure(
                    f"load.{k}.p{percent}_ms",
                    f"{label}: latency, {percent} % of the requests within",
                    [1e3 * float(np.percentile(s["latencies_s"], percent)) for s in served],
                    "ms",
                )
                for percent in (50, 95)
            ),
        ]
    return figures


def engine_figures(rounds: Sequence[dict[int, StepCost]], waiting: Sequence[int]) -> list[Figure]:
    """Return the figures of the arm `engine`."""
    figures = [
        Figure(
            f"engine.{count}.us",
            f"engine a step, {RUNNING} running, {count:,} waiting",
            [each[count].median_s * 1e6 for each in rounds],
            "µs",
        )
        for count in waiting
    ]
    few, many = min(waiting), max(waiting)
    figures.append(
        Figure(
            "engine.flat",
            f"engine a step: {many:,} waiting / {few:,} waiting",
            [each[many].median_s / each[few].median_s for each in rounds],
            "×",
            Goal("<=", 1.1),
        )
    )
    return figures
