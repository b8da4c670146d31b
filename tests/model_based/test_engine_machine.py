"""Random lives of an engine against the plain model: submits, aborts, deadlines, priorities, faults, control calls.

Every rule is something that some thread does; what happens while a forward runs is drawn with the turn that runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diffusion_backend.engine import EngineConfig
from diffusion_backend.errors import (
    DeadlineExceededError,
    EngineStoppedError,
    ExecutorError,
    InvalidArgumentError,
    QueueFullError,
    RequestCancelledError,
)
from tests.model_based.effort import EFFORT
from tests.model_based.model import FAULTS, Known, Model
from tests.model_based.stepped import SteppedEngine
from tests.support.fakes import make

Action = Callable[[], None]

REQUESTS = st.fixed_dictionaries(
    {
        "steps": st.sampled_from([3, 4, 2, 1]),
        "priority": st.integers(0, 2),
        "rows": st.integers(1, 4),
        "key": st.sampled_from("aab"),
        "timeout_s": st.sampled_from([None, None, 0.5, 3.0]),
        "solo": st.sampled_from([False, False, False, True]),
        "decode": st.integers(0, 2),
        "fault": st.sampled_from([None] * 2 * len(FAULTS) + [*FAULTS, "abort"]),
    }
)
MEANWHILE = st.lists(st.one_of(REQUESTS, st.integers(0, 30), st.floats(0.1, 2.0)), max_size=1)
"""What other threads do while a forward runs: submit, abort the n-th request, let time pass."""


class EngineMachine(RuleBasedStateMachine):
    """The engine, its model, and the rules that move both."""

    @initialize(
        seqs=st.sampled_from([4, 3, 2, 1]),
        rows=st.integers(2, 8),
        waiting=st.integers(1, 5),
        first=st.lists(REQUESTS, min_size=3, max_size=8),
    )
    def begin(self, seqs: int, rows: int, waiting: int, first: list[dict[str, Any]]) -> None:
        self.limits = EngineConfig(max_num_seqs=seqs, max_batch_rows=rows, max_waiting=waiting)
        self.stepped = SteppedEngine(self.limits)
        self.model = Model(self.limits)
        self.controls: list[tuple[int, Future[Any]]] = []
        self.controls_run: list[int] = []
        self.num_controls = 0
        self.is_stopped = False
        for params in first:
            self._submit(params)

    # -- rules --------------------------------------------------------------------------------------------------

    @rule(several=st.lists(REQUESTS, min_size=1, max_size=6))
    def submit_several(self, several: list[dict[str, Any]]) -> None:
        for params in several:
            self._submit(params)

    def _submit(self, params: dict[str, Any]) -> None:
        number = len(self.model.requests)
        known = Known(
            f"r{number}",
            params["priority"],
            number,
            params["steps"],
            None if params["timeout_s"] is None else self.stepped.clock.at + params["timeout_s"],
            params["fault"],
        )
        if params["fault"] == "decode_fails" and not params["decode"]:
            known.may_end_with = {None}
        request = make(known.request_id, known.steps, priority=known.priority, **_script(params))

        def on_event(event: Any) -> None:
            known.events.append(event)
            self.model.check_events(known)
            raise RuntimeError("a caller's function that raises")

        finalize = _refuse if params["fault"] == "finalize" else None
        expected = EngineStoppedError if self.is_stopped else QueueFullError if self.model.is_full else None
        if expected is not None:
            with pytest.raises(expected):
                self.stepped.engine.submit(request, on_event=on_event, finalize=finalize)
            return
        self.model.requests[known.request_id] = known
        self.stepped.engine.submit(request, on_event=on_event, finalize=finalize)

    @precondition(lambda self: not self.is_stopped and self.model.of("waiting"))
    @rule()
    def submit_a_live_id_again(self) -> None:
        with pytest.raises(InvalidArgumentError, match="a live request has the same id"):
            self.stepped.engine.submit(make(self.model.of("waiting")[0].request_id))

    @rule(index=st.integers(0, 30))
    def abort(self, index: int) -> None:
        ids = [*self.model.requests]
        if index >= len(ids):
            self.stepped.engine.abort(f"unknown {index}")
            return
        known = self.model.requests[ids[index]]
        waited = known.state == "waiting"
        self.model.give_up(known.request_id, RequestCancelledError)
        self.stepped.engine.abort(known.request_id)
        assert not waited or known.final is not None, "a waiting request is answered at once"

    @rule(seconds=st.floats(0.1, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.stepped.clock.at += seconds
        self._deadlines()

    @precondition(lambda self: self.stepped.is_alive)
    @rule(raises=st.booleans())
    def control(self, raises: bool) -> None:
        number, self.num_controls = self.num_controls, self.num_controls + 1

        def call(_executor: Any) -> None:
            self.controls_run.append(number)
            if raises:
                raise SystemExit

        with pytest.raises(TimeoutError):
            self.stepped.engine.collective_rpc(call, timeout=0)
        self.controls.append((number, self.stepped._inside._controls[-1][1]))

    @precondition(lambda self: self.stepped.is_alive and self.stepped.has_work)
    @rule(seconds=st.floats(0.0, 1.0), meanwhile=st.lists(MEANWHILE, min_size=3, max_size=12))
    def turns(self, seconds: float, meanwhile: list[list[Any]]) -> None:
        for actions in meanwhile:
            if self.stepped.has_work:
                self._turn(seconds, actions, dies=False)
                self.conserves()

    @precondition(lambda self: self.stepped.is_alive and self.model.of("slot") and len(self.model.requests) > 12)
    @rule()
    def the_engine_thread_dies(self) -> None:
        self._turn(0.0, [], dies=True)

    @precondition(lambda self: self.stepped.delivery.jobs)
    @rule(count=st.integers(1, 20))
    def deliver(self, count: int) -> None:
        self.stepped.delivery.pump(count)

    @precondition(lambda self: self.stepped.delivery.slow)
    @rule(index=st.integers(0, 3))
    def finish(self, index: int) -> None:
        slow = self.stepped.delivery.slow
        slow.pop(index % len(slow))()

    # -- what the rules are made of -----------------------------------------------------------------------------

    def _turn(self, seconds: float, meanwhile: list[Any], *, dies: bool) -> None:
        executor, model = self.stepped.executor, self.model
        executor.seconds, executor.dies = seconds, dies
        doomed = [known for known in model.of("slot") if len(known.may_end_with) > 1 and self._is_doomed(known)]
        for known in doomed:
            known.state = "done"
        admitted = model.admitted_next()
        for request_id in admitted:
            model.requests[request_id].state = "slot"

        def others() -> None:
            self._look()
            for action in meanwhile:
                self._do(action)

        executor.meanwhile = others
        begin = len(executor.log)
        self.stepped.turn()
        executor.meanwhile = lambda: None
        self._look()
        called = executor.log[begin:]
        assert [ids[0] for what, ids in called if what == "add_req"] == admitted, "the order of admission"
        left = [known.request_id for known in doomed if known.request_id in executor.live]
        assert not left, f"{left} were given up, and run on"
        assert self.controls_run == [number for number, _ in self.controls], "a control call did not run, or twice"
        assert all(future.done() for _, future in self.controls)
        if not self.stepped.is_alive:
            assert dies
            self._die()

    def _is_doomed(self, known: Known) -> bool:
        return known.request_id in self.stepped._inside._doomed

    def _die(self) -> None:
        self.is_stopped = True
        for known in self.model.requests.values():
            if known.state != "done":
                known.state = "done"
                known.may_end_with = {ExecutorError}

    def _do(self, action: Any) -> None:
        if isinstance(action, dict):
            self._submit(action)
        elif isinstance(action, int):
            self.abort(action)
        else:
            self.time_passes(action)

    def _deadlines(self) -> None:
        now = self.stepped.clock.at
        late = [k for k in self.model.requests.values() if k.deadline is not None and k.deadline <= now]
        for known in late:
            known.deadline = None
            self.model.give_up(known.request_id, DeadlineExceededError)
        waited = [known for known in late if known.state == "done" and known.may_end_with == {DeadlineExceededError}]
        self.stepped.keep_deadlines()
        assert all(known.final is not None for known in waited), "a waiting request is told at its deadline"

    def _look(self) -> None:
        """Take over what the executor has seen."""
        executor = self.stepped.executor
        for request_id in executor.gone:
            self.model.requests[request_id].state = "done"
        for request_id in executor.broken:
            self.model.requests[request_id].may_end_with.add(ExecutorError)
        executor.gone.clear()
        executor.broken.clear()

    # -- what always holds --------------------------------------------------------------------------------------

    @invariant()
    def conserves(self) -> None:
        stats, model = self.stepped.engine.stats(), self.model
        assert self.stepped.executor.violations == []
        assert stats["accepted"] == len(model.requests)
        assert stats["accepted"] == sum(count for name, count in stats.items() if name != "accepted")
        assert stats["waiting"] == len(model.of("waiting"))
        assert stats["waiting"] <= self.limits.max_waiting + self.limits.max_num_seqs
        assert len(model.of("slot")) <= self.limits.max_num_seqs
        assert self.stepped.num_free_slots == model.num_free_slots or self.is_stopped
        told = model.counts()
        assert all(told[name] <= stats[name] for name in told)
        if not self.stepped.delivery.jobs and not self.stepped.delivery.slow:
            self._check_books(stats, told)

    def _check_books(self, stats: dict[str, int], told: dict[str, int]) -> None:
        """With everything delivered, callers, statistics and metrics agree."""
        assert {name: stats[name] for name in told} == told
        values = self.stepped.sink.values
        assert values["diffusion_requests_waiting", ()] == stats["waiting"]
        assert values["diffusion_requests_running", ()] == stats["running"]
        counted = {
            name: sum(v for (n, labels), v in values.items() if n == "diffusion_requests_total" and outcome in labels)
            for name, outcome in (("finished", "completed"), ("failed", "failed"), ("cancelled", "cancelled"))
        }
        assert counted == told

    def teardown(self) -> None:
        if not hasattr(self, "stepped"):
            return
        try:
            self._stop()
        finally:
            self.stepped.close()

    def _stop(self) -> None:
        """Stop the engine: everybody has an end then, one only."""
        self._look()
        self.is_stopped = True
        drain_s = 60.0 if len(self.model.requests) % 2 else 0.0
        self.model.stop()
        self.stepped.executor.seconds = 0.0
        self.stepped.shutdown(drain_s)
        self._look()
        for known in self.model.requests.values():
            assert known.final is not None, f"{known.request_id} has no end"
            self.model.check_events(known)
            known.state = "done"
        self.conserves()
        with pytest.raises(EngineStoppedError):
            self.stepped.engine.submit(make("late"))


def _script(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a request as `ScriptedExecutor` wants them."""
    fault, script = params["fault"], {name: params[name] for name in ("rows", "key", "timeout_s", "decode")}
    if params["solo"]:
        script["solo_reason"] = "alone"
    if fault in ("add_req", "start", "forward", "abort"):
        script["raise_in"] = fault
    elif fault in ("fail_at", "oom"):
        script[fault] = params["steps"]
    elif fault in ("decode_fails", "deferred_fails"):
        script[fault] = True
    return script


def _refuse(_output: Any) -> None:
    raise InvalidArgumentError("output_format", "no such")


TestEngine = EngineMachine.TestCase
TestEngine.settings = EFFORT
