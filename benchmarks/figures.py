"""From what the arms measured to the figures of the table; no arm is run here.

A ratio is taken within a round, so that a machine that was slower in one of them does not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.engine_overhead import RUNNING, StepCost
from benchmarks.figure import Figure, Goal
from benchmarks.fleet import BASELINES
from benchmarks.once import MEMORY_RUNNING

Round = Mapping[str, Any]

MIXES = {"alike": "one guidance scale for all", "sizes": "sizes mixed as well"}
"""Of the arm `mixes`, and what the table calls them."""


def single_figures(rounds: Sequence[Round]) -> list[Figure]:
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


def load_figures(rounds: Sequence[Round], concurrencies: Sequence[int]) -> list[Figure]:
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
        figures += _load_at(rounds, k, count)
    return figures


def _load_at(rounds: Sequence[Round], k: int, count: int) -> list[Figure]:
    label = f"{k} at once"
    served = [each["served"][k] for each in rounds]
    limit = [each["limit"][k]["seconds"] for each in rounds]
    bare = [each["bare"]["seconds"] for each in rounds]
    figures = [
        Figure(f"load.{k}.per_s", f"{label}: served", [count / s["seconds"] for s in served], "requests/s"),
        *_baselines_at(rounds, k, label),
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
    ]
    return figures + [
        Figure(
            f"load.{k}.p{percent}_ms",
            f"{label}: latency, {percent} % of the requests within",
            [1e3 * float(np.percentile(s["latencies_s"], percent)) for s in served],
            "ms",
        )
        for percent in (50, 95)
    ]


def _baselines_at(rounds: Sequence[Round], k: int, label: str) -> list[Figure]:
    """Return each baseline's throughput, and ours against the best of each round, the bare pipeline included."""
    figures = []
    for name, what in BASELINES.items():
        rates = [per_s(each["baselines"][name][k]) for each in rounds if k in each["baselines"].get(name, {})]
        if rates:
            figures.append(Figure(f"load.{k}.{name}.per_s", f"{label}: {what}", rates, "requests/s"))
    if figures:
        best = [
            max(per_s(each["bare"]), *(per_s(at[k]) for at in each["baselines"].values() if k in at)) for each in rounds
        ]
        ratios = [per_s(each["served"][k]) / b for b, each in zip(best, rounds, strict=True)]
        label = f"{label}: served against the best baseline"
        figures.append(Figure(f"load.{k}.vs_best", label, ratios, "× as fast", Goal(">=", 2)))
    return figures


def per_s(run: Mapping[str, Any]) -> float:
    """Return the throughput of a closed loop, in requests a second."""
    return len(run["latencies_s"]) / run["seconds"]


def poisson_figures(rounds: Sequence[Round], load: float) -> list[Figure]:
    """Return the figures of the arm `poisson`."""
    label = f"Poisson, {load:.0%} of our capacity"
    figures = [Figure("poisson.rate", f"{label}: arrivals", [each["rate_per_s"] for each in rounds], "requests/s")]
    with_rival = [each for each in rounds if "rival" in each]
    measures: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
        "mean": ("mean latency", statistics.fmean),
        "p99": ("latency, 99 % of the requests within", lambda values: float(np.percentile(values, 99))),
    }
    for key, (what, measure) in measures.items():
        ours = [measure(each["served"]["latencies_s"]) for each in rounds]
        figures.append(Figure(f"poisson.served.{key}_s", f"{label}: {what}, served", ours, "s"))
        if with_rival:
            theirs = [measure(each["rival"]["latencies_s"]) for each in with_rival]
            ratios = [
                measure(each["served"]["latencies_s"]) / rival for each, rival in zip(with_rival, theirs, strict=True)
            ]
            figures += [
                Figure(f"poisson.rival.{key}_s", f"{label}: {what}, best request-level batching", theirs, "s"),
                Figure(f"poisson.{key}_ratio", f"{label}: {what}, ratio", ratios, "×", Goal("<=", 0.5)),
            ]
    return figures + first_step_figures([each["requests"] for each in rounds], label)


