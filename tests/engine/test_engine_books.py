"""The conservation law and exact metrics, under a random mix of everything from several threads."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from diffusion_backend.errors import DiffusionError, QueueFullError, RequestCancelledError
from diffusion_backend.request import EventKind
from diffusion_backend.telemetry import PHASE_SECONDS
from tests.engine.conftest import Rig
from tests.support.fakes import DEADLINE_S, make

Build = Callable[..., Rig]
OUTCOMES = ("completed", "failed", "cancelled", "rejected")


def balanced(stats: dict[str, int]) -> bool:
    return stats["accepted"] == sum(count for name, count in stats.items() if name != "accepted")


def test_metrics_of_a_known_run_are_exact(rig: Build) -> None:
    """Two requests that share forwards (2 and 1 rows), one solo request of two steps."""
    made = rig()
    engine, executor, sink = made
    executor.gate.close()
    handles = [
        engine.submit(make("plug", steps=1, key="plug")),
        engine.submit(make("a", steps=2, rows=2)),
        engine.submit(make("b", steps=2, num_outputs_per_prompt=3)),
        engine.submit(make("s", steps=2, solo_reason="self_check")),
    ]
    executor.gate.wait_held()
    executor.gate.open()
    records = [handle.result(DEADLINE_S).record for handle in handles]
    made.stop()
    assert sink.values == {
        ("diffusion_requests_waiting", ()): 0,
        ("diffusion_requests_running", ()): 0,
        ("diffusion_requests_total", ("completed",)): 4,
        ("diffusion_steps_total", ()): 1 + 2 + 2 + 2,
        ("diffusion_outputs_total", ("image",)): 1 + 1 + 3 + 1,
        ("diffusion_solo_calls_total", ("self_check",)): 2,
    }
    rows = sorted(sink.samples["diffusion_batch_rows", ()])
    assert rows in ([1, 1, 1, 3, 3], [1, 1, 1, 1, 2, 3, 3])  # the plug may be admitted before the others
    assert sum(rows) == 1 + 2 * 2 + 2 + 2
    assert len(sink.samples["diffusion_step_seconds", ()]) == len(rows)
    for phase, spec in PHASE_SECONDS.items():
        assert sorted(sink.samples[spec.name, ()]) == sorted(record.seconds()[phase] for record in records)
    totals = [record.seconds()["total"] for record in records]
    assert sorted(sink.samples["diffusion_request_duration_seconds", ()]) == sorted(totals)
    first_steps = [record.time_to_first_step() for record in records]
    assert sorted(sink.samples["diffusion_time_to_first_step_seconds", ()]) == sorted(first_steps)  # type: ignore[type-var]


def test_the_gauges_tell_who_runs_and_who_waits(rig: Build) -> None:
    made = rig(max_num_seqs=1)
    engine, executor, sink = made
    executor.gate.close()
    handles = [engine.submit(make(str(i))) for i in range(10)]
    executor.gate.wait_held()
    flushed = threading.Event()
    engine._delivery.put(flushed.set)
    assert flushed.wait(DEADLINE_S)
    assert sink.values["diffusion_requests_running", ()] == 1
    assert sink.values["diffusion_requests_waiting", ()] == 9
    executor.gate.open()
    for handle in handles:
        handle.result(DEADLINE_S)
    made.stop()
    assert sink.values["diffusion_requests_running", ()] == 0
    assert sink.values["diffusion_requests_waiting", ()] == 0


@pytest.mark.parametrize("round_", range(3))
def test_books_balance_under_a_random_mix_from_several_threads(rig: Build, round_: int) -> None:
    """accepted = finished + failed + cancelled + waiting + running, at every look; and each has one final event."""
    seed = random.randrange(2**32)
    print("seed", seed)
    made = rig(max_num_seqs=5, max_batch_rows=8, max_waiting=30)
    engine, sink = made.engine, made.sink
    outcomes: Counter[str] = Counter()
    finals: dict[str, int] = {}
    wrong: list[str] = []
    lock = threading.Lock()

    def client(number: int) -> None:
        rng = random.Random(seed + number)
        handles = []
        for i in range(60):
            request_id = f"{number}-{i}"
            params: dict[str, object] = {"key": rng.choice("xyz"), "rows": rng.randrange(1, 4)}
            what = rng.random()
            if what < 0.1:
                params["raise_in"] = rng.choice(["add_req", "start", "forward", "abort"])
            elif what < 0.2:
                params["fail_at"] = rng.randrange(1, 4)
            elif what < 0.3:
                params["timeout_s"] = rng.random() * 0.02
            finalize = (lambda _: 1 / 0) if rng.random() < 0.05 else None
            try:
                handle = engine.submit(
                    make(request_id, steps=rng.randrange(1, 6), priority=rng.randrange(3), **params), finalize=finalize
                )
            except QueueFullError:
                with lock:
                    outcomes["rejected"] += 1
                continue
            handles.append(handle)
            if rng.random() < 0.3:
                rng.choice(handles).abort()
            if not balanced(stats := engine.stats()):
                wrong.append(str(stats))
        for handle in handles:
            try:
                handle.result(DEADLINE_S)
                outcome = "completed"
            except RequestCancelledError:
                outcome = "cancelled"
            except DiffusionError:
                outcome = "failed"
            events = list(handle.events())
            with lock:
                outcomes[outcome] += 1
                finals[handle.request.request_id] = sum(e.kind.is_final for e in events)
                # The end of a request that waits is told at once, and may overtake its QUEUED, which is then dropped.
                if not events[-1].kind.is_final or not (len(events) == 1 or events[0].kind is EventKind.QUEUED):
                    wrong.append(f"{handle.request.request_id}: {[e.kind for e in events]}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
    assert wrong == []
    assert outcomes.total() == 6 * 60
    assert set(finals.values()) == {1}
    made.stop()
    assert engine.stats() == {
        "accepted": 6 * 60 - outcomes["rejected"],
        "waiting": 0,
        "running": 0,
        "finished": outcomes["completed"],
        "failed": outcomes["failed"],
        "cancelled": outcomes["cancelled"],
    }
    for outcome in OUTCOMES:
        assert sink.values["diffusion_requests_total", (outcome,)] == outcomes[outcome]
    assert sink.values["diffusion_requests_waiting", ()] == 0
    assert sink.values["diffusion_requests_running", ()] == 0
    assert sink.values["diffusion_outputs_total", ("image",)] == outcomes["completed"]
    assert len(sink.samples["diffusion_request_duration_seconds", ()]) == outcomes["completed"]
    assert max(sink.samples["diffusion_batch_rows", ()]) <= 8
    assert outcomes["completed"] > 0
    assert outcomes["cancelled"] > 0
    assert outcomes["failed"] > 0
