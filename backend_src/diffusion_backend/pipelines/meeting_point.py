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

from ..engine.executor import WorkKind
from . import layout
from .equality import largest_difference, tolerance_of
from .layout import LayoutError, Rule
from .oom import RowLimits, is_out_of_memory

log = logging.getLogger(__name__)


class RequestGreenlet(greenlet.greenlet):  # type: ignore[misc]
    """A request's pipeline call, run piece by piece by the thread that made it."""

    def park(self, call: Any) -> Any:
        """Hand a call (or another reason to wait) to whoever resumed this greenlet; return what it is resumed with."""
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

    A shape of call is first *unknown*, then *guessed* when it is first seen, and *learned* or *rejected* by a check.
    The probe does so at load; what it has not seen is tried out when two such calls of equal keys first meet.

    Attributes:
        name: of the pipeline's component.
        kind: FORWARD calls may be merged; DECODE calls run one by one, but in turn with everybody's forwards.
        original: the function as it was.
        layouts: learned: they passed the check.
        guesses: rules for arguments, not checked yet.
        rejected: rules for arguments that failed, each with a short word why.
        disabled: why no calls are merged at all, or None.
        tolerance: of the check; None for that of the output's dtype.
        row_limits: what is known of the rows that fit the device's memory.
    """

    name: str
    kind: WorkKind
    original: Callable[..., Any]
    layouts: list[CallLayout] = field(default_factory=list)
    guesses: list[Rule] = field(default_factory=list)
    rejected: list[tuple[Rule, str]] = field(default_factory=list)
    disabled: str | None = None
    tolerance: float | None = None
    row_limits: RowLimits = field(default_factory=RowLimits)

    @property
    def solo_reason(self) -> str | None:
        """Why no call is merged, as far as is known; None if some are."""
        if self.disabled is not None or self.layouts:
            return self.disabled
        return self.rejected[0][1] if self.rejected else "unknown_call"

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
        return next((known for known in self.layouts if layout.matches(known.arguments, call.arguments)), None)

    def describe(self, call: Call) -> tuple[Hashable, int, str | None]:
        """Return the key by which the call may be merged, its rows, and the reason if it must run by itself."""
        alone = (self.name, id(call))
        if self.disabled is not None:
            return alone, self.rows_of(call), self.disabled
        known = self.find_layout(call)
        rule = known.arguments if known is not None else self._find_guess(call)
        if not isinstance(rule, str):
            try:
                rows = layout.count_rows(rule, call.arguments)
                return (self.name, id(rule), layout.key(rule, call.arguments, rows)), rows, None
            except Exception as error:  # an argument that cannot be hashed, a batch of nothing: this call's affair
                log.debug("%s: a call cannot be merged: %s", self.name, error)
                rule = "argument"
        return alone, self.rows_of(call), rule

    def rows_of(self, call: Call) -> int:
        """Return the rows of a call, by its layout or by a guess from its sizes; 1 where nothing tells."""
        known = self.find_layout(call)
        try:
            rule = known.arguments if known is not None else layout.guess(call.arguments, items=False, depth=2)
            return max(1, layout.count_rows(rule, call.arguments))
        except Exception as error:  # the number is for bounds and metrics: a call that hides it still runs
            log.debug("%s: the rows of a call are not known: %s", self.name, error)
            return 1

    def max_rows(self, call: Call) -> int | None:
        """Return the most rows of a forward with calls like this one, as far as memory has set a limit yet."""
        return self.row_limits.of(self._row_elements(call)) if self.row_limits else None

    def limit_rows(self, calls: Sequence[Call]) -> int:
        """Remember, and return, the rows of these calls as the most for a forward: more of them did not fit."""
        rows = sum(self.rows_of(call) for call in calls)
        elements = self._row_elements(calls[0])
        if elements:  # else they run one by one, and their size is not known
            self.row_limits.note(elements, rows)
        return rows

    def _row_elements(self, call: Call) -> int:
        known = self.find_layout(call)
        rule = known.arguments if known is not None else self._find_guess(call)
        return 0 if isinstance(rule, str) else layout.row_elements(rule, call.arguments, self.rows_of(call))

    def _find_guess(self, call: Call) -> Rule | str:
        """Return a rule for an unknown shape of call, or why it must run by itself."""
        for rule, reason in self.rejected:
            if layout.matches(rule, call.arguments):
                return reason
        for rule in self.guesses:
            if layout.matches(rule, call.arguments):
                return rule
        try:
            rule = layout.guess(call.arguments, items=False, depth=2)
        except LayoutError:
            return "unknown_call"
        self.guesses.append(rule)
        return rule

    def run_one(self, call: Call) -> Any:
        """Run one call as it is."""
        return self.original(*call.args, **call.kwargs)

    def run_joint(self, calls: Sequence[Call]) -> list[Any]:
        """Run calls of equal keys as one; return the output of each.

        Calls of a guessed shape run by themselves this once, and the guess is tried on them.

        Raises:
            LayoutError: the output does not divide into the rows that went in.
            Exception: what the module raised.
        """
        known = self.find_layout(calls[0])
        if known is not None:
            return run_merged(known, self.original, calls)
        outputs = [self.run_one(call) for call in calls]
        guessed = next((rule for rule in self.guesses if layout.matches(rule, calls[0].arguments)), None)
        if guessed is None:  # rejected meanwhile, by other calls of the same shape
            return outputs
        if not layout.can_refute(guessed, [call.arguments for call in calls]):
            return outputs  # calls too much alike prove nothing: the guess waits for others
        self.guesses = [rule for rule in self.guesses if rule is not guessed]
        try:
            candidate = CallLayout(guessed, layout.guess(outputs[0], items=False))
            difference = self.try_out(candidate, calls, outputs)
        except Exception as error:
            if is_out_of_memory(error):
                self.guesses.append(guessed)
                self.limit_rows(calls[: (len(calls) + 1) // 2])  # else each step would try the same again
                return outputs
            log.info("%s: a call of a new shape cannot be merged: %s", self.name, error)
            difference = float("inf")
        self.settle(candidate if difference <= self.limit(outputs[0]) else None, guessed, "self_check")
        return outputs

    def give_up(self, call: Call, reason: str) -> None:
        """Run calls of this shape by themselves from now on, as a merged one went wrong."""
        known = self.find_layout(call)
        if known is not None:
            self.layouts = [other for other in self.layouts if other is not known]
            self.rejected.append((known.arguments, reason))

    def try_out(self, candidate: CallLayout, calls: Sequence[Call], outputs: Sequence[Any]) -> float:
        """Merge calls by a candidate; return the largest difference from what they gave alone.

        Raises:
            Exception: what the merged call raised.
        """
        if layout.is_opaque(outputs[0]):
            raise LayoutError("output", "the output holds something that cannot be split")
        merged = run_merged(candidate, self.original, calls)
        return max(largest_difference(alone, part) for alone, part in zip(outputs, merged, strict=True))

    def limit(self, output: Any) -> float:
        """Return the difference that the check allows for an output like this."""
        return self.tolerance if self.tolerance is not None else tolerance_of(output)

    def settle(self, learned: CallLayout | None, rule: Rule, reason: str) -> None:
        """Keep a layout that passed, or remember that calls of this shape run by themselves."""
        if learned is not None:
            self.layouts.append(learned)
        else:
            log.warning("%s: calls of one shape run one by one (%s)", self.name, reason)
            self.rejected.append((rule, reason))


def run_merged(known: CallLayout, function: Callable[..., Any], calls: Sequence[Call]) -> list[Any]:
    """Merge calls by a layout, run them as one, and return the output of each."""
    values = [call.arguments for call in calls]
    rows = [layout.count_rows(known.arguments, value) for value in values]
    args, kwargs = layout.merge(known.arguments, values, rows)
    output = function(*args, **kwargs)
    if not layout.matches(known.output, output):
        raise LayoutError("output", "the merged call's output has another structure")
    return layout.split(known.output, output, rows)
