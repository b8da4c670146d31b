"""Results as tables: on the terminal, and between the markers of benchmarks/README.md and of the project's README.

`python -m benchmarks.report` shows a results file; with `--write` it writes the plots and both READMEs, as `make bench`
does after a whole run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.figure import Figure, number
from benchmarks.hops import HOPS
from tools.markers import write_between

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
LATEST = HERE / "results" / "latest.json"
RECORDS = HERE / "results" / "records.jsonl"
PROJECT_README = HERE.parent / "README.md"
IMAGES = HERE.parent / "docs" / "images"
BEGIN = "<!-- results: begin (written by python -m benchmarks.report --write) -->"
END = "<!-- results: end -->"
BUSY_PERCENT = 10.0
"""With more other load than this before or after a run, its figures are noise."""

SUMMARY = (
    "single.ratio",
    "load.bare_per_s",
    "load.8.per_s",
    "load.16.per_s",
    "load.8.vs_best",
    "load.16.vs_best",
    "mixes.alike",
    "load.8.of_limit",
    "load.16.of_limit",
    "poisson.mean_ratio",
    "poisson.p99_ratio",
    "poisson.first_step",
    "memory.peak",
    "engine.flat",
    "engine.callers",
    "idle.percent",
    "fairness.huge.ratio",
)
"""The figures that the project's README shows, in this order."""


def is_noise(results: dict[str, Any]) -> bool:
    """Whether a run's figures say nothing: a quick one, or one on a machine with other work."""
    return bool(results["quick"]) or max(results["other_load_percent"].values()) > BUSY_PERCENT


def cells(figure: Figure, *, noise: bool) -> tuple[str, str, str, str, str]:
    """Return what the table says of a figure: what, median, range, goal, met (which noise never is)."""
    low, high = min(figure.rounds), max(figure.rounds)
    spread = "" if len(figure.rounds) == 1 else f"{number(low)} – {number(high)}"
    met = {None: "", True: "yes", False: "no"}[figure.is_met]
    if noise and met:
        met = "noise"
    goal = "" if figure.goal is None else str(figure.goal)
    return figure.label, f"{number(figure.value)} {figure.unit}", spread, goal, met


def processors(machine: dict[str, Any]) -> str:
    """Return what computes: the processor and its cores, and the GPUs if there are some."""
    return ", ".join([f"{machine['cpu']}, {machine['cores']} cores", *machine.get("gpus", ())])


def conditions(results: dict[str, Any]) -> list[str]:
    """Return what is to be known about a run beside its figures, a sentence or two a line."""
    machine, settings, load = results["machine"], results["settings"], results["other_load_percent"]
    packages = machine["packages"]
    lines = [
        f"{processors(machine)}, {machine['memory_gib']:g} GiB; {machine['system']}, "
        f"Python {machine['python']}, torch {packages['torch']}, diffusers {packages['diffusers']}, "
        f"nvidia-pytriton {packages['nvidia-pytriton']}.",
        f"Commit {results['commit']}, {results['started_at'][:10]}, `{results['command']}`: "
        f"{rounds_done(results)} rounds; OMP_NUM_THREADS={settings['threads']} and "
        f"OMP_WAIT_POLICY={settings['wait_policy']} in all arms.",
        f"Other work kept the processors busy: {load['before']:.0f} % before the run, {load['after']:.0f} % after it.",
    ]
    if results["quick"]:
        lines.append("A quick run, to see that the benchmarks work: its figures say nothing.")
    elif is_noise(results):
        lines.append("The machine was busy with other work: these figures are noise.")
    return lines


def markdown(results: dict[str, Any]) -> str:
    """Return the results as text for benchmarks/README.md."""
    figures = [Figure.from_dict(data) for data in results["figures"]]
    table = [
        "| what | median of the rounds | smallest – largest | goal | met |",
        "| --- | ---: | ---: | ---: | --- |",
        *("| " + " | ".join(cells(figure, noise=is_noise(results))) + " |" for figure in figures),
    ]
    parts = ["\n".join(table)]
    if "hops" in results["raw"]:
        parts += ["### Where the milliseconds of one request go", hops_table(results["raw"]["hops"])]
    parts += [f"![{text}](../docs/images/{name})" for name, text in plots_of(results).items()]
    return "\n\n".join([*parts, "\n".join(conditions(results))])


