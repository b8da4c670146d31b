"""Runs the arms in turns, round by round.

Machines differ and are noisy, so a figure is a ratio of two arms of the same round; what is reported is the median of
the rounds, and their smallest and largest. In every round the arms come in another order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks import engine_overhead, once, rounds
from benchmarks.bare import BarePipeline
from benchmarks.bench import Bench
from benchmarks.fairness import fairness_figures, measure_fairness
from benchmarks.figure import Figure
from benchmarks.figures import (
    callers_figure,
    engine_figures,
    load_figures,
    once_figures,
    poisson_figures,
    single_figures,
)
from benchmarks.fleet import Fleet
from benchmarks.hops import measure_hops
from benchmarks.machine import thread_environment
from benchmarks.plan import Clock, Settings

_END_S = 10.0
"""To end the servers, draw the plots and write the files."""


@dataclass(slots=True)
class Outcome:
    """What a run gave.

    Attributes:
        figures: for people.
        raw: what was measured, arm by arm and round by round, as a JSON object.
        records: of every request that was sent to a server.
    """

    figures: list[Figure] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)


def run(settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Run the arms of the settings; takes minutes. Raises what goes wrong in an arm.

    Args:
        say: called with what is being done, before each piece of work.
    """
    outcome = Outcome()
    # What comes after the rounds needs its time, too.
    budget_s = max(1.0, settings.budget_s - settings.idle_s - _END_S) if settings.budget_s else 0.0
    clock = Clock(say, budget_s, settings.rounds)
    env = os.environ | thread_environment(settings.threads, settings.wait_policy) | {"HF_HUB_OFFLINE": "1"}
    if "engine" in settings.arms:
        _engine(settings, clock, outcome)
    if "fairness" in settings.arms:
        clock.say("sizes mixed, in the fair order and in the order of arrival")
        found = measure_fairness(settings.model, env, rounds=settings.fairness_rounds, quick=settings.fairness_quick)
        outcome.raw["fairness"] = found
        outcome.figures += fairness_figures(found)
    if "hops" in settings.arms:
        clock.say("one request, hop by hop, in Triton's trace")
        outcome.raw["hops"] = measure_hops("emoji", env, settings.single_steps, settings.hop_requests)
    if settings.needs_servers:
        clock.say("starting the servers and the bare pipeline")
        with Fleet(settings.model, env, settings.baselines) as fleet, BarePipeline(settings.model, env) as bare:
            fleet.wait_ready()
            outcome.raw["bare_settings"] = bare.wait_ready()
            _on_servers(Bench(settings, clock, fleet, bare, outcome.records), outcome)
    outcome.raw["seconds"] = clock.seconds
    return outcome


def _on_servers(bench: Bench, outcome: Outcome) -> None:
    settings, raw = bench.settings, outcome.raw
    if "memory" in settings.arms:
        raw["memory"] = once.memory(bench)
    if set(settings.arms) & {"single", "load", "poisson", "curves", "mixes", "cancelling"}:
        raw["pictures"] = once.warm_up(bench)
    for arm, measure in (("cancelling", once.cancelling), ("mixes", once.mixes), ("curves", once.curves)):
        if arm in settings.arms:
            raw[arm] = measure(bench)
    _rounds(bench, outcome)
    if "idle" in settings.arms:
        raw["idle"] = once.idle(bench)
    outcome.figures += once_figures(raw)


def _rounds(bench: Bench, outcome: Outcome) -> None:
    settings, raw = bench.settings, outcome.raw
    arms = [arm for arm in ("single", "load", "poisson") if arm in settings.arms]
    while arms and bench.clock.begin_round():
        load_found = None
        for arm in arms:
            if arm == "single":
                found = rounds.single_round(bench)
            elif arm == "load":
                found = load_found = rounds.load_round(bench)
            else:
                found = rounds.poisson_round(bench, load_found)
            raw.setdefault(arm, []).append(found)
        bench.clock.end_round()
        bench.round += 1
    bench.clock.end_rounds()
    if "single" in raw:
        outcome.figures += single_figures(raw["single"])
    if "load" in raw:
        outcome.figures += load_figures(raw["load"], settings.concurrencies)
    if "poisson" in raw:
        outcome.figures += poisson_figures(raw["poisson"], settings.poisson_load)
        for found in raw["poisson"]:
            del found["requests"]  # they are among the records


def _engine(settings: Settings, clock: Clock, outcome: Outcome) -> None:
    found: list[dict[int, engine_overhead.StepCost]] = []
    for number in range(settings.engine_rounds):
        clock.say("the engine with a denoiser that takes no time")
        order = settings.waiting if number % 2 == 0 else settings.waiting[::-1]
        found.append({waiting: engine_overhead.measure_step(waiting, settings.engine_steps) for waiting in order})
    clock.say(f"{settings.callers} callers that wait")
    percent = engine_overhead.measure_callers(settings.callers, settings.callers_s)
    outcome.raw["engine"] = {
        "steps": [{waiting: asdict(cost) for waiting, cost in each.items()} for each in found],
        "callers_percent": percent,
    }
    outcome.figures += engine_figures(found, settings.waiting)
    outcome.figures.append(callers_figure(settings.callers, percent))
