"""The arms that run once: what they do, and what they return of it, as JSON objects."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench import Bench
from benchmarks.idle import measure_idle, processor_seconds
from benchmarks.load import closed_loop
from benchmarks.workload import GUIDANCE, Job, arrival_times, make_jobs

MEMORY_RUNNING = 8
"""Requests at once whose memory is compared with that of one in the bare pipeline."""

_MEMORY_STEPS = 8


def warm_up(bench: Bench) -> dict[str, int]:
    """Run short jobs on every server; return each one's largest difference from the bare pipeline's pixels.

    As many run at once as later, so that what depends on the number of rows is warm as well.
    """
    settings = bench.settings
    jobs = make_jobs(len(settings.mixed_guidances), settings.mixed_steps[:1], guidances=settings.mixed_guidances)
    alone = bench.bare.run(jobs, images=True).images
    worst: dict[str, int] = {}
    for name in ("served", *settings.baselines):
        bench.clock.say(f"warming up, and comparing pictures: {name}")
        together = max(settings.concurrencies) if name in ("served", *bench.batching) else 1
        for several, expected, concurrency in ((jobs, alone, 1), (jobs[:1] * together, alone[:1] * together, together)):
            with bench.fleet.awake(name):
                load = closed_loop(bench.fleet.connect(name), several, concurrency)
            load.check()
            for picture, other in zip(load.pictures, expected, strict=True):
                assert picture is not None
                difference = int(np.abs(picture.astype(int) - other.astype(int)).max())
                worst[name] = max(worst.get(name, 0), difference)
    return worst


def curves(bench: Bench) -> dict[str, Any]:
    """Measure throughput against concurrency, and latency against offered load, for our server and a rival.

    The rival is Triton's dynamic batching, which stands for those that batch requests; the arms `load` and `poisson`
    have them all.
    """
    settings = bench.settings
    names = ["served", *bench.batching[:1]]
    jobs = bench.mixed_jobs(settings.curve_requests)
    found: dict[str, Any] = {"throughput": {name: {} for name in names}, "latency": {name: {} for name in names}}
    for concurrency in settings.curve_concurrencies:
        # Not many where there is little at once to see, and at least as many as clients.
        several = bench.mixed_jobs(max(settings.curve_requests // 2, concurrency))
        for name in names:
            bench.clock.say(f"throughput, {concurrency} at once: {name}")
            seconds = bench.closed("curves", name, several, concurrency).seconds
            found["throughput"][name][concurrency] = len(several) / seconds
    found["capacity_per_s"] = capacity = bench.capacity()
    for share in settings.curve_loads:
        arrivals = arrival_times(len(jobs), share * capacity, seed=1)
        for name in names:
            bench.clock.say(f"latency, Poisson arrivals at {share:.0%} of our capacity: {name}")
            load = bench.open("curves", name, jobs, arrivals, load=share, progress=name == "served")
            found["latency"][name][share] = load.latencies_s
    return found


def mixes(bench: Bench) -> dict[str, dict[str, float]]:
    """Run other mixes than the arm `load` in closed loops, on our server and on a rival; return seconds.

    `alike` has one guidance scale, which is the best that can happen to those that batch requests; `sizes` has pictures
    of two sizes as well. The rival is Triton's dynamic batching: `@group_by_values` cannot give back two sizes.
    """
    settings = bench.settings
    found: dict[str, dict[str, float]] = {}
    for mix, options in (("alike", {"guidances": (GUIDANCE,)}), ("sizes", {"sides": settings.mixed_sides})):
        jobs = bench.mixed_jobs(settings.mixed_requests, **options)
        for name in ("served", *bench.batching[:1]):
            bench.clock.say(f"another mix, {mix}: {name}")
            load = bench.closed(f"mixes.{mix}", name, jobs, max(settings.concurrencies))
            found.setdefault(mix, {})[name] = load.seconds
    return found


def cancelling(bench: Bench) -> dict[str, Any]:
    """Cancel every fourth request after half of its steps, and count the steps that were done for nobody."""
    bench.clock.say("every fourth request is cancelled")
    jobs = bench.mixed_jobs(bench.settings.mixed_requests)
    cancel_at = {index: max(1, jobs[index].steps // 2) for index in range(3, len(jobs), 4)} or {0: 1}
    before = bench.counters()
    bench.closed("cancelling", "served", jobs, min(bench.settings.concurrencies), cancel_at=cancel_at)
    bench.wait_until_idle()
    after = bench.counters()
    wanted = sum(cancel_at.get(index, job.steps) for index, job in enumerate(jobs))
    done = after["diffusion_steps_total"] - before["diffusion_steps_total"]
    return {"cancelled": len(cancel_at), "steps_wanted": wanted, "steps_done": done}


def memory(bench: Bench) -> dict[str, Any]:
    """Compare the peak memory of our model's process at 8 running with that of the bare pipeline at one.

    Runs before anything else has made either of them grow. With a GPU, also the device's memory, by its driver.
    """
    bench.clock.say(f"memory: one request bare, {MEMORY_RUNNING} at once served")
    jobs: Sequence[Job] = make_jobs(MEMORY_RUNNING, [_MEMORY_STEPS])
    bench.bare.run(jobs)
    model_pid = max(bench.fleet.processes()["served"], key=lambda pid: _status_mib(pid, "VmRSS"))
    bench.closed("memory", "served", jobs, MEMORY_RUNNING)
    pids = {"bare": bench.bare.pid, "served": model_pid}
    return {
        "peak_mib": {name: _status_mib(pid, "VmHWM") for name, pid in pids.items()},
        "server_mib": sum(_status_mib(pid, "VmHWM") for pid in bench.fleet.processes()["served"])
        - _status_mib(model_pid, "VmHWM"),
        "device_mib": {name: device_mib(pid) for name, pid in pids.items()},
    }


def idle(bench: Bench) -> dict[str, Any]:
    """Watch our server while it has nothing to do, and the baselines, which sleep likewise between their turns."""
    bench.clock.say(f"watching the idle server for {bench.settings.idle_s:.0f} s")
    assert bench.fleet.served.pid is not None
    others = [pid for name, pids in bench.fleet.processes().items() if name != "served" for pid in pids]
    begin, before = time.monotonic(), sum(map(processor_seconds, others))
    found = asdict(measure_idle(bench.fleet.served.pid, bench.settings.idle_s))
    used = sum(map(processor_seconds, others)) - before
    return found | {"baselines_percent": 100 * used / (time.monotonic() - begin)}


def device_mib(pid: int) -> float | None:
    """Return the GPU memory of a process by its driver's count, in MiB; None without a GPU, or if it does not tell."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    used = [line.split(",") for line in done.stdout.splitlines() if line.split(",")[0].strip() == str(pid)]
    numbers = [float(value) for _, value in used if value.strip().isdigit()]
    return sum(numbers) if numbers else None


def _status_mib(pid: int, name: str) -> float:
    """Return a line of /proc/PID/status that is in kB, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    return 0.0
