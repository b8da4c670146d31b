"""Control calls between steps, and the engine's end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from diffusion_backend.engine import DiffusionEngine
from diffusion_backend.errors import EngineStoppedError
from diffusion_backend.request import EventKind
from tests.engine.conftest import Rig, engine_threads, within_deadline
from tests.support.fakes import DEADLINE_S, FakeExecutor, eventually, make

Build = Callable[..., Rig]


def test_a_control_call_runs_between_two_steps_of_a_request_that_goes_on(rig: Build) -> None:
    engine, executor, _ = rig()
    executor.gate.close()
    handle = engine.submit(make("a", steps=3))
    executor.gate.wait_held()
    answers: list[str] = []
    caller = threading.Thread(target=lambda: answers.append(engine.collective_rpc("echo", "done")))
    caller.start()
    eventually(lambda: engine._controls, "the control call is queued")
    executor.gate.let(1)
    caller.join(DEADLINE_S)
    assert answers == ["done"]
    assert not handle.done
    executor.gate.open()
    handle.result(DEADLINE_S)
    assert [what for what, _ in executor.log if what in ("forward", "echo")] == [
        "forward",
        "echo",
        "forward",
        "forward",
    ]


def test_a_control_call_wakes_an_idle_engine_and_runs_on_its_thread(rig: Build) -> None:
    engine, _, _ = rig()

    def call(ex: FakeExecutor, factor: int) -> tuple[int, str, bool]:
        return 21 * factor, threading.current_thread().name, isinstance(ex, FakeExecutor)

    assert within_deadline(lambda: engine.collective_rpc(call, 2)) == (42, "diffusion-engine", True)


def test_a_control_call_that_raises_raises_in_its_caller_and_nowhere_else(rig: Build) -> None:
    engine, _, _ = rig()

    def fail(_executor: object) -> None:
        raise KeyError("no such adapter")

    with pytest.raises(KeyError, match="no such adapter"):
        engine.collective_rpc(fail)
    with pytest.raises(AttributeError, match="no_such_method"):
        engine.collective_rpc("no_such_method")
    assert engine.collective_rpc("echo", 1) == 1
    assert engine.submit(make("a")).result(DEADLINE_S)


def test_a_control_call_that_is_not_waited_for_long_enough_still_runs(rig: Build) -> None:
    engine, executor, _ = rig()
    executor.gate.close()
    engine.submit(make("a"))
    executor.gate.wait_held()
    with pytest.raises(TimeoutError):
        engine.collective_rpc("echo", 1, timeout=0.01)
    assert executor.count("echo") == 0
    executor.gate.open()
    eventually(lambda: executor.count("echo") == 1, "the control call")


def test_answers_of_concurrent_control_calls_do_not_swap(rig: Build) -> None:
    engine, _, _ = rig()
    answers: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        answers[i] = [engine.collective_rpc("echo", 1000 * i + k) for k in range(50)]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert answers == {i: [1000 * i + k for k in range(50)] for i in range(8)}


def test_the_dummy_run_asks_the_executor_for_exactly_the_size(rig: Build) -> None:
    engine, executor, _ = rig()
    engine._dummy_run()
    engine._dummy_run(512, 768)
    assert executor.warm_ups == [(None, None), (512, 768)]


# -- the end ----------------------------------------------------------------------------------------------------


def test_an_engine_that_was_not_started_takes_nothing_and_can_be_shut_down() -> None:
    engine = DiffusionEngine(FakeExecutor())
    assert not engine.is_ready
    with pytest.raises(EngineStoppedError, match="has not been started"):
        engine.submit(make("a"))
    with pytest.raises(EngineStoppedError):
        engine.collective_rpc("echo", 1)
    within_deadline(lambda: (engine.wait_for_slot(), True))
    within_deadline(lambda: (engine.shutdown(), True))


def test_a_draining_shutdown_tells_the_waiting_and_lets_the_running_finish(rig: Build) -> None:
    engine, executor, _ = rig(max_num_seqs=2)
    executor.gate.close()
    running = [engine.submit(make(f"r{i}", steps=3)) for i in range(2)]
    waiting = [engine.submit(make(f"w{i}")) for i in range(3)]
    executor.gate.wait_held()
    stopper = threading.Thread(target=lambda: engine.shutdown(drain_s=DEADLINE_S))
    stopper.start()
    for handle in waiting:  # told at once, while a forward is blocked
        with pytest.raises(EngineStoppedError, match="the server is stopping") as caught:
            handle.result(DEADLINE_S)
        assert caught.value.request_id == handle.request.request_id
    assert not engine.is_ready
    with pytest.raises(EngineStoppedError):
        engine.submit(make("late"))
    within_deadline(lambda: (engine.wait_for_slot(), True))
    assert stopper.is_alive()
    executor.gate.open()
    stopper.join(DEADLINE_S)
    assert not stopper.is_alive()
    for handle in running:
        assert handle.done
        assert handle.result(0)
    assert executor.log[-1] == ("close", ())
    assert engine_threads() == []


@pytest.mark.parametrize("drain_s", [0.0, 0.05])
def test_a_shutdown_ends_what_is_not_done_when_the_drain_is_over(rig: Build, drain_s: float) -> None:
    engine, executor, _ = rig(max_num_seqs=2)
    handles = [engine.submit(make(str(i), steps=10**9)) for i in range(4)]
    eventually(lambda: executor.count("forward") > 10, "they run")
    within_deadline(lambda: (engine.shutdown(drain_s=drain_s), True))
    for handle in handles:
        assert handle.done, "a request without its final event when shutdown returns"
        with pytest.raises(EngineStoppedError):
            handle.result(0)
    assert executor.live == {}
    assert engine.stats() == {"accepted": 4, "waiting": 0, "running": 0, "finished": 0, "failed": 4, "cancelled": 0}


def test_a_shutdown_waits_for_results_that_are_being_encoded(rig: Build) -> None:
    engine, _, _ = rig()
    finalizing, go_on = threading.Event(), threading.Event()

    def finalize(_output: object) -> str:
        finalizing.set()
        assert go_on.wait(DEADLINE_S)
        return "made"

    handle = engine.submit(make("a"), finalize=finalize)
    assert finalizing.wait(DEADLINE_S)
    stopper = threading.Thread(target=engine.shutdown)
    stopper.start()
    eventually(lambda: not engine.is_ready, "the shutdown has begun")
    go_on.set()
    stopper.join(DEADLINE_S)
    assert not stopper.is_alive()
    assert [e.kind for e in handle.events()][-1] is EventKind.FINISHED
    assert handle.result(0).payload == "made"


def test_a_shutdown_of_a_shut_down_engine_does_nothing(rig: Build) -> None:
    engine, executor, _ = rig()
    engine.submit(make("a")).result(DEADLINE_S)
    for _ in range(2):
        within_deadline(lambda: (engine.shutdown(), True))
    assert executor.count("close") == 1
    with pytest.raises(EngineStoppedError):
        engine.collective_rpc("echo", 1)
