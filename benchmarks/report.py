"""Results as a table: on the terminal, and between the markers of README.md.

`python -m benchmarks.report` shows a results file; with `--readme` it also writes it into benchmarks/README.md.
"""

from __future__ import annotations

import json
import operator
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
LATEST = HERE / "results" / "latest.json"
BEGIN = "<!-- results: begin (written by python -m benchmarks.report --readme) -->"
END = "<!-- results: end -->"
BUSY_PERCENT = 10.0
"""With more other load than this before or after a run, its figures are noise."""

_RELATIONS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "<=": ("≤", operator.le),
    ">=": ("≥", operator.ge),
    "<": ("<", operator.lt),
}


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure is to be: `relation` is one of `<=`, `>=`, `<`."""

    relation: str
    bound: float

    def is_met(self, value: float) -> bool:
        """Whether a value is as it is to be."""
        return _RELATIONS[self.relation][1](value, self.bound)

    def __str__(self) -> str:
        return f"{_RELATIONS[self.relation][0]} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table.

    Attributes:
        key: its name in the results file, such as `single.ratio`.
        label: what it is, for people.
        rounds: its value in each round; what counts is their median.
    """

    key: str
    label: str
    rounds: Sequence[float]
    unit: str
    goal: Goal | None = None

    @property
    def value(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        return None if self.goal is None else self.goal.is_met(self.value)

    def as_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        goal = None if self.goal is None else {"relation": self.goal.relation, "bound": self.goal.bound}
        return {
            "key": self.key,
            "label": self.label,
            "value": self.value,
            "rounds": list(self.rounds),
            "unit": self.unit,
            "goal": goal,
            "met": self.is_met,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Figure:
        """Read what `as_dict` gave."""
        goal = None if data["goal"] is None else Goal(data["goal"]["relation"], data["goal"]["bound"])
        return cls(data["key"], data["label"], data["rounds"], data["unit"], goal)


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


def number(value: float) -> str:
    """Return a value with three digits that count, and no more than two after the point (three below 0.1)."""
    if value != 0 and abs(value) < 0.1:
        return f"{value:.3f}"
    for bound, digits in ((10, 2), (100, 1)):
        if abs(value) < bound:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def conditions(results: dict[str, Any]) -> list[str]:
    """Return what is to be known about a run beside its figures, a sentence or two a line."""
    machine, settings, load = results["machine"], results["settings"], results["other_load_percent"]
    packages = machine["packages"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB; {machine['system']}, "
        f"Python {machine['python']}, torch {packages['torch']}, diffusers {packages['diffusers']}, "
        f"nvidia-pytriton {packages['nvidia-pytriton']}.",
        f"Commit {results['commit']}, {results['started_at'][:10]}, `{results['command']}`: "
        f"{settings['rounds']} rounds; OMP_NUM_THREADS={settings['threads']} and "
        f"OMP_WAIT_POLICY={settings['wait_policy']} in all arms.",
        f"Other work kept the processors busy: {load['before']:.0f} % before the run, {load['after']:.0f} % after it.",
    ]
    if results["quick"]:
        lines.append("A quick run, to see that the benchmarks work: its figures say nothing.")
    elif is_noise(results):
        lines.append("The machine was busy with other work: these figures are noise.")
    return lines


def markdown(results: dict[str, Any]) -> str:
    """Return the results as text for README.md."""
    rows = [cells(Figure.from_dict(data), noise=is_noise(results)) for data in results["figures"]]
    table = [
        "| what | median of the rounds | smallest – largest | goal | met |",
        "| --- | ---: | ---: | ---: | --- |",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    return "\n".join([*table, "", *conditions(results)])


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


def write_readme(readme: Path, results: dict[str, Any]) -> None:
    """Replace what is between the markers of a README.

    Raises:
        ValueError: the run was a quick one, or the markers are not there, once each and in order.
    """
    if results["quick"]:
        raise ValueError("these are the results of a quick run, which say nothing; run python -m benchmarks first")
    text = readme.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in tail or END in head + tail:
        raise ValueError(f"{readme.name} must hold each of the two markers once: {BEGIN} {END}")
    readme.write_text(f"{head}{BEGIN}\n{markdown(results)}\n{END}{tail}", encoding="utf-8")


def main(
    results: Annotated[Path, typer.Option(help="A results file.")] = LATEST,
    readme: Annotated[bool, typer.Option("--readme", help="Write the table into benchmarks/README.md, too.")] = False,
) -> None:
    """Show the results of a run."""
    console = make_console()
    try:
        data = json.loads(results.read_text(encoding="utf-8"))
        show(console, data)
        if readme:
            write_readme(README, data)
    except FileNotFoundError:
        sys.exit(f"error: there are no results at {results}; make them with: make bench")
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    typer.run(main)
