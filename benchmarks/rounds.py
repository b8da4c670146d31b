"""The arms that run in every round: what they do in one, and what they return of it, as JSON objects."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.bench import Bench
from benchmarks.limit import Work, interpolate, row_counts, simulate
from benchmarks.load import Load
from benchmarks.workload import Job, arrival_times, make_jobs


def single_round(bench: Bench) -> dict[str, Any]:
    """Run every job once served and once bare, alternately, and the one that was first is the second next time."""
    bench.clock.say("one request at a time, served and bare")
    settings = bench.settings
    served_s: list[float] = []
    bare_s: list[float] = []
    for index, job in enumerate(make_jobs(settings.single_requests, [settings.single_steps])):
        for arm in ("served", "bare") if index % 2 else ("bare", "served"):
            if arm == "served":
                served_s += bench.closed("single", "served", [job], 1).latencies_s
            else:
                bare_s += bench.bare.run([job]).latencies_s
    return {"served_s": served_s, "bare_s": bare_s}


def load_round(bench: Bench) -> dict[str, Any]:
    """Run the mixed jobs in closed loops on every server and on the bare pipeline, and time its forwards.

    What answers request by request has the same throughput at any concurrency, with any number of requests: it runs at
    one concurrency, another one in the next round, and with half as many.
    """
    settings = bench.settings
    jobs = bench.mixed_jobs(settings.mixed_requests)
    counts = row_counts([job.rows for job in jobs], max(settings.concurrencies))
    forwards: dict[int, list[float]] = {count: [] for count in counts}
    found: dict[str, Any] = {"served": {}, "baselines": {}}
    # Forwards are timed at several places of the round, as the limit is compared with all of it.
    arms: list[tuple[str, int]] = [("bare", 1), ("forwards", 0)]
    alone_at = settings.concurrencies[bench.round % len(settings.concurrencies)]
    arms += [(name, alone_at) for name in bench.unbatched]
    for concurrency in settings.concurrencies:
        arms += [("served", concurrency), *((name, concurrency) for name in bench.batching)]
    arms.insert(-len(bench.batching) or len(arms), ("forwards", 0))
    shift = bench.round * len(arms) // 3
    for name, concurrency in arms[shift:] + arms[:shift]:
        if name == "bare":
            bench.clock.say(f"the bare pipeline, {len(jobs)} requests one after another")
            found["bare"] = asdict(bench.bare.run(jobs))
            del found["bare"]["images"]
        elif name == "forwards":
            bench.clock.say(f"forwards of {counts[0]} to {counts[-1]} rows")
            for rows, seconds in bench.bare.measure_forwards(counts, settings.forward_repeats).items():
                forwards[rows] += seconds
        else:
            bench.clock.say(f"closed loop, {concurrency} at once: {name}")
            if name == "served":
                found["served"][concurrency] = _served(bench, jobs, concurrency)
            else:
                some = jobs if name in bench.batching else bench.mixed_jobs(len(jobs) // 2)
                load = bench.closed("load", name, some, concurrency)
                found["baselines"].setdefault(name, {})[concurrency] = _summary(load)
    found["forwards_s"] = medians = {rows: statistics.median(seconds) for rows, seconds in forwards.items()}
    works = ideal_works(jobs, found["bare"]["latencies_s"], found["bare"]["denoiser_s"])
    found["limit"] = {
        concurrency: asdict(simulate(works, concurrency, lambda rows: interpolate(medians, rows)))
        for concurrency in settings.concurrencies
    }
    alone = sum(work.steps * interpolate(medians, work.rows) for work in works)
    found["forward_check"] = alone / sum(found["bare"]["denoiser_s"])
    return found


def poisson_round(bench: Bench, load_found: dict[str, Any] | None) -> dict[str, Any]:
    """Send mixed jobs at the instants of a Poisson process to our server and to the best one that batches requests.

    Args:
        load_found: what `load_round` returned in this round; without it, our capacity is measured here.
    """
    settings = bench.settings
    most = max(settings.concurrencies)
    if load_found is None:
        capacity, rival = bench.capacity(), bench.batching[0] if bench.batching else None
    else:
        capacity = settings.mixed_requests / load_found["served"][most]["seconds"]
        times = {name: load_found["baselines"][name][most]["seconds"] for name in bench.batching}
        rival = min(times, key=lambda name: times[name]) if times else None
    rate = settings.poisson_load * capacity
    jobs = bench.mixed_jobs(settings.poisson_requests, shuffle_seed=bench.round)
    arrivals = arrival_times(len(jobs), rate, seed=bench.round)
    found: dict[str, Any] = {"rate_per_s": rate, "rival_name": rival}
    order = [("served", "served")] + ([("rival", rival)] if rival else [])
    for role, name in order if bench.round % 2 else order[::-1]:
        bench.clock.say(f"Poisson arrivals, {rate:.2f} a second: {name}")
        done = bench.open("poisson", name, jobs, arrivals, load=settings.poisson_load, progress=name == "served")
        found[role] = _summary(done)
        if role == "served":
            found["requests"] = [record.as_dict() for record in done.records]
    return found


def _served(bench: Bench, jobs: Sequence[Job], concurrency: int) -> dict[str, Any]:
    before = bench.counters()
    load = bench.closed("load", "served", jobs, concurrency)
    bench.wait_until_idle()
    after = bench.counters()
    forwards, rows = (
        after[f"diffusion_batch_rows_{what}"] - before[f"diffusion_batch_rows_{what}"] for what in ("count", "sum")
    )
    return _summary(load) | {"forwards": forwards, "mean_rows": rows / max(1.0, forwards)}


def _summary(load: Load) -> dict[str, Any]:
    return {"seconds": load.seconds, "latencies_s": load.latencies_s}


def ideal_works(jobs: Sequence[Job], latencies_s: Sequence[float], denoiser_s: Sequence[float]) -> list[Work]:
    """Return what the limit needs of each job: all that is not the denoiser costs what it cost in the bare run.

    The median over the jobs of the same length is taken, so that one that was disturbed does not count in full.
    """
    others: dict[tuple[int, int], list[float]] = {}
    for job, latency, inside in zip(jobs, latencies_s, denoiser_s, strict=True):
        others.setdefault((job.steps, job.rows), []).append(latency - inside)
    medians = {kind: statistics.median(values) for kind, values in others.items()}
    return [Work(job.steps, job.rows, medians[job.steps, job.rows]) for job in jobs]
