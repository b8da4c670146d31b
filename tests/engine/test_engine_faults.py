"""Whatever breaks, only the requests that it touched fail, and the engine goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from diffusion_backend.engine import Report, WorkKind
from diffusion_backend.errors import (
    DeadlineExceededError,
    DiffusionError,
    EngineStoppedError,
    ExecutorError,
    InvalidArgumentError,
    PipelineError,
    RequestCancelledError,
)
from diffusion_backend.request import Event, EventKind
from diffusion_backend.telemetry import MemorySink
from tests.engine.conftest import Rig, within_deadline
from tests.support.fakes import DEADLINE_S, FakeExecutor, Recorder, eventually, make

Build = Callable[..., Rig]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Keep the expected tracebacks out of the report."""
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("where", ["add_req", "start", "forward"])
def test_an_executor_call_that_raises_fails_the_requests_that_it_was_for_and_no_others(rig: Build, where: str) -> None:
    engine, executor, _ = rig()
    executor.gate.close()
    others = [engine.submit(make(f"other{i}", key="other", steps=4)) for i in range(3)]
    executor.gate.wait_held()
    broken = engine.submit(make("broken", raise_in=where, key="broken"))
    executor.gate.open()
    with pytest.raises(ExecutorError, match=r"the executor failed \(RuntimeError\)") as caught:
        broken.result(DEADLINE_S)
    assert caught.value.request_id == "broken"
    assert "/srv" not in caught.value.message
    for handle in others:
        assert handle.result(DEADLINE_S)
    assert engine.submit(make("after")).result(DEADLINE_S)
    assert [e.kind for e in broken.events()][-1] is EventKind.FAILED


def test_a_forward_that_raises_fails_its_whole_group(rig: Build) -> None:
    engine, executor, _ = rig()
    executor.gate.close()
    plug = engine.submit(make("plug", key="plug", steps=1))
    executor.gate.wait_held()
    broken, beside = engine.submit(make("broken", raise_in="forward")), engine.submit(make("beside"))
    executor.gate.open()
    assert plug.result(DEADLINE_S)
    for handle in (broken, beside):
        with pytest.raises(ExecutorError) as caught:
            handle.result(DEADLINE_S)
        assert caught.value.request_id == handle.request.request_id
    assert engine.stats()["failed"] == 2


def test_an_abort_that_raises_still_ends_the_request(rig: Build) -> None:
    engine, executor, _ = rig()
    executor.gate.close()
    handle = engine.submit(make("a", steps=100, raise_in="abort"))
    executor.gate.wait_held()
    handle.abort()
    executor.gate.open()
    with pytest.raises(ExecutorError):
        handle.result(DEADLINE_S)
    assert engine.submit(make("b")).result(DEADLINE_S)


def test_a_poisoned_request_among_eight_fails_alone(rig: Build) -> None:
    engine, executor, _ = rig()
    executor.gate.close()
    handles = [engine.submit(make(str(i), steps=4, **({"fail_at": 2} if i == 3 else {}))) for i in range(8)]
    executor.gate.open()
    for i, handle in enumerate(handles):
        if i == 3:
            with pytest.raises(PipelineError, match="ValueError: poisoned"):
                handle.result(DEADLINE_S)
        else:
            assert handle.result(DEADLINE_S)
    assert engine.stats()["failed"] == 1


@pytest.mark.parametrize(
    ("cause", "expected", "text"),
    [
        (ValueError("no codec in /usr/lib/codec"), PipelineError, "the pipeline failed while encoding: ValueError: no"),
        (InvalidArgumentError("output_format", "no such"), InvalidArgumentError, "output_format: no such"),
    ],
)
def test_a_finalize_that_raises_fails_its_request(
    rig: Build, cause: Exception, expected: type[DiffusionError], text: str
) -> None:
    made = rig()
    engine, _, sink = made

    def finalize(_output: object) -> None:
        raise cause

    handle = engine.submit(make("a"), finalize=finalize)
    with pytest.raises(expected, match=text) as caught:
        handle.result(DEADLINE_S)
    assert caught.value.request_id == "a"
    assert "/usr" not in caught.value.message
    assert [e.kind for e in handle.events()][-1] is EventKind.FAILED
    assert engine.submit(make("b")).result(DEADLINE_S)
    made.stop()
    assert sink.values["diffusion_requests_total", ("failed",)] == 1
    assert sink.values["diffusion_requests_running", ()] == 0
    assert sink.values["diffusion_outputs_total", ("image",)] == 1  # of "b"


