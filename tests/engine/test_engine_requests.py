"""One request's way through the engine: events, results, aborts, deadlines, limits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from diffusion_backend.engine import DiffusionEngine, Scheduler
from diffusion_backend.engine.scheduler import Entry
from diffusion_backend.errors import (
    DeadlineExceededError,
    EngineStoppedError,
    InvalidArgumentError,
    PipelineError,
    QueueFullError,
    RequestCancelledError,
)
from diffusion_backend.request import Event, EventKind
from tests.engine.conftest import Rig, within_deadline
from tests.support.fakes import CAPABILITIES, DEADLINE_S, FakeExecutor, Recorder, eventually, make

Build = Callable[..., Rig]
QUEUED, STARTED, STEP = EventKind.QUEUED, EventKind.STARTED, EventKind.STEP
FINISHED, FAILED, CANCELLED = EventKind.FINISHED, EventKind.FAILED, EventKind.CANCELLED


def test_events_come_in_order_with_one_final_event_and_the_result(rig: Build) -> None:
    engine, _, _ = rig()
    handle = engine.submit(make("a", steps=3, decode=True))
    events = list(handle.events())
    assert [e.kind for e in events] == [QUEUED, STARTED, STEP, STEP, STEP, FINISHED]
    assert [(e.step, e.num_steps) for e in events if e.kind is STEP] == [(1, 3), (2, 3), (3, 3)]
    assert {e.request_id for e in events} == {"a"}
    assert [e.at for e in events] == sorted(e.at for e in events)
    result = handle.result(0)
    assert result is events[-1].result
    assert result.seeds == (1,)
    assert result.payload is None
    assert result.record.params == {"num_inference_steps": 3}
    assert handle.done


def test_a_final_event_tells_how_far_the_request_came(rig: Build) -> None:
    engine, executor, _ = rig()
    done = list(engine.submit(make("done", steps=3)).events())[-1]
    failed = list(engine.submit(make("failed", steps=5, fail_at=3)).events())[-1]
    executor.gate.close()
    waiting = engine.submit(make("cancelled", steps=7))
    executor.gate.wait_held()
    waiting.abort()
    executor.gate.let(1)
    cancelled = list(waiting.events())[-1]
    assert [(e.kind, e.step, e.num_steps) for e in (done, failed, cancelled)] == [
        (FINISHED, 3, 3),
        (FAILED, 2, 5),
        (CANCELLED, 1, 7),
    ]


def test_another_order_is_a_subclass_of_the_scheduler() -> None:
    """First come, first served: `b`, which came later, steps only when `a` is done."""

    class Fifo(Scheduler):
        def turn(self, entry: Entry) -> tuple[float, ...]:
            return (entry.arrival,)

    executor = FakeExecutor()
    engine = DiffusionEngine(executor, scheduler=Fifo)
    engine.start()
    try:
        executor.gate.close()
        handles = [engine.submit(make(i, steps=3, key=i)) for i in "ab"]
        executor.gate.open()
        for handle in handles:
            handle.result(DEADLINE_S)
    finally:
        executor.gate.open()
        engine.shutdown()
    forwards = [ids[0] for what, ids in executor.log if what == "forward"]
    assert forwards == ["a", "a", "a", "b", "b", "b"]


def test_the_instants_of_a_record_are_in_order(rig: Build) -> None:
    engine, _, _ = rig()
    record = engine.submit(make("a", steps=2)).result(DEADLINE_S).record
    marks = [
        record.submitted,
        record.started,
        record.first_forward,
        record.first_step,
        record.last_step,
        record.finished,
    ]
    assert None not in marks
    assert marks == sorted(marks)  # type: ignore[type-var]


def test_requests_meet_at_the_next_step_after_the_later_one_arrives(rig: Build) -> None:
    engine, executor, _ = rig()
    executor.gate.close()
    first = engine.submit(make("a", steps=3))
    executor.gate.wait_held()
    second = engine.submit(make("b", steps=3))
    executor.gate.open()
    first.result(DEADLINE_S)
    second.result(DEADLINE_S)
    forwards = [ids for what, ids in executor.log if what == "forward"]
    assert sorted(map(sorted, forwards)) == [["a"], ["a", "b"], ["a", "b"], ["b"]]


def test_a_result_that_is_not_waited_for_long_enough_does_not_end_the_request(rig: Build) -> None:
    engine, executor, _ = rig()
    executor.gate.close()
    handle = engine.submit(make("a"))
    with pytest.raises(TimeoutError, match=r"request a has not ended within 0\.01 s"):
        handle.result(0.01)
    assert not handle.done
    executor.gate.open()
    assert handle.result(DEADLINE_S).output.images is not None


def test_add_req_and_wait_for_response_returns_the_result_or_raises_the_error(rig: Build) -> None:
    engine, _, _ = rig()
    assert within_deadline(lambda: engine.add_req_and_wait_for_response(make("a"))).seeds == (1,)
    with pytest.raises(PipelineError, match="poisoned") as caught:
        engine.add_req_and_wait_for_response(make("b", fail_at=1))
    assert caught.value.request_id == "b"


def test_events_go_to_on_event_and_not_to_the_iterator(rig: Build) -> None:
    engine, _, _ = rig()
    recorder = Recorder()
    handle = engine.submit(make("a", steps=1), on_event=recorder)
    recorder.wait_for("a", FINISHED)
    assert recorder.kinds("a") == [QUEUED, STARTED, STEP, FINISHED]
    with pytest.raises(AssertionError, match="on_event"):
        next(handle.events())


def test_capabilities_are_resolved_once() -> None:
    """Asked for every prompt, a property that computes would slow each request down."""
    asked = 0

    class Counting(FakeExecutor):
        @property
        def capabilities(self):
            nonlocal asked
            asked += 1
            return super().capabilities

    engine = DiffusionEngine(Counting())
    for _ in range(3):
        assert engine.supports_audio_output is False
        assert engine.capabilities.pipeline_class == "NullPipeline"
    assert asked == 1


# -- the lock ---------------------------------------------------------------------------------------------------


def test_everything_answers_while_a_forward_is_blocked(rig: Build) -> None:
    """If the engine held its lock over the executor, each of these would block until the forward returns."""
    engine, executor, _ = rig()
    executor.gate.close()
    first = engine.submit(make("a", steps=1))
    executor.gate.wait_held()

    def calls() -> tuple[int, bool]:
        second = engine.submit(make("b", steps=1))
        engine.wait_for_slot()
        engine.abort("unknown")
        return engine.stats()["accepted"], engine.is_ready and not second.done

    assert within_deadline(calls) == (2, True)
    assert not first.done
    assert executor.count("forward") == 1


# -- abort ------------------------------------------------------------------------------------------------------


def test_an_abort_of_a_waiting_request_is_answered_by_the_callers_thread_during_a_forward(rig: Build) -> None:
    engine, executor, _ = rig(max_num_seqs=1)
    told_by: dict[EventKind, int] = {}
    queued = threading.Event()

    def on_event(event: Event) -> None:
        told_by[event.kind] = threading.get_ident()
        queued.set()

    executor.gate.close()
    running = engine.submit(make("running"))
    executor.gate.wait_held()
    waiting = engine.submit(make("waiting"), on_event=on_event)
    assert queued.wait(DEADLINE_S)
    # The event is delivered; let the thread that delivered it get out of the handle.
    eventually(lambda: not waiting._passing, "QUEUED was passed on")
    waiting.abort()
    assert told_by[CANCELLED] == threading.get_ident()
    assert waiting.done
    assert engine.stats() == {"accepted": 2, "waiting": 0, "running": 1, "finished": 0, "failed": 0, "cancelled": 1}
    with pytest.raises(RequestCancelledError, match="the request was cancelled"):
        waiting.result(0)
    assert not running.done
    assert ("add_req", ("waiting",)) not in executor.log


def test_an_abort_of_a_running_request_acts_at_its_next_step(rig: Build) -> None:
    engine, executor, _ = rig()
    executor.gate.close()
    handle = engine.submit(make("a", steps=100))
    executor.gate.let(2)
    executor.gate.wait_held()  # in its third forward
    handle.abort()
    assert not handle.done
    executor.gate.let(1)
    kinds = [e.kind for e in handle.events()]
    assert kinds == [QUEUED, STARTED, STEP, STEP, STEP, CANCELLED]
    assert executor.count("forward") == 3
    assert executor.count("abort") == 1
    assert executor.live == {}
    assert engine.stats()["cancelled"] == 1


def test_an_abort_by_the_caller_can_carry_an_error_of_its_own(rig: Build) -> None:
    engine, executor, _ = rig(max_num_seqs=1)
    executor.gate.close()
    running, waiting = engine.submit(make("running")), engine.submit(make("waiting"))
    executor.gate.wait_held()
    error = EngineStoppedError("the model is unloaded")
    for handle in (waiting, running):
        handle.abort(error)
    executor.gate.open()
    for handle in (waiting, running):
        with pytest.raises(EngineStoppedError, match="the model is unloaded"):
            handle.result(DEADLINE_S)
    assert engine.stats()["failed"] == 2  # nobody cancelled it


def test_aborting_twice_or_too_late_or_an_unknown_id_changes_nothing(rig: Build) -> None:
    engine, executor, _ = rig()
    executor.gate.close()
    handle = engine.submit(make("a", steps=5))
    executor.gate.wait_held()
    handle.abort()
    handle.abort(EngineStoppedError())
    executor.gate.open()
    with pytest.raises(RequestCancelledError):
        handle.result(DEADLINE_S)
    handle.abort()
    engine.abort("unknown")
    assert executor.count("abort") == 1
    assert engine.stats() == {"accepted": 1, "waiting": 0, "running": 0, "finished": 0, "failed": 0, "cancelled": 1}


def test_an_abort_after_the_pipeline_has_returned_lets_the_request_finish(rig: Build) -> None:
    engine, _, _ = rig()
    finalizing, go_on = threading.Event(), threading.Event()

    def finalize(_output: object) -> str:
        finalizing.set()
        assert go_on.wait(DEADLINE_S)
        return "made"

    handle = engine.submit(make("a"), finalize=finalize)
    assert finalizing.wait(DEADLINE_S)
    handle.abort()
    go_on.set()
    assert handle.result(DEADLINE_S).payload == "made"
    assert [e.kind for e in handle.events()][-1] is FINISHED


def test_an_abort_at_the_last_step_gives_exactly_one_final_event(rig: Build) -> None:
    """The forward in progress is the last: the output is there before the abort can act."""
    engine, executor, _ = rig()
    executor.gate.close()
    handle = engine.submit(make("a", steps=1))
    executor.gate.wait_held()
    handle.abort()
    executor.gate.open()
    kinds = [e.kind for e in handle.events()]
    assert kinds == [QUEUED, STARTED, STEP, FINISHED]
    assert executor.count("abort") == 0
    # The id is free again, and no abort of its earlier life is left over.
    assert engine.submit(make("a", steps=3)).result(DEADLINE_S).seeds == (1,)


# -- deadlines --------------------------------------------------------------------------------------------------


def test_a_deadline_of_a_waiting_request_is_told_while_a_forward_is_blocked(rig: Build) -> None:
    engine, executor, _ = rig(max_num_seqs=1)
    executor.gate.close()
    running = engine.submit(make("running"))
    executor.gate.wait_held()
    waiting = engine.submit(make("waiting", timeout_s=0.05))
    with pytest.raises(DeadlineExceededError, match=r"timeout of 0\.05 s while it waited") as caught:
        waiting.result(DEADLINE_S)
    assert caught.value.request_id == "waiting"
    assert [e.kind for e in waiting.events()] == [QUEUED, FAILED]
    assert waiting.record.finished is not None
    assert waiting.record.finished - waiting.record.submitted >= 0.05
    assert not running.done
    assert engine.stats()["failed"] == 1


def test_a_deadline_of_a_running_request_ends_it_between_two_steps(rig: Build) -> None:
    engine, executor, _ = rig()
    handle = engine.submit(make("a", steps=10**9, timeout_s=0.1))
    with pytest.raises(DeadlineExceededError, match=r"timeout of 0\.1 s while it ran"):
        handle.result(DEADLINE_S)
    assert executor.count("abort") == 1
    assert engine.submit(make("b")).result(DEADLINE_S)


def test_the_nearest_deadline_acts_first_whatever_the_order_of_arrival(rig: Build) -> None:
    engine, executor, _ = rig(max_num_seqs=1)
    executor.gate.close()
    engine.submit(make("running"))
    executor.gate.wait_held()
    far = engine.submit(make("far", timeout_s=1000.0))
    near = engine.submit(make("near", timeout_s=0.02))  # must wake the thread that sleeps for `far`
    with pytest.raises(DeadlineExceededError):
        near.result(DEADLINE_S)
    assert not far.done


# -- limits -----------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_at_once_and_touches_nobody_else(rig: Build) -> None:
    made = rig(max_num_seqs=1, max_waiting=2)
    engine, executor, sink = made
    executor.gate.close()
    handles = [engine.submit(make("running"))]
    executor.gate.wait_held()
    handles += [engine.submit(make("w1")), engine.submit(make("w2"))]
    for i in range(3):
        with pytest.raises(QueueFullError, match=r"the queue is full \(2 requests wait\)") as caught:
            engine.submit(make(f"over{i}"))
        assert caught.value.request_id == f"over{i}"
    executor.gate.open()
    for handle in handles:
        handle.result(DEADLINE_S)
    assert engine.stats() == {"accepted": 3, "waiting": 0, "running": 0, "finished": 3, "failed": 0, "cancelled": 0}
    made.stop()
    assert sink.values["diffusion_requests_total", ("rejected",)] == 3
    assert sink.values["diffusion_requests_total", ("completed",)] == 3


def test_no_more_than_max_num_seqs_run_at_once(rig: Build) -> None:
    engine, executor, _ = rig(max_num_seqs=2)
    executor.gate.close()
    handles = [engine.submit(make(str(i))) for i in range(5)]
    executor.gate.wait_held()
    eventually(lambda: engine.stats()["running"] == 2, "two run")
    assert engine.stats()["waiting"] == 3
    executor.gate.open()
    for handle in handles:
        handle.result(DEADLINE_S)
    assert max(len(ids) for what, ids in executor.log if what == "forward") <= 2


def test_an_executor_whose_requests_exclude_each_other_is_given_one_at_a_time(rig: Build) -> None:
    class Exclusive(FakeExecutor):
        capabilities = replace(CAPABILITIES, exclusive=True)

    engine, executor, _ = rig(executor=Exclusive(), max_num_seqs=4)
    for handle in [engine.submit(make(str(i), steps=3)) for i in range(5)]:
        handle.result(DEADLINE_S)
    order = [ids[0] for what, ids in executor.log if what in ("add_req", "start", "forward")]
    assert order == [str(i) for i in range(5) for _ in range(2 + 3)]


def test_a_live_id_is_refused_and_an_ended_one_can_be_used_again(rig: Build) -> None:
    engine, executor, _ = rig()
    executor.gate.close()
    first = engine.submit(make("a"))
    with pytest.raises(InvalidArgumentError, match="request_id: a live request has the same id"):
        engine.submit(make("a"))
    executor.gate.open()
    first.result(DEADLINE_S)
    engine.submit(make("a")).result(DEADLINE_S)
    assert engine.stats()["finished"] == 2


def test_priority_one_overtakes_those_that_wait_at_two(rig: Build) -> None:
    engine, executor, _ = rig(max_num_seqs=1)
    executor.gate.close()
    handles = [engine.submit(make("running", steps=1))]
    executor.gate.wait_held()
    handles += [engine.submit(make(f"two{i}", steps=1, priority=2)) for i in range(2)]
    handles += [engine.submit(make(f"one{i}", steps=1, priority=1)) for i in range(2)]
    executor.gate.open()
    for handle in handles:
        handle.result(DEADLINE_S)
    assert [ids[0] for what, ids in executor.log if what == "add_req"] == ["running", "one0", "one1", "two0", "two1"]


def test_wait_for_slot_sleeps_until_a_request_would_run_at_once(rig: Build) -> None:
    engine, executor, _ = rig(max_num_seqs=2)
    within_deadline(engine.wait_for_slot)
    executor.gate.close()
    engine.submit(make("a"))
    within_deadline(engine.wait_for_slot)  # one slot is left
    engine.submit(make("b"))
    waiting = engine.submit(make("c"))
    executor.gate.wait_held()
    passed = threading.Event()
    waiter = threading.Thread(target=lambda: (engine.wait_for_slot(), passed.set()))
    waiter.start()
    waiting.abort()  # two run, nobody waits, no slot is free
    assert not passed.wait(0.05)
    executor.gate.open()
    assert passed.wait(DEADLINE_S)
    waiter.join(DEADLINE_S)


def test_a_slot_is_free_while_a_result_is_being_encoded(rig: Build) -> None:
    """Encoding a large video must not keep the device from the next request."""
    engine, _, _ = rig(max_num_seqs=1)
    finalizing, go_on = threading.Event(), threading.Event()

    def finalize(_output: object) -> None:
        finalizing.set()
        assert go_on.wait(DEADLINE_S)

    first = engine.submit(make("a"), finalize=finalize)
    assert finalizing.wait(DEADLINE_S)
    within_deadline(engine.wait_for_slot)
    assert engine.submit(make("b")).result(DEADLINE_S)
    assert not first.done
    assert engine.stats()["running"] == 1
    go_on.set()
    first.result(DEADLINE_S)


def test_finalize_makes_the_payload_on_a_thread_of_its_own_within_postprocess(rig: Build) -> None:
    engine, executor, _ = rig()
    seen: list[int] = []

    def finalize(output) -> bytes:
        seen.append(threading.get_ident())
        threading.Event().wait(0.02)
        return b"png" * len(output.images)

    result = engine.submit(make("a", num_outputs_per_prompt=2), finalize=finalize).result(DEADLINE_S)
    assert result.payload == b"pngpng"
    assert seen[0] not in executor.threads
    assert seen[0] != threading.get_ident()
    assert result.record.seconds()["postprocess"] >= 0.02
