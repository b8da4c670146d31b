"""The plots, from a results file and the records beside it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display is needed

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from benchmarks.figures import first_step_ms, from_admission_ms, median_step_ms, per_s
from benchmarks.fleet import BASELINES

OURS = "this project"
TIMELINE_REQUESTS = 20
SAME_FORWARD_S = 0.004
"""Step events that follow each other sooner are of one forward: the server sends them together."""

_SIZE = (7.5, 4.2)
_COLOURS = {
    "served": "tab:blue",
    "bare": "black",
    "limit": "tab:gray",
    "served_solo": "tab:cyan",
    "triton_plain": "tab:green",
    "fastapi_threads": "tab:olive",
    "triton_batched": "tab:orange",
    "pytriton_batch": "tab:red",
    "litserve_batch": "tab:purple",
}
_LABELS = {"served": OURS, "bare": "bare pipeline, one after another"} | BASELINES

Record = Mapping[str, Any]


def draw_plots(results: Mapping[str, Any], records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw every plot that the results have data for; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = results["raw"]
    drawn = []
    if "curves" in raw:
        drawn += [
            _draw(folder / "bench-throughput.png", lambda axes: throughput(axes, raw)),
            _draw(folder / "bench-latency.png", lambda axes: latency(axes, raw["curves"], records)),
            _draw(folder / "bench-first-step.png", lambda axes: first_step(axes, raw["curves"], records)),
        ]
    if "poisson" in raw:
        drawn.append(timeline(folder / "bench-timeline.png", records))
    return drawn


def throughput(axes: Axes, raw: Mapping[str, Any]) -> None:
    """Draw requests a second against requests at once; the medians of the rounds where there are several."""
    points = {name: {int(k): v for k, v in at.items()} for name, at in raw["curves"]["throughput"].items()}
    for name, at in throughput_of_rounds(raw.get("load", [])).items():
        points.setdefault(name, {}).update(at)
    for name, at in points.items():
        xs = sorted(at)
        style = {"color": _COLOURS.get(name), "linewidth": 2.5 if name == "served" else 1.2}
        if name == "bare":
            axes.axhline(at[1], linestyle=":", label=_LABELS[name], **style)
        elif name == "limit":
            axes.plot(xs, [at[x] for x in xs], "x", label="limit set by the denoiser", color=style["color"])
        else:
            axes.plot(xs, [at[x] for x in xs], "o-", label=_LABELS[name], **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks := sorted({x for at in points.values() for x in at}), [str(x) for x in ticks])
    axes.set(xlabel="requests at once (closed loop)", ylabel="requests a second", ylim=(0, None))


def throughput_of_rounds(rounds: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the median throughput in the arm `load` by server and concurrency, the bare pipeline and the limit too."""
    found: dict[str, dict[int, list[float]]] = {}

    def note(name: str, concurrency: str, rate: float) -> None:
        found.setdefault(name, {}).setdefault(int(concurrency), []).append(rate)

    for each in rounds:
        note("bare", "1", per_s(each["bare"]))
        for k, run in each["served"].items():
            note("served", k, per_s(run))
            note("limit", k, len(run["latencies_s"]) / each["limit"][k]["seconds"])
        for name, runs in each["baselines"].items():
            for k, run in runs.items():
                note(name, k, per_s(run))
    return {name: {k: statistics.median(values) for k, values in at.items()} for name, at in found.items()}


def latency(axes: Axes, curves: Mapping[str, Any], records: Sequence[Record]) -> None:
    """Draw percentiles of the latency against the offered load, for our server and for those that batch requests."""
    capacity = curves["capacity_per_s"]
    for name, colour in (("served", _COLOURS["served"]), ("triton_batched", _COLOURS["triton_batched"])):
        at = _by_load(records, name, lambda record: record["end"] - record["arrival"])
        for percent, style in ((50, "o-"), (95, "s--")):
            xs = sorted(at)
            ys = [float(np.percentile(at[x], percent)) for x in xs]
            if xs:
                label = f"{_LABELS[name]}: {percent} %"
                axes.plot([x * capacity for x in xs], ys, style, color=colour, label=label)
    axes.set_yscale("log")
    axes.set(xlabel="offered load, requests a second (Poisson arrivals)", ylabel="latency, seconds")