# -- callers' functions -----------------------------------------------------------------------------------------


class Raising(Recorder):
    """An `on_event` that raises each time (a client whose connection is gone)."""

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        raise ConnectionError("the client has gone")


def test_an_on_event_that_raises_does_not_disturb_its_request_or_others(rig: Build) -> None:
    engine, _, _ = rig()
    raising = Raising()
    broken = engine.submit(make("a"), on_event=raising)
    beside = engine.submit(make("b"))
    assert broken.result(DEADLINE_S)
    assert beside.result(DEADLINE_S)
    raising.wait_for("a", EventKind.FINISHED)
    assert raising.kinds("a")[0] is EventKind.QUEUED


def test_an_on_event_that_raises_at_a_deadline_does_not_end_all_deadlines(rig: Build) -> None:
    """The final event of a request that waited is delivered by the deadline thread itself."""
    engine, executor, _ = rig(max_num_seqs=1)
    executor.gate.close()
    engine.submit(make("running"))
    executor.gate.wait_held()
    broken = engine.submit(make("broken", timeout_s=0.01), on_event=Raising())
    with pytest.raises(DeadlineExceededError):
        broken.result(DEADLINE_S)
    later = engine.submit(make("later", timeout_s=0.01))
    with pytest.raises(DeadlineExceededError):
        later.result(DEADLINE_S)


def test_an_on_event_that_raises_is_not_the_trouble_of_who_aborts_or_shuts_down(rig: Build) -> None:
    made = rig(max_num_seqs=1)
    engine, executor, _ = made
    executor.gate.close()
    running = engine.submit(make("running"), on_event=Raising())
    executor.gate.wait_held()
    waiting = [engine.submit(make(f"w{i}"), on_event=Raising()) for i in range(3)]
    waiting[0].abort()
    with pytest.raises(RequestCancelledError):
        waiting[0].result(0)
    shutdown = threading.Thread(target=engine.shutdown, daemon=True)
    shutdown.start()
    for handle in waiting[1:]:  # told while the device is still held
        with pytest.raises(EngineStoppedError):
            handle.result(DEADLINE_S)
    executor.gate.open()
    shutdown.join(DEADLINE_S)
    assert not shutdown.is_alive()
    with pytest.raises(EngineStoppedError):
        running.result(0)


def test_events_of_one_request_never_overlap_and_the_final_one_is_last(rig: Build) -> None:
    """An abort's thread delivers while the delivery thread is still inside `on_event`: the final event must wait."""
    engine, executor, _ = rig(max_num_seqs=1)
    executor.gate.close()
    engine.submit(make("running"))
    executor.gate.wait_held()
    entered, go_on = threading.Event(), threading.Event()
    inside, seen = [0], []

    def on_event(event: Event) -> None:
        inside[0] += 1
        seen.append((event.kind, inside[0]))
        if event.kind is EventKind.QUEUED:
            entered.set()
            assert go_on.wait(DEADLINE_S)
        inside[0] -= 1

    waiting = engine.submit(make("waiting"), on_event=on_event)
    assert entered.wait(DEADLINE_S)
    within_deadline(lambda: (waiting.abort(), True))  # the abort itself is not held up
    with pytest.raises(RequestCancelledError):
        waiting.result(0)
    assert seen == [(EventKind.QUEUED, 1)]
    go_on.set()
    eventually(lambda: len(seen) == 2, "the final event")
    assert seen[1] == (EventKind.CANCELLED, 1)


def test_on_event_may_abort_its_own_request(rig: Build) -> None:
    engine, _, _ = rig()
    recorder = Recorder()

    def on_event(event: Event) -> None:
        recorder(event)
        if event.kind is EventKind.STEP and event.step == 2:
            engine.abort("a")

    engine.submit(make("a", steps=10**9), on_event=on_event)
    recorder.wait_for("a", EventKind.CANCELLED)
    assert recorder.kinds("a").count(EventKind.CANCELLED) == 1
    assert recorder.kinds("a")[-1] is EventKind.CANCELLED


