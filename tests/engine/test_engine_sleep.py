"""Nothing polls: who has nothing to do sleeps, and is not woken until there is something."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.engine.conftest import Rig, engine_threads
from tests.support.fakes import DEADLINE_S, eventually, make

Build = Callable[..., Rig]
WATCHED_S = 1.0
"""A loop that polled every 100 ms would wake ten times in it."""


def cpu_seconds(threads: Iterable[threading.Thread]) -> float:
    """CPU time of these threads, from the kernel."""
    return sum(time.clock_gettime(time.pthread_getcpuclockid(t.ident)) for t in threads if t.ident is not None)


def switches(threads: Iterable[threading.Thread]) -> int:
    """How often these threads went to sleep of themselves, from the kernel."""
    total = 0
    for thread in threads:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        total += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return total


def asleep(threads: Iterable[threading.Thread]) -> bool:
    """Whether all of these threads sleep."""
    states = [Path(f"/proc/self/task/{t.native_id}/status").read_text().split("State:\t")[1][0] for t in threads]
    return set(states) == {"S"}


def assert_nothing_moves(threads: list[threading.Thread], engine) -> None:
    eventually(lambda: asleep(threads), "all sleep")
    wakeups, cpu, switched = engine.num_wakeups, cpu_seconds(threads), switches(threads)
    threading.Event().wait(WATCHED_S)
    assert engine.num_wakeups == wakeups
    assert switches(threads) - switched <= 2  # none; two for a thread that was just about to sleep
    assert cpu_seconds(threads) - cpu < 0.02 * WATCHED_S


def test_an_idle_engine_is_not_woken_and_takes_no_cpu(rig: Build) -> None:
    engine, _, _ = rig()
    engine.submit(make("a")).result(DEADLINE_S)
    engine.submit(make("b", timeout_s=1000.0)).result(DEADLINE_S)
    threads = engine_threads()
    assert {"diffusion-engine", "diffusion-delivery", "diffusion-deadlines"} <= {t.name for t in threads}
    assert_nothing_moves(threads, engine)


def test_64_callers_behind_a_blocked_forward_take_no_cpu(rig: Build) -> None:
    engine, executor, _ = rig(max_num_seqs=4)
    executor.gate.close()
    results: list[object] = []
    callers = [
        threading.Thread(target=lambda i=i: results.append(engine.add_req_and_wait_for_response(make(str(i)))))
        for i in range(64)
    ]
    callers += [threading.Thread(target=engine.wait_for_slot) for _ in range(4)]
    for caller in callers[:64]:
        caller.start()
    eventually(lambda: engine.stats()["accepted"] == 64, "all have submitted")
    for caller in callers[64:]:
        caller.start()
    executor.gate.wait_held()
    assert_nothing_moves([*callers, *engine_threads()], engine)
    assert results == []
    executor.gate.open()
    for caller in callers:
        caller.join(DEADLINE_S)
    assert len(results) == 64


def test_the_engine_thread_wakes_for_requests_and_control_calls_only(rig: Build) -> None:
    """One after another, ten requests wake an idle engine at most ten times."""
    engine, _, _ = rig()
    before = engine.num_wakeups
    for i in range(10):
        engine.submit(make(str(i))).result(DEADLINE_S)
    assert engine.num_wakeups - before <= 10
    engine.collective_rpc("echo", 1)
    assert engine.num_wakeups - before <= 11


def test_a_waiting_deadline_wakes_nobody_before_it_is_due(rig: Build) -> None:
    engine, executor, _ = rig(max_num_seqs=1)
    executor.gate.close()
    engine.submit(make("a"))
    executor.gate.wait_held()
    engine.submit(make("b", timeout_s=500.0))
    assert_nothing_moves(engine_threads(), engine)