def first_step_figures(rounds: Sequence[Sequence[Mapping[str, Any]]], label: str) -> list[Figure]:
    """Return the figures of the time to the first step.

    The unit is a step: what one took a request, on average over its steps; the median over the requests of the round.

    Args:
        rounds: of each, the records of the requests.
    """
    step_ms = [median_step_ms(requests) for requests in rounds]
    admitted = [_percentile(requests, 95, from_admission_ms) for requests in rounds]
    entered = [_percentile(requests, 95, first_step_ms) for requests in rounds]
    return [
        Figure("poisson.step_ms", f"{label}: a step", step_ms, "ms"),
        Figure(
            "poisson.first_step",
            f"{label}: time to the first step, from admission, 95 % within",
            [value / step for value, step in zip(admitted, step_ms, strict=True)],
            "steps",
            Goal("<=", 1.5),
        ),
        Figure(
            "poisson.first_step_entered",
            f"{label}: time to the first step, from entering the engine, 95 % within",
            [value / step for value, step in zip(entered, step_ms, strict=True)],
            "steps",
        ),
    ]


def median_step_ms(requests: Sequence[Mapping[str, Any]]) -> float:
    """Return the median over the requests of what a step took each of them, on average over its steps."""
    return statistics.median(each["times"]["time_execute_ms"] / each["steps"] for each in requests)


def first_step_ms(times: Mapping[str, float]) -> float:
    """Return the time from a request's entering the engine to the end of its first step."""
    return times["time_to_first_step_ms"]


def from_admission_ms(times: Mapping[str, float]) -> float:
    """Return the time from a request's admission by the engine to the end of its first step."""
    return times["time_to_first_step_ms"] - times["time_queue_ms"]


def _percentile(
    requests: Sequence[Mapping[str, Any]], percent: float, measure: Callable[[Mapping[str, float]], float]
) -> float:
    return float(np.percentile([measure(each["times"]) for each in requests], percent))


def once_figures(raw: Mapping[str, Any]) -> list[Figure]:
    """Return the figures of the arms that run once on the servers: of those that are in `raw`."""
    figures = []
    for mix, what in MIXES.items():
        seconds = dict(raw.get("mixes", {}).get(mix, {}))
        if len(seconds) > 1:
            served = seconds.pop("served")
            label = f"{what}: served against request-level batching"
            figures.append(Figure(f"mixes.{mix}", label, [min(seconds.values()) / served], "× as fast"))
    if "cancelling" in raw:
        found = raw["cancelling"]
        extra = (found["steps_done"] - found["steps_wanted"]) / found["cancelled"]
        figures.append(Figure("cancelling.steps", "cancelled requests: steps done for nobody", [extra], "steps each"))
    if "memory" in raw:
        figures += memory_figures(raw["memory"])
    if "pictures" in raw:
        label = "largest difference of a picture from the bare pipeline's, any server"
        figures.append(Figure("pictures.difference", label, [max(raw["pictures"].values())], "of 255"))
    if "idle" in raw:
        total = sum(raw["idle"]["percent_of_core"].values())
        figures.append(Figure("idle.percent", "idle server and models", [total], "% of a core", Goal("<", 0.5)))
        label = "all baselines together, asleep between their turns"
        figures.append(Figure("idle.baselines", label, [raw["idle"]["baselines_percent"]], "% of a core"))
    return figures


def memory_figures(found: Mapping[str, Any]) -> list[Figure]:
    """Return the figures of the arm `memory`."""
    figures = []
    for kind, what, goal in (("peak", "host memory", Goal("<=", 1.15)), ("device", "device memory", Goal("<=", 1.15))):
        used = found[f"{kind}_mib"]
        if used["bare"] and used["served"]:
            label = f"{what}: {MEMORY_RUNNING} running served / one in the bare pipeline"
            figures.append(Figure(f"memory.{kind}", label, [used["served"] / used["bare"]], "×", goal))
    figures.append(
        Figure("memory.bare_mib", "peak memory: the bare pipeline's process", [found["peak_mib"]["bare"]], "MiB")
    )
    figures.append(
        Figure("memory.served_mib", "peak memory: our model's process", [found["peak_mib"]["served"]], "MiB")
    )
    figures.append(Figure("memory.server_mib", "peak memory: tritonserver and the twin", [found["server_mib"]], "MiB"))
    return figures


def engine_figures(rounds: Sequence[Mapping[int, StepCost]], waiting: Sequence[int]) -> list[Figure]:
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


def callers_figure(callers: int, percent: float) -> Figure:
    """Return the figure of the waiting callers."""
    label = f"{callers} callers waiting for the engine: processor time"
    return Figure("engine.callers", label, [percent], "% of a core", Goal("<", 0.5))
