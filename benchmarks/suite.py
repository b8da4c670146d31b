"""Runs the arms in turns, round by round.

Machines differ and are noisy, so a figure is a ratio of two arms of the same round; what is reported is the median of
the rounds, and their smallest and largest. In every round the arms come in another order.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import engine_overhead
from benchmarks.bare import BarePipeline, BareRun
from benchmarks.fairness import fairness_figures, measure_fairness
from benchmarks.figures import engine_figures, load_figures, single_figures
from benchmarks.idle import measure_idle
from benchmarks.limit import Work, interpolate, row_counts, simulate
from benchmarks.machine import thread_environment
from benchmarks.report import Figure, Goal
from benchmarks.served import READY_S, LoadRun, closed_loop, read_rows, serving
from benchmarks.workload import Job, make_jobs
from diffusion_backend.serve import TritonServer

ARMS = ("single", "load", "idle", "engine", "fairness")

Progress = Callable[[str], None]
"""Called with what is being done, before each piece of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is run.

    Attributes:
        arms: those of `ARMS` to run.
        rounds: of every arm but `idle`, which runs once, after the load.
        single_steps, single_requests: length and number of the requests of the arm `single`, in each round.
        mixed_steps, mixed_requests: lengths and number of the requests of the arm `load`, in each round.
        concurrencies: requests in flight in the arm `load`.
        forward_repeats: forwards timed for each number of rows, at each of several places of a round.
        idle_s: seconds for which the idle server is watched.
        waiting: queue lengths of the arm `engine`.
        fairness_rounds, fairness_quick: rounds of the arm `fairness`, and whether its loads are small ones.
        engine_steps: steps timed for each queue length, in each round.
        threads, wait_policy: see `machine.thread_environment`.
    """

    model: Path
    repository: Path
    arms: tuple[str, ...] = ARMS
    rounds: int = 5
    single_steps: int = 20
    single_requests: int = 10
    mixed_steps: tuple[int, ...] = (8, 20, 40)
    mixed_requests: int = 48
    concurrencies: tuple[int, ...] = (8, 16)
    forward_repeats: int = 10
    idle_s: float = 10.0
    waiting: tuple[int, ...] = (1, 64, 1000)
    engine_steps: int = 300
    fairness_rounds: int = 3
    fairness_quick: bool = False
    threads: int = 1
    wait_policy: str = "PASSIVE"

    def as_dict(self) -> dict[str, Any]:
        """Return it as a JSON object, without the folders of this machine."""
        values = asdict(self)
        return {name: value for name, value in values.items() if name not in ("model", "repository")} | {
            "model": self.model.name
        }


@dataclass(slots=True)
class Outcome:
    """What a run gave.

    Attributes:
        figures: for people.
        raw: what was measured, round by round, as a JSON object.
    """

    figures: list[Figure] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)


def run(settings: Settings, progress: Progress) -> Outcome:
    """Run the arms of the settings; takes minutes. Raises what goes wrong in an arm."""
    outcome = Outcome()
    if "engine" in settings.arms:
        _run_engine(settings, progress, outcome)
    env = os.environ | thread_environment(settings.threads, settings.wait_policy)
    if "fairness" in settings.arms:
        progress("sizes mixed, in the fair order and in the order of arrival")
        found = measure_fairness(settings.model, env, rounds=settings.fairness_rounds, quick=settings.fairness_quick)
        outcome.raw["fairness"] = found
        outcome.figures += fairness_figures(found)
    if not set(settings.arms) - {"engine", "fairness"}:
        return outcome
    name = settings.model.name
    progress("starting the server and the bare pipeline")
    with serving(settings.repository, env) as server, BarePipeline(settings.model, env) as bare:
        server.wait_ready(READY_S, strict=True)
        outcome.raw["bare_settings"] = bare.wait_ready()
        if "single" in settings.arms or "load" in settings.arms:
            progress("warming up, and comparing the pictures")
            outcome.raw["picture_difference"] = _warm_up(settings, server, bare, name)
        singles: list[dict[str, Any]] = []
        loads: list[dict[str, Any]] = []
        for number in range(settings.rounds):
            if "single" in settings.arms:
                progress(f"round {number + 1}: one request at a time")
                singles.append(_single_round(settings, server, bare, name))
            if "load" in settings.arms:
                loads.append(_load_round(settings, server, bare, name, number, progress))
        if singles:
            outcome.raw["single"] = singles
            outcome.figures += single_figures(singles)
        if loads:
            outcome.raw["load"] = loads
            outcome.figures += load_figures(loads, settings.concurrencies)
        if "picture_difference" in outcome.raw:
            outcome.figures.append(
                Figure(
                    "pictures.difference",
                    "largest difference of a served picture from the bare pipeline's",
                    [outcome.raw["picture_difference"]],
                    "of 255",
                )
            )
        if "idle" in settings.arms:
            progress(f"watching the idle server for {settings.idle_s:.0f} s")
            assert server.pid is not None
            cost = measure_idle(server.pid, settings.idle_s)
            outcome.raw["idle"] = asdict(cost)
            outcome.figures.append(
                Figure("idle.percent", "idle server and models", [cost.total_percent], "% of a core", Goal("<", 0.5))
            )
    return outcome


# ---- one request at a time ----


def _single_round(settings: Settings, server: TritonServer, bare: BarePipeline, model: str) -> dict[str, Any]:
    """Run every job once served and once bare, alternately, and the one that was first is the second next time."""
    served_s: list[float] = []
    bare_s: list[float] = []
    for index, job in enumerate(make_jobs(settings.single_requests, [settings.single_steps])):
        for arm in ("served", "bare") if index % 2 else ("bare", "served"):
            if arm == "served":
                served_s += asyncio.run(closed_loop(server.url_grpc, model, [job], 1)).latencies_s
            else:
                bare_s += bare.run([job]).latencies_s
    return {"served_s": served_s, "bare_s": bare_s}


# ---- many at once ----


def _load_round(
    settings: Settings, server: TritonServer, bare: BarePipeline, model: str, number: int, progress: Progress
) -> dict[str, Any]:
    jobs = make_jobs(settings.mixed_requests, settings.mixed_steps)
    counts = row_counts([job.rows for job in jobs], max(settings.concurrencies))
    found: dict[str, Any] = {"served": {}}
    forwards: dict[int, list[float]] = {count: [] for count in counts}
    # Forwards are timed at several places of the round, as the limit is compared with all of it.
    arms: list[str | int] = ["bare", "forwards"]
    for concurrency in settings.concurrencies:
        arms += [concurrency, "forwards"]
    shift = number % len(arms)
    for arm in arms[shift:] + arms[:shift]:
        if arm == "bare":
            progress(f"round {number + 1}: the bare pipeline, {len(jobs)} requests one after another")
            found["bare"] = asdict(bare.run(jobs))
            del found["bare"]["images"]
        elif arm == "forwards":
            progress(f"round {number + 1}: forwards of {counts[0]} to {counts[-1]} rows")
            for rows, seconds in bare.measure_forwards(counts, settings.forward_repeats).items():
                forwards[rows] += seconds
        else:
            progress(f"round {number + 1}: served, {arm} at once")
            before = read_rows(server.url_metrics, model)
            load = asyncio.run(closed_loop(server.url_grpc, model, jobs, int(arm)))
            after = read_rows(server.url_metrics, model)
            found["served"][arm] = {
                "seconds": load.seconds,
                "latencies_s": load.latencies_s,
                "forwards": after[0] - before[0],
                "mean_rows": (after[1] - before[1]) / max(1.0, after[0] - before[0]),
            }
    medians = {rows: statistics.median(seconds) for rows, seconds in forwards.items()}
    found["forwards_s"] = medians
    works = ideal_works(jobs, found["bare"]["latencies_s"], found["bare"]["denoiser_s"])
    found["limit"] = {
        concurrency: asdict(simulate(works, concurrency, lambda rows: interpolate(medians, rows)))
        for concurrency in settings.concurrencies
    }
    alone = sum(work.steps * interpolate(medians, work.rows) for work in works)
    found["forward_check"] = alone / sum(found["bare"]["denoiser_s"])
    return found


def ideal_works(jobs: Sequence[Job], latencies_s: Sequence[float], denoiser_s: Sequence[float]) -> list[Work]:
    """Return what the limit needs of each job: all that is not the denoiser costs what it cost in the bare run.

    The median over the jobs of the same length is taken, so that one that was disturbed does not count in full.
    """
    others: dict[tuple[int, int], list[float]] = {}
    for job, latency, inside in zip(jobs, latencies_s, denoiser_s, strict=True):
        others.setdefault((job.steps, job.rows), []).append(latency - inside)
    medians = {kind: statistics.median(values) for kind, values in others.items()}
    return [Work(job.steps, job.rows, medians[job.steps, job.rows]) for job in jobs]


def _warm_up(settings: Settings, server: TritonServer, bare: BarePipeline, model: str) -> int:
    """Run every length once on both sides, and so many at once as later; return the largest difference of a pixel."""
    lengths = sorted({settings.single_steps, *settings.mixed_steps})
    jobs = make_jobs(len(lengths), lengths)
    alone: BareRun = bare.run(jobs, images=True)
    worst = 0
    for concurrency in (1, *settings.concurrencies):
        several = jobs * -(-concurrency // len(jobs))
        load: LoadRun = asyncio.run(closed_loop(server.url_grpc, model, several, concurrency))
        for index, picture in enumerate(load.images):
            difference = picture.astype(int) - alone.images[index % len(jobs)].astype(int)
            worst = max(worst, int(np.abs(difference).max()))
    return worst


# ---- the engine by itself ----


def _run_engine(settings: Settings, progress: Progress, outcome: Outcome) -> None:
    rounds: list[dict[int, engine_overhead.StepCost]] = []
    for number in range(settings.rounds):
        progress(f"round {number + 1}: the engine with a denoiser that takes no time")
        order = settings.waiting if number % 2 == 0 else settings.waiting[::-1]
        rounds.append({waiting: engine_overhead.measure_step(waiting, settings.engine_steps) for waiting in order})
    outcome.raw["engine"] = [{waiting: asdict(cost) for waiting, cost in each.items()} for each in rounds]
    outcome.figures += engine_figures(rounds, settings.waiting)