def hops_table(found: dict[str, Any]) -> str:
    """Return the table of the hops of one request, with what they leave unexplained."""
    total = found["total_ms"]
    rows = [
        (text, found["hops_ms"][name], f"{100 * found['hops_ms'][name] / total:.1f} %" if name != "encode" else "")
        for name, text in HOPS.items()
    ]
    rows += [
        ("remainder: the total minus all of the above but the encoding", found["remainder_ms"], ""),
        ("**total, as the client sees it, pixels**", total, "100 %"),
        ("total with png", found["total_png_ms"], ""),
    ]
    head = ["| hop | ms | of the total |", "| --- | ---: | ---: |"]
    return "\n".join(head + [f"| {text} | {value:.2f} | {share} |" for text, value, share in rows])


def summary(results: dict[str, Any]) -> str:
    """Return the benchmark's part of the project's README: the figures that matter, and a plot."""
    figures = {data["key"]: Figure.from_dict(data) for data in results["figures"]}
    noise = is_noise(results)
    machine = results["machine"]
    lines = ["| | measured | goal |", "| --- | --- | --- |"]
    for key in SUMMARY:
        if key in figures:
            text, value, _, goal, met = cells(figures[key], noise=noise)
            lines.append(f"| {text} | {value} | {goal}{f' ({met})' if met in ('no', 'noise') else ''} |")
    where = (
        f"{processors(machine)}, {results['started_at'][:10]}, commit {results['commit']}; "
        f"medians of {rounds_done(results)} rounds."
    )
    parts = ["\n".join(lines), where]
    parts += [f"![{text}](docs/images/{name})" for name, text in list(plots_of(results).items())[:1]]
    return "\n\n".join(parts)


def rounds_done(results: dict[str, Any]) -> int:
    """Return the rounds that the run had time for."""
    raw = results["raw"]
    return max((len(raw[arm]) for arm in ("single", "load", "poisson") if arm in raw), default=1)


def plots_of(results: dict[str, Any]) -> dict[str, str]:
    """Return the plots that these results have the data for: the file's name, and what it shows."""
    raw = results["raw"]
    found = {}
    if "curves" in raw:
        found["bench-throughput.png"] = "Throughput against requests at once, for this server and the baselines"
        found["bench-latency.png"] = "Latency percentiles against the offered load"
        found["bench-first-step.png"] = "Time to the first step against the offered load"
    if "poisson" in raw:
        found["bench-timeline.png"] = "Requests that join and leave the joint forward, as their step events came"
    return found


def make_console() -> Console:
    """Return a console that is wide enough for the table also where there is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def show(console: Console, results: dict[str, Any]) -> None:
    """Print the results."""
    table = Table()
    for name in ("what", "median", "smallest – largest", "goal", "met"):
        table.add_column(name, justify="left" if name in ("what", "met") else "right")
    for data in results["figures"]:
        row = cells(Figure.from_dict(data), noise=is_noise(results))
        table.add_row(*row, style={"no": "red", "yes": "green"}.get(row[-1], ""))
    console.print(table)
    for line in conditions(results):
        console.print(line, style="dim", highlight=False)


def write_all(results: dict[str, Any], records: Sequence[dict[str, Any]]) -> list[Path]:
    """Write the plots and the tables of both READMEs; return the files.

    Raises:
        ValueError: the run was a quick one, or a README lacks its markers.
    """
    if results["quick"]:
        raise ValueError("these are the results of a quick run, which say nothing; run python -m benchmarks first")
    from benchmarks.plots import draw_plots

    plots = draw_plots(results, records, IMAGES)
    write_between(README, BEGIN, END, markdown(results))
    write_between(PROJECT_README, BEGIN, END, summary(results))
    return [*plots, README, PROJECT_README]


def main(
    results: Annotated[Path, typer.Option(help="A results file.")] = LATEST,
    write: Annotated[
        bool, typer.Option("--write", help="Also write the plots, and the tables of both READMEs.")
    ] = False,
    plots: Annotated[Path | None, typer.Option(help="Draw the plots into this folder, and write nothing else.")] = None,
) -> None:
    """Show the results of a run."""
    console = make_console()
    try:
        data = json.loads(results.read_text(encoding="utf-8"))
        show(console, data)
        beside = results.with_name(RECORDS.name if results.name == LATEST.name else f"{results.stem}.{RECORDS.name}")
        records = [json.loads(line) for line in beside.read_text().splitlines()] if beside.exists() else []
        if plots is not None:
            from benchmarks.plots import draw_plots

            draw_plots(data, records, plots)
        if write:
            write_all(data, records)
    except FileNotFoundError:
        sys.exit(f"error: there are no results at {results}; make them with: make bench")
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    typer.run(main)
