"""Which group next: the fair order against the order of arrival, on the same engine and model, in turns.

Two loads. `huge`: one huge request runs, and twenty small ones come at once. `mixed`: sizes mixed, eight at once. Calls
of different sizes cannot share a forward, so the order in which groups run is all that differs. The child
(`python -m benchmarks.fairness MODEL QUICK ROUNDS`) prints one JSON line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
ORDERS = ("fair", "arrival")


def measure_fairness(model: Path, env: Mapping[str, str], *, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Run the loads in a process with the environment `env`; return for each round, order and load the latencies.

    Raises:
        RuntimeError: the process failed.
    """
    command = [sys.executable, "-m", "benchmarks.fairness", str(model.resolve()), str(int(quick)), str(rounds)]
    done = subprocess.run(command, cwd=ROOT, env=dict(env), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the arm fairness failed:\n{done.stderr[-2000:]}")
    measured: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return measured


def fairness_figures(rounds: list[dict[str, Any]]) -> list[Figure]:
    """Return the figures of the arm."""
    figures = []
    for load, label in (("huge", "20 small ones beside a huge one"), ("mixed", "mixed sizes, the small ones")):
        p95 = {order: [float(np.percentile(each[order][load]["small_s"], 95)) for each in rounds] for order in ORDERS}
        figures += [
            Figure(f"fairness.{load}.fair_s", f"{label}: p95, fair order", p95["fair"], "s"),
            Figure(f"fairness.{load}.arrival_s", f"{label}: p95, order of arrival", p95["arrival"], "s"),
            Figure(
                f"fairness.{load}.ratio",
                f"{label}: p95, fair / arrival",
                [fair / arrival for fair, arrival in zip(p95["fair"], p95["arrival"], strict=True)],
                "×",
            ),
            Figure(
                f"fairness.{load}.total",
                f"{'the huge one' if load == 'huge' else 'mixed sizes, all'}: time to the end, fair / arrival",
                [each["fair"][load]["total_s"] / each["arrival"][load]["total_s"] for each in rounds],
                "×",
            ),
        ]
    return figures


# ---- the child ----


def _main(model: str, quick: bool, rounds: int) -> None:
    from diffusion_backend.config import ModelConfig
    from diffusion_backend.engine import DiffusionEngine, EngineConfig, Scheduler
    from diffusion_backend.engine.scheduler import Entry
    from diffusion_backend.pipelines.loader import load

    class ArrivalOrder(Scheduler):
        """The plain order: whoever came first leads the next group."""

        def turn(self, entry: Entry) -> tuple[float, ...]:
            return (entry.arrival,)

    config = ModelConfig(model=model)
    measured = []
    for number in range(rounds):
        found = {}
        for order in ORDERS if number % 2 == 0 else ORDERS[::-1]:
            scheduler = Scheduler if order == "fair" else ArrivalOrder
            engine = DiffusionEngine(
                load(config, device="cpu"), EngineConfig(max_num_seqs=32, max_batch_rows=32), scheduler=scheduler
            )
            engine.start()
            try:
                found[order] = {"huge": _huge(engine, quick), "mixed": _mixed(engine, quick)}
            finally:
                engine.shutdown()
        measured.append(found)
    print(json.dumps(measured))


def _huge(engine: Any, quick: bool) -> dict[str, Any]:
    """Start a huge request; when it has done its first step, submit twenty small ones."""
    from diffusion_backend.request import DiffusionRequest, EventKind

    side, steps = (128, 10) if quick else (512, 10)
    stepping = threading.Event()
    huge = engine.submit(
        DiffusionRequest.make("whale", seed=0, height=side, width=side, num_inference_steps=steps),
        on_event=lambda event: stepping.set() if event.kind is EventKind.STEP else None,
    )
    stepping.wait()
    small = [engine.submit(DiffusionRequest.make("red apple", seed=i, num_inference_steps=8)) for i in range(20)]
    latencies = [handle.result().record.seconds()["total"] for handle in small]
    return {"small_s": latencies, "total_s": huge.result().record.seconds()["total"]}


def _mixed(engine: Any, quick: bool) -> dict[str, Any]:
    """Keep eight requests of four sizes in flight until all have run."""
    from diffusion_backend.request import DiffusionRequest

    sides = (64, 96, 128, 192)
    count = 8 if quick else 32
    todo = [
        DiffusionRequest.make("guitar", seed=i, height=sides[i % 4], width=sides[i % 4], num_inference_steps=8)
        for i in range(count)
    ]
    small: list[float] = []
    ends: list[float] = []
    starts: list[float] = []
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                request = todo.pop(0)
            record = engine.add_req_and_wait_for_response(request).record
            with lock:
                ends.append(record.finished)
                starts.append(record.submitted)
                if request.height == sides[0]:
                    small.append(record.seconds()["total"])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"small_s": small, "total_s": max(ends) - min(starts)}


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _main(sys.argv[1], bool(int(sys.argv[2])), int(sys.argv[3]))
