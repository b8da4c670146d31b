"""Learns the layouts of a denoiser's calls from recorded ones, and checks each on others of them.

Comparing a run with its double (two prompts, or two outputs a prompt) gives the layout of each shape of call. Merging
recorded calls of different prompts, seeds and, where the layout allows it, steps, and comparing with what each gave
alone is the self-check. What the doubles do not teach is guessed from two runs of one item each, and checked likewise.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from . import layout
from .arguments import OUTPUTS_PER_PROMPT, defaults_of
from .layout import LayoutError
from .meeting_point import Call, CallLayout, MeetingPoint
from .recording import ProbeRunner, Recorded

log = logging.getLogger(__name__)


def learn_all(runner: ProbeRunner, points: list[MeetingPoint]) -> None:
    """Learn and check the layouts of all shapes of call that the probe can bring about."""
    guidances: list[dict[str, Any]] = [{}]
    if "guidance_scale" in runner.arguments:
        guidances.append({"guidance_scale": 1.0})
        default = runner.params.get("guidance_scale", defaults_of(runner.pipeline).get("guidance_scale"))
        if not isinstance(default, int | float) or default <= 1.0:
            guidances.append({"guidance_scale": 5.0})
    doublings: list[dict[str, Any]] = [{"num_prompts": 2}, {"num_prompts": 2, "num_pictures": 1}]
    if runner.arguments.intersection(OUTPUTS_PER_PROMPT):
        doublings.append({"num_prompts": 1, "num_outputs": 2})
    for guidance in guidances:
        one = try_run(runner, num_prompts=1, seed=1, **guidance)
        if one is None:
            continue
        for doubling in doublings:
            if all(point.find_layout(r.call) for point in points for r in one if r.call.point is point):
                break
            two = try_run(runner, **doubling, seed=2, **guidance)
            if two is not None:
                for point in points:
                    _learn_doubled(point, _of(point, one), _of(point, two))
        else:
            other = try_run(runner, num_prompts=1, seed=2, **guidance)
            for point in points:
                _learn_guessed(point, _of(point, one), _of(point, other or []))
    for point in points:
        if point.layouts:
            log.info("%s: calls are batched (shapes of call: %d)", point.name, len(point.layouts))


def try_run(runner: ProbeRunner, **options: Any) -> list[Recorded] | None:
    """Return the denoiser calls of a run with these options (see `ProbeRunner.run`), or None if it does not run."""
    try:
        return runner.run(**options)[1]
    except Exception as error:
        log.info("a probe with %s did not run: %s", options, error)
        return None


def _of(point: MeetingPoint, calls: list[Recorded]) -> list[Recorded]:
    return [recorded for recorded in calls if recorded.call.point is point]


def _learn_doubled(point: MeetingPoint, ones: list[Recorded], twos: list[Recorded]) -> None:
    """Learn the layouts of one point from a run and its double, as far as they correspond."""
    for a, b in zip(ones, twos, strict=False):
        if point.find_layout(a.call) is not None:
            continue
        for each in (True, False):
            try:
                candidate = CallLayout(
                    layout.learn(a.call.arguments, b.call.arguments, each=each),
                    layout.learn(a.output, b.output, each=each, where="output"),
                )
            except LayoutError as error:
                log.info("%s: %s", point.name, error)
                break
            if _passes(point, candidate, ones, twos):
                point.layouts.append(candidate)
                break


def _learn_guessed(point: MeetingPoint, ones: list[Recorded], others: list[Recorded]) -> None:
    """Learn from two runs of one item each what the doubled runs did not teach; what fails is rejected."""
    for a in ones:
        if point.find_layout(a.call) is not None or any(layout.matches(r, a.call.arguments) for r, _ in point.rejected):
            continue
        candidates = []
        for items in (False, True):
            with contextlib.suppress(LayoutError):
                candidates.append(
                    CallLayout(
                        layout.guess(a.call.arguments, items=items, depth=2), layout.guess(a.output, items=items)
                    )
                )
        passed = next((c for c in candidates if _passes(point, c, ones, others)), None)
        if passed is not None:
            point.settle(passed, passed.arguments, "")
        elif candidates:
            point.settle(None, candidates[0].arguments, "self_check")


def _passes(point: MeetingPoint, candidate: CallLayout, ones: list[Recorded], twos: list[Recorded]) -> bool:
    """Whether calls of two runs, merged, give what they gave alone.

    Each call of the first run is merged with a mergeable one of the second run, of another step if there is one.
    """
    if not (layout.has_rows(candidate.arguments) and layout.has_rows(candidate.output)):
        return False
    checked = 0
    worst = 0.0
    for i, a in enumerate(ones):
        if not layout.matches(candidate.arguments, a.call.arguments):
            continue
        partners = twos[:i] + twos[i + 1 :] + twos[i : i + 1]
        partner = next((b for b in partners if _mergeable(candidate, a.call, b.call)), None)
        if partner is None:
            continue
        try:
            pair = (partner, a)
            worst = max(worst, point.try_out(candidate, [r.call for r in pair], [r.output for r in pair]))
        except Exception as error:
            log.warning("%s: a merged call failed: %s: %s", point.name, type(error).__name__, error)
            return False
        checked += 1
    if not checked:
        return False
    limit = point.limit(ones[0].output)
    log.info("%s: merged calls differ from alone by at most %.1e (allowed %.0e)", point.name, worst, limit)
    return worst <= limit


def _mergeable(candidate: CallLayout, a: Call, b: Call) -> bool:
    rule = candidate.arguments
    if not layout.matches(rule, b.arguments):
        return False
    keys = [layout.key(rule, c.arguments, layout.count_rows(rule, c.arguments)) for c in (a, b)]
    return keys[0] == keys[1]