def test_a_handle_hands_nothing_over_after_the_final_event(rig: Build) -> None:
    engine, _, _ = rig()
    recorder = Recorder()
    handle = engine.submit(make("a"), on_event=recorder)
    handle.result(DEADLINE_S)
    recorder.wait_for("a", EventKind.FINISHED)
    for kind in EventKind:
        assert handle.deliver(Event(kind, "a", 0.0)) is False
    assert recorder.kinds("a")[-1] is EventKind.FINISHED


class BrokenSink(MemorySink):
    """A metric sink that stopped working."""

    def add(self, *_: object) -> None:
        raise OSError("the metrics are gone")

    def observe(self, *_: object) -> None:
        raise OSError("the metrics are gone")


def test_a_broken_metric_sink_costs_metrics_and_nothing_else(rig: Build) -> None:
    made = rig(max_num_seqs=1, sink=BrokenSink())
    engine, executor, _ = made
    executor.gate.close()
    running = engine.submit(make("a"))
    executor.gate.wait_held()
    waiting = engine.submit(make("b"))
    waiting.abort()
    failing = engine.submit(make("c", fail_at=1))
    executor.gate.open()
    assert running.result(DEADLINE_S)
    with pytest.raises(PipelineError):
        failing.result(DEADLINE_S)
    made.stop(drain_s=DEADLINE_S)
    assert engine.stats() == {"accepted": 3, "waiting": 0, "running": 0, "finished": 1, "failed": 1, "cancelled": 1}


# -- death ------------------------------------------------------------------------------------------------------


class Lying(FakeExecutor):
    """Breaks the contract once it is told to: it reports about a request that is not there."""

    lying = threading.Event()

    def execute(self, kind: WorkKind, request_ids) -> list[Report]:
        reports = super().execute(kind, request_ids)
        return [Report("nobody")] if self.lying.is_set() else reports


def test_everybody_is_answered_when_the_engine_thread_dies(rig: Build) -> None:
    executor = Lying()
    executor.lying = threading.Event()
    made = rig(executor=executor, max_num_seqs=2)
    engine, sink = made.engine, made.sink
    executor.gate.close()
    finalizing, go_on = threading.Event(), threading.Event()

    def finalize(_output: object) -> str:
        finalizing.set()
        assert go_on.wait(DEADLINE_S)
        return "kept"

    returned = engine.submit(make("returned", steps=1), finalize=finalize)
    executor.gate.let(1)
    assert finalizing.wait(DEADLINE_S)
    handles = [engine.submit(make(str(i), steps=5)) for i in range(6)]
    executor.gate.wait_held()
    waiter = threading.Thread(target=engine.wait_for_slot)
    waiter.start()
    executor.lying.set()
    executor.gate.open()
    for handle in handles:
        with pytest.raises(ExecutorError) as caught:
            handle.result(DEADLINE_S)
        assert caught.value.request_id == handle.request.request_id
    waiter.join(DEADLINE_S)
    assert not waiter.is_alive(), "who waits for a slot sleeps for ever"
    assert not engine.is_ready
    with pytest.raises(EngineStoppedError, match="the engine has failed"):
        engine.submit(make("late"))
    eventually(lambda: executor.count("close") == 1, "the executor is closed")
    with pytest.raises(EngineStoppedError):
        within_deadline(lambda: _caught(lambda: engine.collective_rpc("echo", 1)))()
    go_on.set()
    assert returned.result(DEADLINE_S).payload == "kept"  # it needs the device no more
    made.stop()
    assert engine.stats() == {"accepted": 7, "waiting": 0, "running": 0, "finished": 1, "failed": 6, "cancelled": 0}
    assert sink.values["diffusion_requests_waiting", ()] == 0
    assert sink.values["diffusion_requests_running", ()] == 0


def _caught(function: Callable[[], object]) -> Callable[[], object]:
    """Call a function; return one that does again what it did."""
    try:
        value = function()
    except Exception as raised:
        error = raised

        def again() -> object:
            raise error

        return again
    return lambda: value


def test_an_executor_that_cannot_start_answers_those_who_queued_already(rig: Build) -> None:
    may_start = threading.Event()

    class Unstartable(FakeExecutor):
        def start(self) -> None:
            assert may_start.wait(DEADLINE_S)
            raise RuntimeError("no device")

    made = rig(executor=Unstartable())
    handle = made.engine.submit(make("a"))
    may_start.set()
    with pytest.raises(ExecutorError):
        handle.result(DEADLINE_S)
    assert not made.engine.is_ready