def first_step(axes: Axes, curves: Mapping[str, Any], records: Sequence[Record]) -> None:
    """Draw the time to the first step against the offered load, from entering the engine and from admission."""
    capacity = curves["capacity_per_s"]
    lines = (
        ("from entering the engine", first_step_ms, "tab:blue"),
        ("from admission", from_admission_ms, "tab:green"),
    )
    for text, measure, colour in lines:
        at = _by_load(records, "served", lambda record, measure=measure: measure(record["times"]))
        xs = sorted(at)
        for percent, style in ((50, "o-"), (95, "s--")):
            ys = [float(np.percentile(at[x], percent)) for x in xs]
            axes.plot([x * capacity for x in xs], ys, style, color=colour, label=f"{text}: {percent} %")
    loads = sorted(_by_load(records, "served", lambda record: record["end"]))
    steps = [
        median_step_ms([r for r in records if r["server"] == "served" and r.get("load") == load]) for load in loads
    ]
    axes.plot([x * capacity for x in loads], steps, "k:", label="a step (median)")
    axes.set(
        xlabel="offered load, requests a second (Poisson arrivals)", ylabel="time to the first step, ms", ylim=(0, None)
    )


def timeline(path: Path, records: Sequence[Record]) -> Path:
    """Draw the first requests of the arm `poisson`, a mark at each step, and how many shared a forward."""
    run = [r for r in records if r["arm"] == "poisson" and r["server"] == "served" and r["round"] == 0]
    run.sort(key=lambda record: record["send"])
    figure, (lanes, shared) = plt.subplots(
        2, 1, figsize=(9, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    colours = plt.get_cmap("tab10")
    for lane, record in enumerate(run[:TIMELINE_REQUESTS]):
        colour = colours(lane % 10)
        lanes.plot([record["send"], record["end"]], [lane, lane], color=colour, linewidth=1, alpha=0.5)
        lanes.plot(record["step_times"], [lane] * len(record["step_times"]), "|", color=colour, markersize=8)
        lanes.plot([record["end"]], [lane], "o", color=colour, markersize=3)
    lanes.set(
        ylabel="request", title="each mark is a step; a request joins at the next forward and leaves when it is done"
    )
    lanes.invert_yaxis()
    lanes.yaxis.set_major_locator(MaxNLocator(integer=True))
    lanes.set_xlim(0, max(record["end"] for record in run[:TIMELINE_REQUESTS]))
    groups = forwards([record["step_times"] for record in run])
    shared.vlines([at for at, _ in groups], 0, [count for _, count in groups], color="tab:blue", linewidth=1)
    shared.set(xlabel="seconds", ylabel="requests in\na forward", ylim=(0, None))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def forwards(step_times: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
    """Return the forwards that step events tell of: when, and of how many requests there was an event."""
    found: list[tuple[float, int]] = []
    last = float("-inf")
    for at in sorted(at for times in step_times for at in times):
        if at - last < SAME_FORWARD_S:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((at, 1))
        last = at
    return found


def _by_load(records: Sequence[Record], server: str, measure: Any) -> dict[float, list[float]]:
    """Return what is measured of each request of a server's open loops, by offered load."""
    found: dict[float, list[float]] = {}
    for record in records:
        if record["server"] == server and "load" in record:
            found.setdefault(record["load"], []).append(measure(record))
    return found


def _draw(path: Path, draw: Any) -> Path:
    figure, axes = plt.subplots(figsize=_SIZE, layout="constrained")
    draw(axes)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
