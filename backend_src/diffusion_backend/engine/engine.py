"""The loop: wait for work, decide under the lock, execute without it, update under it, deliver without it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from ..errors import (
    DeadlineExceededError,
    DiffusionError,
    EngineStoppedError,
    ExecutorError,
    InvalidArgumentError,
    PipelineError,
    QueueFullError,
    RequestCancelledError,
)
from ..request import DeferredOutput, DiffusionOutput, DiffusionRequest, DiffusionResult, Event, EventKind
from ..telemetry import MemorySink, Telemetry
from ..timing import RequestRecord, now
from .delivery import Delivery
from .executor import Capabilities, Executor, Report, WorkKind
from .handle import Finalize, OnEvent, OnWork, RequestHandle
from .scheduler import Group, Scheduler, State

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of the engine.

    Attributes:
        max_num_seqs: requests that run at once.
        max_batch_rows: rows in one forward.
        max_waiting: requests that wait in the engine's own queue.
        num_finishers: threads that finish (encode) results.
    """

    max_num_seqs: int = 16
    max_batch_rows: int = 32
    max_waiting: int = 4096
    num_finishers: int = 2


class DiffusionEngine:
    """Runs requests on one executor, many at a time, step by step.

    One lock guards the scheduler and the small state beside it, and is never held while the executor, a caller's
    function or a metric sink is called. Threads sleep on conditions of that lock; nothing in here polls.

    Args:
        executor: what runs the pipeline; the engine thread is its only caller.
        config: limits.
        telemetry: where metrics go; by default into a sink that nobody reads.
        scheduler: makes the scheduler from the limits; a subclass of `Scheduler` to order requests otherwise.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig | None = None,
        telemetry: Telemetry | None = None,
        *,
        scheduler: type[Scheduler] = Scheduler,
    ) -> None:
        self.config = config or EngineConfig()
        self.num_wakeups = 0  # of the engine thread; a test shows that an idle engine has none
        self._executor = executor
        self._telemetry = telemetry or Telemetry(MemorySink())
        self._capabilities = executor.capabilities
        self._scheduler = scheduler(
            max_num_seqs=1 if self._capabilities.exclusive else self.config.max_num_seqs,
            max_batch_rows=self.config.max_batch_rows,
            max_waiting=self.config.max_waiting,
        )
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # the engine thread sleeps here
        self._slots = threading.Condition(self._lock)  # callers of wait_for_slot sleep here
        self._idle = threading.Condition(self._lock)  # a draining shutdown sleeps here
        self._deadlines = threading.Condition(self._lock)  # the deadline thread sleeps here
        self._handles: dict[str, RequestHandle] = {}
        self._doomed: dict[str, DiffusionError] = {}  # running ones that are to be aborted
        self._controls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._stopped_reason: str | None = "the engine has not been started"
        self._exit = False
        self._is_broken = False
        self._delivery = Delivery(self.config.num_finishers)
        self._thread = threading.Thread(target=self._run, name="diffusion-engine", daemon=True)
        self._deadline_thread = threading.Thread(target=self._keep_deadlines, name="diffusion-deadlines", daemon=True)

    # -- for callers --------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """What the loaded pipeline can do; resolved once, when it was loaded."""
        return self._capabilities

    @property
    def supports_audio_output(self) -> bool:
        """Whether the pipeline makes sound."""
        return self._capabilities.supports_audio_output

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._stopped_reason is None

    def start(self) -> None:
        """Start the engine's threads; called once."""
        self._stopped_reason = None
        self._delivery.put(lambda: self._telemetry.verdicts(self._capabilities.joint))
        self._delivery.start()
        self._deadline_thread.start()
        self._thread.start()

    def submit(
        self,
        request: DiffusionRequest,
        *,
        on_event: OnEvent | None = None,
        finalize: Finalize | None = None,
        on_work: OnWork | None = None,
    ) -> RequestHandle:
        """Put a request into the queue and return at once; any thread may call it.

        Args:
            request: what to make.
            on_event: called with each event, in order, by a thread of the engine that it should not hold up for long
                (never the one that runs the device); with None the events are kept for `RequestHandle.events`.
            finalize: turns the output into what the caller needs (encodes it, say), on a thread of its own; what it
                returns is the result's `payload`, and its time is part of the request's `postprocess` phase.
            on_work: called by the engine thread after each unit of work of the request, with the group that was
                executed and what came of it for this request; it must return at once, and not raise.

        Raises:
            InvalidArgumentError: a live request has the same id.
            QueueFullError: `max_waiting` requests wait.
            EngineStoppedError: the engine is stopping.
        """
        request_id = request.request_id
        submitted = now()
        handle = RequestHandle(self, request, RequestRecord(submitted), on_event, finalize, on_work)
        try:
            with self._lock:
                if self._stopped_reason is not None:
                    raise EngineStoppedError(self._stopped_reason, request_id=request_id)
                if self._scheduler.state(request_id) is not None:
                    raise InvalidArgumentError("request_id", "a live request has the same id", request_id=request_id)
                if self._scheduler.is_full:
                    raise QueueFullError(self.config.max_waiting, request_id=request_id)
                deadline = None if request.timeout_s is None else submitted + request.timeout_s
                self._scheduler.add(request_id, priority=request.priority, deadline=deadline)
                self._handles[request_id] = handle
                self._delivery.put(self._telemetry.waiting)
                self._tell(handle, Event(EventKind.QUEUED, request_id, submitted))
                self._work.notify()
                if deadline is not None:
                    self._deadlines.notify()
        except DiffusionError as error:
            self.reject(error)
            raise
        return handle

    def reject(self, error: DiffusionError) -> None:
        """Count a request that the caller refused itself with `error`, before submitting it."""
        self._delivery.put(lambda: self._telemetry.rejected(error.reason))

    def add_req_and_wait_for_response(self, request: DiffusionRequest) -> DiffusionResult:
        """Submit a request and sleep until it has ended; raises what it ended with."""
        return self.submit(request).result()

    def wait_for_slot(self) -> None:
        """Sleep until a request submitted now would run at once, or the engine stops."""
        with self._lock:
            self._slots.wait_for(lambda: self._scheduler.num_free_slots > 0 or self._stopped_reason is not None)

    def abort(self, request_id: str, error: DiffusionError | None = None) -> None:
        """Give a request up; any thread may call it, unknown and ended ids are ignored.

        A waiting request is answered here and now; a running one is ended by the engine thread before the next
        forward; one whose pipeline has returned ends as it is.

        Args:
            error: what it ends with; `RequestCancelledError` by default.
        """
        with self._lock:
            ended = self._give_up(request_id, error or RequestCancelledError(request_id=request_id))
        if ended is not None:
            ended[0].deliver(ended[1])

    def collective_rpc(self, method: Callable[[Executor], T] | str, *args: Any, timeout: float | None = None) -> T:
        """Run a control call on the engine thread between two steps, and sleep until it has returned.

        Args:
            method: a function of the executor, or the name of one of its methods.
            args: further arguments.
            timeout: seconds to wait at most.

        Raises:
            EngineStoppedError: the engine is stopped.
            TimeoutError: `timeout` passed first; the call still runs.
            Exception: what the call raised.
        """
        future: Future[T] = Future()

        def call() -> T:
            if isinstance(method, str):
                return cast("T", getattr(self._executor, method)(*args))
            return method(self._executor, *args)

        with self._lock:
            if self._exit or not self._thread.is_alive():
                raise EngineStoppedError("the engine is stopped")
            self._controls.append((call, future))
            self._work.notify()
        return future.result(timeout)

    def stats(self) -> dict[str, int]:
        """Return the counts of requests at one instant; accepted is always the sum of the others."""
        with self._lock:
            ended = {state.value: count for state, count in self._scheduler.num_ended.items()}
            return {
                "accepted": self._scheduler.num_accepted,
                "waiting": self._scheduler.num_waiting,
                "running": self._scheduler.num_running,
                **ended,
            }

    def turn_away(self, *, running: bool = True) -> None:
        """Take nothing new, give up the waiting requests at once and (with `running`) the others at their next step.

        Any thread may call it; `shutdown` is still to come.
        """
        with self._lock:
            self._stopped_reason = self._stopped_reason or "the server is stopping"
            live = [i for i in self._scheduler.live() if running or self._is_waiting(i)]
            told = [self._give_up(i, self._stopping(i)) for i in live]
            self._slots.notify_all()
        for ended in told:
            if ended is not None:
                ended[0].deliver(ended[1])

    def shutdown(self, *, drain_s: float = 0.0) -> None:
        """Take nothing new, tell the waiting ones, let the running ones go on for `drain_s` seconds, then stop.

        Every request has its final event when this returns. Called by one thread, once.
        """
        self.turn_away(running=False)
        with self._lock:
            if self._thread.is_alive():
                self._idle.wait_for(lambda: self._scheduler.num_running == 0, drain_s)
                for request_id in self._scheduler.live():
                    self._give_up(request_id, self._stopping(request_id))
                self._idle.wait_for(lambda: self._scheduler.num_running == 0)
            self._exit = True
            self._work.notify_all()
            self._deadlines.notify_all()
        for thread in (self._thread, self._deadline_thread):
            if thread.ident is not None:
                thread.join()
        if self._thread.ident is not None:  # the engine was started, and so was the delivery
            self._delivery.stop()

    def break_down(self, reason: str, error: Callable[[str], DiffusionError], *, wait_s: float = 0.0) -> None:
        """Take nothing any more and answer everybody at once, though the engine thread may never come back.

        For a watchdog; any thread may call it. Requests whose pipeline has returned still end with their results.

        Args:
            reason: what those are told who come later.
            error: makes what the request of an id ends with.
            wait_s: seconds to wait, at most, until the answers have been handed over.
        """
        with self._lock:
            self._stopped_reason = reason
            self._exit = self._is_broken = True
            controls, self._controls = self._controls, deque()
            for _, future in controls:
                future.set_exception(error(""))
            for request_id in self._scheduler.live():
                handle = self._handles[request_id]
                if self._is_waiting(request_id) or self._scheduler.holds_slot(request_id):
                    self._tell(handle, self._end(handle, error(request_id)))
            self._doomed.clear()
            self._work.notify()  # the engine thread ends, if it can
            self._slots.notify_all()
            self._idle.notify_all()
            self._deadlines.notify_all()
            if wait_s:
                self._idle.wait_for(lambda: self._scheduler.num_running == 0, wait_s)
        if wait_s:
            self._delivery.flush(wait_s)

    def _dummy_run(self, height: int | None = None, width: int | None = None) -> None:
        """Warm the pipeline up for one size (pixels; None for its own), between two steps."""
        self.collective_rpc("_dummy_run", height, width)

    # -- the engine thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._executor.start()
            while self._wait_for_work():
                self.step()
        except BaseException as error:
            log.exception("the engine thread died")
            self._die(error)
        finally:
            self._executor.close()

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when the engine is to exit."""
        with self._lock:
            while not (self._controls or self._doomed or self._scheduler.has_work):
                if self._exit:
                    return False
                self._work.wait()
                self.num_wakeups += 1
            return True

    def step(self) -> None:
        """Do the next thing: control calls and aborts first, then one unit of work of one group.

        Called by the engine thread only.
        """
        with self._lock:
            controls, self._controls = self._controls, deque()
            doomed, self._doomed = self._doomed, {}
        for call, future in controls:
            try:
                future.set_result(call())
            except BaseException as error:  # a control call that exits is the caller's affair, not the engine's end
                future.set_exception(error)
        if doomed:
            self._update([self._abort_in_executor(request_id, error) for request_id, error in doomed.items()])
        with self._lock:
            admitted = [self._handles[request_id] for request_id in self._scheduler.admit()]
        self._take_in(admitted)
        with self._lock:
            group = self._scheduler.next_group()
        if group is not None:
            self._execute(group)

    def _take_in(self, admitted: list[RequestHandle]) -> None:
        for handle in admitted:
            handle.record.started = now()
            self._delivery.put(self._telemetry.running)
            self._tell(handle, Event(EventKind.STARTED, handle.request.request_id, handle.record.started))
            try:
                self._executor.add_req(handle.request)
            except DiffusionError as error:
                self._update([Report(handle.request.request_id, error=error)])
            except Exception as error:
                log.exception("the executor did not take a request in")
                self._update([Report(handle.request.request_id, error=ExecutorError(error))])

    def _execute(self, group: Group) -> None:
        begin = now()
        try:
            reports = self._executor.execute(group.kind, group.request_ids)
        except Exception as error:
            log.exception("the executor failed")
            reports = [self._lose_in_executor(i, error) for i in group.request_ids]
        seconds = now() - begin
        with self._lock:
            if self._is_broken:
                return  # a watchdog has given up on this unit of work, and told everybody
            self._scheduler.charge(group, seconds)
            watchers = [self._handles[report.request_id].on_work for report in reports]
        steps = sum(event.kind is EventKind.STEP for report in reports for event in report.events)
        if group.kind is not WorkKind.FORWARD:
            if steps:  # of a pipeline whose denoiser is no meeting point
                self._delivery.put(lambda: self._telemetry.steps(steps))
        else:
            self._delivery.put(lambda: self._telemetry.forward(group.rows, seconds, steps))
            if group.solo_reason is not None:
                reason = group.solo_reason
                self._delivery.put(lambda: self._telemetry.solo(reason))
        for use in [report.prompt_cache for report in reports if report.prompt_cache is not None]:
            self._delivery.put(partial(self._telemetry.prompt_cache, use.hits, use.misses, use.bytes_added))
        for on_work, report in zip(watchers, reports, strict=True):
            if on_work is not None:
                on_work(group, report)
        self._update(reports)

    def _abort_in_executor(self, request_id: str, error: DiffusionError) -> Report:
        try:
            return self._executor.abort(request_id, error)
        except Exception as broken:
            log.exception("the executor failed to abort a request")
            return Report(request_id, error=ExecutorError(broken, request_id=request_id))

    def _lose_in_executor(self, request_id: str, cause: Exception) -> Report:
        """Make the executor forget a request over which it broke, if it still holds it."""
        error = ExecutorError(cause, request_id=request_id)
        try:
            self._executor.abort(request_id, error)
        except Exception as broken:
            log.debug("the executor did not hold request %s any more: %r", request_id, broken)
        return Report(request_id, error=error)

    def _update(self, reports: list[Report]) -> None:
        """Bring what the executor reported into the scheduler, and pass on what callers are to know."""
        with self._lock:
            if self._is_broken:
                return  # everybody has been answered meanwhile
            for report in reports:
                handle = self._handles[report.request_id]
                _note(handle.record, report)
                for event in report.events:
                    self._tell(handle, event)
                if report.work is not None:
                    self._scheduler.set_work(report.request_id, report.work)
                elif report.output is not None:
                    self._doomed.pop(report.request_id, None)
                    self._scheduler.release(report.request_id)
                    self._delivery.put_slow(partial(self._finish, handle, report.output))
                else:
                    assert report.error is not None
                    self._doomed.pop(report.request_id, None)
                    report.error.request_id = report.error.request_id or report.request_id
                    final = self._end(handle, report.error)
                    self._tell(handle, final)
            if self._scheduler.num_free_slots > 0:
                self._slots.notify_all()

    # -- ends ---------------------------------------------------------------------------------------------------

    def _finish(self, handle: RequestHandle, made: DiffusionOutput | DeferredOutput) -> None:
        """Finish a result and hand it out; on a thread of the pool."""
        request = handle.request
        try:
            output = made.get() if isinstance(made, DeferredOutput) else made
            payload = handle.finalize(output) if handle.finalize is not None else None
        except Exception as cause:
            log.exception("finishing a result failed")
            error = cause if isinstance(cause, DiffusionError) else PipelineError(cause, where="while encoding")
            error.request_id = request.request_id
            with self._lock:
                final = self._end(handle, error)
            handle.deliver(final)
            return
        handle.record.finished = now()
        try:
            for modality in output.modalities:
                self._telemetry.outputs(modality, request.num_outputs)
            self._telemetry.ended("completed", handle.record, ran=True)
        except Exception:  # a broken metric sink must not keep the result from its caller
            log.exception("a metric could not be written")
        result = DiffusionResult(output, request.seeds, handle.record, payload)
        with self._lock:
            self._forget(request.request_id, State.FINISHED)
        handle.deliver(_final_event(EventKind.FINISHED, handle, result=result))

    def _give_up(self, request_id: str, error: DiffusionError) -> tuple[RequestHandle, Event] | None:
        """Doom a running request, or end a waiting one: then return what to deliver without the lock. Lock held."""
        handle = self._handles.get(request_id)
        if handle is None:
            return None
        if self._is_waiting(request_id):
            return handle, self._end(handle, error)
        if self._scheduler.holds_slot(request_id) and request_id not in self._doomed:
            self._doomed[request_id] = error
            self._work.notify()
        return None

    def _end(self, handle: RequestHandle, error: DiffusionError) -> Event:
        """Take a request out that ends without a result; return its final event. Lock held."""
        request_id = handle.request.request_id
        cancelled = isinstance(error, RequestCancelledError)
        ran = not self._is_waiting(request_id)
        self._forget(request_id, State.CANCELLED if cancelled else State.FAILED)
        record = handle.record
        record.finished = now()
        if record.step < record.num_steps:
            record.last_step = None  # it ended in the middle of its steps: there was no time after them
        reason = None if cancelled else error.reason
        self._delivery.put(
            lambda: self._telemetry.ended("cancelled" if cancelled else "failed", record, ran=ran, reason=reason),
        )
        kind = EventKind.CANCELLED if cancelled else EventKind.FAILED
        return _final_event(kind, handle, error=error)

    def _forget(self, request_id: str, state: State) -> None:
        """Take a request out of the books. Lock held."""
        self._scheduler.end(request_id, state)
        del self._handles[request_id]
        if self._scheduler.num_free_slots > 0:
            self._slots.notify_all()
        if self._scheduler.num_running == 0:
            self._idle.notify_all()

    def _tell(self, handle: RequestHandle, event: Event) -> None:
        self._delivery.put(lambda: _deliver(handle, event))

    def _is_waiting(self, request_id: str) -> bool:
        return self._scheduler.state(request_id) is State.WAITING

    def _stopping(self, request_id: str) -> EngineStoppedError:
        return EngineStoppedError(self._stopped_reason or "the server is stopping", request_id=request_id)

    def _die(self, cause: BaseException) -> None:
        """Answer everybody after the engine thread broke; nothing is taken any more."""
        self.break_down("the engine has failed", lambda request_id: ExecutorError(cause, request_id=request_id))

    # -- the deadline thread ------------------------------------------------------------------------------------

    def _keep_deadlines(self) -> None:
        """Sleep until the nearest deadline, give up whoever missed it, and again; without deadlines, sleep."""
        while True:
            with self._lock:
                if self._exit:
                    return
                nearest = self._scheduler.next_deadline()
                left = None if nearest is None else nearest - now()
                if left is None or left > 0:
                    self._deadlines.wait(left)
                    continue
                ended = [self._miss(request_id) for request_id in self._scheduler.pop_expired(now())]
            for answer in ended:
                if answer is not None:
                    answer[0].deliver(answer[1])

    def _miss(self, request_id: str) -> tuple[RequestHandle, Event] | None:
        timeout = self._handles[request_id].request.timeout_s
        assert timeout is not None
        where = "while it waited" if self._is_waiting(request_id) else "while it ran"
        return self._give_up(request_id, DeadlineExceededError(timeout, request_id=request_id, where=where))


def _deliver(handle: RequestHandle, event: Event) -> None:
    handle.deliver(event)


def _final_event(
    kind: EventKind,
    handle: RequestHandle,
    *,
    result: DiffusionResult | None = None,
    error: DiffusionError | None = None,
) -> Event:
    record = handle.record
    assert record.finished is not None
    return Event(
        kind,
        handle.request.request_id,
        record.finished,
        record.step,
        record.num_steps,
        result=result,
        error=error,
        record=record,
    )


def _note(record: RequestRecord, report: Report) -> None:
    """Write the instants that a report tells of into the record."""
    record.params.update(report.params)
    if record.first_forward is None and report.work is not None and report.work.kind is not WorkKind.START:
        record.first_forward = now()
    for event in report.events:
        if event.kind is EventKind.STEP:
            record.first_step = record.first_step or event.at
            record.last_step = event.at
            record.step, record.num_steps = event.step, event.num_steps
