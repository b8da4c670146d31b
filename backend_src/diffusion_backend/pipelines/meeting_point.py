"""Where requests meet: the `forward` of a module that all of them share.

Inside a request's greenlet, calling the module parks the greenlet and hands the arguments to the executor, which runs
the calls of several requests as one and hands each its part of the output. Anywhere else the module works as ever.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import greenlet
import torch

from ..engine.executor import WorkKind
from . import layout
from .layout import LayoutError, Rule

log = logging.getLogger(__name__)


class RequestGreenlet(greenlet.greenlet):  # type: ignore[misc]
    """A request's pipeline call, run piece by piece by the thread that made it."""

    def park(self, call: Call) -> Any:
        """Hand a call to whoever resumed this greenlet, and return what it is resumed with."""
        assert self.parent is not None
        return self.parent.switch(call)


@dataclass(slots=True)
class Call:
    """A parked call of a meeting point."""

    point: MeetingPoint
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as one value, as the layout sees them."""
        return (self.args, self.kwargs)


@dataclass(frozen=True, slots=True)
class CallLayout:
    """How one shape of call is merged and split."""

    arguments: Rule
    output: Rule


@dataclass(slots=True)
class MeetingPoint:
    """One shared function: a denoiser's `forward`, or a decoder's `decode`.

    Attributes:
        name: of the pipeline's component.
        kind: FORWARD calls may be merged; DECODE calls run one by one, but in turn with everybody's forwards.
        original: the function as it was.
        layouts: of the shapes of call that passed the self-check.
        solo_reason: why no calls are merged at all, or None.
    """

    name: str
    kind: WorkKind
    original: Callable[..., Any]
    layouts: list[CallLayout] = field(default_factory=list)
    solo_reason: str | None = None

    def install(self, owner: Any, attribute: str) -> None:
        """Put the meeting point in the place of `owner.attribute`, with the same signature."""

        @functools.wraps(self.original)
        def meet(*args: Any, **kwargs: Any) -> Any:
            current = greenlet.getcurrent()
            if isinstance(current, RequestGreenlet):
                return current.park(Call(self, args, kwargs))
            return self.original(*args, **kwargs)

        meet.__signature__ = inspect.signature(self.original)  # type: ignore[attr-defined]
        setattr(owner, attribute, meet)

    def find_layout(self, call: Call) -> CallLayout | None:
        """Return the layout for this shape of call, or None if it was not learned."""
        for known in self.layouts:
            if layout.matches(known.arguments, call.arguments):
                return known
        return None

    def describe(self, call: Call) -> tuple[Hashable, int, str | None]:
        """Return the key by which the call may be merged, its rows, and the reason if it must run by itself."""
        known = self.find_layout(call)
        if known is None:
            return (self.name, id(call)), 1, self.solo_reason or "unknown_call"
        try:
            rows = layout.count_rows(known.arguments, call.arguments)
            return (self.name, id(known), layout.key(known.arguments, call.arguments, rows)), rows, None
        except (TypeError, ZeroDivisionError) as error:  # an argument that cannot be hashed; a batch of nothing
            log.debug("%s: call cannot be merged: %s", self.name, error)
            return (self.name, id(call)), 1, "argument"

    def run_one(self, call: Call) -> Any:
        """Run one call as it is."""
        return self.original(*call.args, **call.kwargs)

    def run_joint(self, calls: Sequence[Call]) -> list[Any]:
        """Run calls of equal keys as one; return the output of each.

        Raises:
            LayoutError: the output does not divide into the rows that went in.
            Exception: what the module raised.
        """
        known = self.find_layout(calls[0])
        assert known is not None
        return run_merged(known, self.original, calls)


def run_merged(known: CallLayout, function: Callable[..., Any], calls: Sequence[Call]) -> list[Any]:
    """Merge calls by a layout, run them as one, and return the output of each."""
    values = [call.arguments for call in calls]
    rows = [layout.count_rows(known.arguments, value) for value in values]
    args, kwargs = layout.merge(known.arguments, values, rows)
    output = function(*args, **kwargs)
    if not layout.matches(known.output, output):
        raise LayoutError("output", "the merged call's output has another structure")
    return layout.split(known.output, output, rows)


def largest_difference(one: Any, two: Any) -> float:
    """Return the largest difference of two outputs relative to the larger of 1 and their largest value.

    Infinite if the structures differ; places where both are NaN count as equal.
    """
    worst = 0.0
    pairs = list(zip(layout.tensors(one), layout.tensors(two), strict=False))
    if len(pairs) != len(list(layout.tensors(one))) or len(pairs) != len(list(layout.tensors(two))):
        return float("inf")
    for a, b in pairs:
        if a.shape != b.shape:
            return float("inf")
        if a.numel() == 0:
            continue
        a, b = a.detach().to(torch.float64), b.detach().to(torch.float64)
        both_nan = torch.isnan(a) & torch.isnan(b)
        difference = torch.where(both_nan, 0.0, (a - b).abs())
        scale = max(1.0, float(torch.where(both_nan, 0.0, a.abs()).max()))
        largest = float(difference.max()) / scale
        worst = max(worst, largest) if largest == largest else float("inf")
    return worst
