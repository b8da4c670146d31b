"""One line of the table: what was measured, round by round, and what it is to be."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


def number(value: float) -> str:
    """Return a value with three digits that count, and no more than two after the point (three below 0.1)."""
    if value != 0 and abs(value) < 0.1:
        return f"{value:.3f}"
    for bound, digits in ((10, 2), (100, 1)):
        if abs(value) < bound:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"
