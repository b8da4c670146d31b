"""A picture of the dashboard's panels: the same queries, plotted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .panels import ROWS, Panel
from .prometheus import Series

Ask = Callable[[str], list[Series]]
"""Runs a query of the dashboard over the time that is shown."""

SHOWN = (
    "Requests by outcome",
    "Running and waiting",
    "Errors by reason",
    "Duration",
    "Time to the first step",
    "Where the time goes",
    "Steps a second",
    "Requests and rows in a forward",
    "Forwards by rows",
)
"""Titles of the panels in the picture, three a line."""

_ACROSS = 3
_UNITS = {"reqps": "requests/s", "ops": "per second", "s": "seconds", "short": "count"}
# Okabe and Ito's colours, which people with any colour vision can tell apart: https://jfly.uni-koeln.de/color/
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
_OUTCOMES = {"completed": "#0072B2", "cancelled": "#999999", "rejected": "#E69F00", "failed": "#D55E00"}
"""Colours of the outcomes, in the order in which they are stacked."""

_LEGEND_LINE = 0.11
"""Height of a line of a legend, as a share of a panel's."""

_STYLE = {
    "font.size": 11,
    "axes.titlesize": 13,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "axes.prop_cycle": mpl.cycler(color=_COLORS),
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.handlelength": 1.2,
    "legend.borderaxespad": 0.2,
}


def draw(ask: Ask, start: float, end: float, path: Path, caption: str) -> None:
    """Plot the panels of `SHOWN` from `start` to `end` (seconds since the epoch) and write a PNG.

    Raises:
        ValueError: a query returns nothing.
    """
    panels = {panel.title: panel for row in ROWS for panel in row.panels}
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(13, 9.4), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.1)
        axes = figure.subplots(math.ceil(len(SHOWN) / _ACROSS), _ACROSS, sharex=True)
        for axis, title in zip(axes.flat, SHOWN, strict=True):
            _plot(axis, panels[title], ask, start)
            axis.set_xlim(0, (end - start) / 60)
        for axis in axes[-1]:
            axis.set_xlabel("minutes")
        figure.supxlabel(caption, fontsize=11, color="#555555")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, metadata={"Software": ""})


def _plot(axis: Axes, panel: Panel, ask: Ask, start: float) -> None:
    axis.set_title(panel.title)
    axis.set_ylabel("rows" if panel.kind == "heatmap" else _UNITS[panel.unit])
    lines = [(_legend(query.legend, found), found) for query in panel.queries for found in ask(query.expr)]
    if not lines:
        raise ValueError(f"no data for {panel.title!r}")
    if panel.kind == "heatmap":
        _plot_rows(axis, [found for _, found in lines], start)
        return
    times = np.unique(np.concatenate([found.times for _, found in lines]))
    values = {label: np.nan_to_num(_at(found, times)) for label, found in lines}
    # What never came up would only fill the legend.
    values = {label: points for label, points in values.items() if points.any()} or values
    minutes = (times - start) / 60
    if panel.stack:
        if set(values) <= set(_OUTCOMES):
            values = {label: values[label] for label in _OUTCOMES if label in values}
        colors = [_OUTCOMES.get(label, color) for label, color in zip(values, _COLORS, strict=False)]
        axis.stackplot(minutes, list(values.values()), labels=list(values), colors=colors, alpha=0.85, linewidth=0)
    else:
        for label, points in values.items():
            axis.plot(minutes, np.where(points > 0, points, np.nan) if panel.unit == "s" else points, label=label)
    columns = 3 if max(map(len, values)) < 8 else 2
    axis.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=panel.unit == "short"))
    legend_lines = math.ceil(len(values) / columns) if len(values) > 1 else 0
    axis.set_ylim(0, axis.dataLim.ymax / (0.95 - _LEGEND_LINE * legend_lines))
    if legend_lines:
        axis.legend(loc="upper left", ncols=columns, columnspacing=1.0)


def _legend(template: str, found: Series) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: found.labels.get(match[1], ""), template)


def _at(found: Series, times: np.ndarray) -> np.ndarray:
    """Return the values at `times`, not a number where there is none."""
    known = dict(zip(found.times, found.values, strict=True))
    return np.array([known.get(time, math.nan) for time in times])


def _plot_rows(axis: Axes, found: list[Series], start: float) -> None:
    """Show how many forwards had how many rows, from cumulative buckets."""
    buckets = sorted(found, key=lambda series: float(series.labels["le"]))
    times = np.array(buckets[-1].times)
    counts = np.diff(np.nan_to_num([_at(series, times) for series in buckets]), axis=0, prepend=0)
    used = max(index for index, row in enumerate(counts) if row.any()) + 1
    uppers = [series.labels["le"] for series in buckets[:used]]
    lowers = ["1", *(str(int(float(upper)) + 1) for upper in uppers[:-1])]
    names = [upper if lower == upper else f"{lower}–{upper}" for lower, upper in zip(lowers, uppers, strict=True)]
    shown = np.ma.masked_less_equal(counts[:used], 0)
    mesh = axis.pcolormesh((times - start) / 60, np.arange(used), shown, cmap="Blues", shading="nearest", vmin=0)
    axis.set_yticks(np.arange(used), names)
    axis.set_ylim(-0.5, (used - 0.5) / (1 - 2 * _LEGEND_LINE))
    axis.grid(False)
    scale = axis.inset_axes((0.04, 0.9, 0.4, 0.04))
    axis.figure.colorbar(mesh, cax=scale, orientation="horizontal")
    scale.tick_params(labelsize=9, length=2)
    axis.text(0.47, 0.92, "forwards/s", transform=axis.transAxes, va="center", fontsize=10)
