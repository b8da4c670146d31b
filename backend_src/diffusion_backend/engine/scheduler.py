"""Who waits, who runs, and which group runs next. Pure bookkeeping: no torch, no clock, no threads, no I/O.

Waiting requests are admitted by priority, then in order of arrival. Among the running ones the next group is led by
the request with the least device time, so that one huge request never starves many small ones and still ends:

- `device_time` of a request grows by its share (1/n) of the time of each forward that it is in, and by its decodes;
- a newcomer starts at the device time of the last leader, so that it is served soon, and yet a stream of newcomers
  cannot starve the old ones (the virtual time of start-time fair queueing: Goyal, Vin and Cheng, 1996);
- a START does not wait for its turn, so that forwards fill without delay, and costs no device time; but between two
  forwards no more of them run than there are slots, however many requests fail at their start;
- a DECODE does not wait for its turn either, as the request is all but done and only its result is missing; but
  between two forwards they take no longer than half a forward, or one of them runs: however many requests end at once,
  and in however many pieces a video is decoded, the steps of the others go on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from .executor import Work, WorkKind


class State(StrEnum):
    """Where a request stands; the last three are final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Group:
    """The next thing to execute: one unit of work for one request, or one forward for several."""

    kind: WorkKind
    request_ids: tuple[str, ...]
    rows: int
    solo_reason: str | None = None


@dataclass(slots=True)
class Entry:
    """The books of one live request.

    Attributes:
        arrival: the how-manieth request it is.
        work: what it needs next; None while it waits, and after it has been released.
        device_time: seconds of forwards and decodes charged to it.
    """

    request_id: str
    priority: int
    arrival: int
    deadline: float | None
    work: Work | None = None
    device_time: float = 0.0


class Scheduler:
    """The waiting and the running set. Every method is called with the engine's lock held.

    Args:
        max_num_seqs: most requests that hold a slot at once.
        max_batch_rows: most rows in one forward; a single work with more rows runs by itself.
        max_waiting: most requests that wait.
    """

    def __init__(self, *, max_num_seqs: int, max_batch_rows: int, max_waiting: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_batch_rows = max_batch_rows
        self.max_waiting = max_waiting
        self.num_accepted = 0
        self.num_ended: dict[State, int] = {State.FINISHED: 0, State.FAILED: 0, State.CANCELLED: 0}
        self._waiting: dict[str, Entry] = {}
        self._running: dict[str, Entry] = {}
        self._slots: dict[str, Entry] = {}  # the running ones that still need the device
        self._heap: list[tuple[int, int, str]] = []  # of the waiting; ended ones are skipped when they surface
        self._deadlines: list[tuple[float, str]] = []  # likewise, of all live ones
        self._virtual_time = 0.0  # never falls
        self._step_seconds = 0.0  # of the last forward or step
        self._decode_seconds = 0.0  # since then
        self._may_decode = True  # before the next one
        self._num_starts = 0  # since the last one

    # -- counts -------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests admitted and not ended (those whose result is being finished included)."""
        return len(self._running)

    @property
    def num_free_slots(self) -> int:
        """Slots that a request submitted now would get at once."""
        return max(0, self.max_num_seqs - len(self._slots) - len(self._waiting))

    @property
    def has_work(self) -> bool:
        """Whether a waiting request can be admitted or a running one needs the device."""
        return bool(self._slots) or bool(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether no further request may wait; those that free slots are for, only not admitted yet, do not count."""
        about_to_run = max(0, self.max_num_seqs - len(self._slots))
        return len(self._waiting) - about_to_run >= self.max_waiting

    def state(self, request_id: str) -> State | None:
        """Return WAITING or RUNNING, or None if the request is not live."""
        if request_id in self._waiting:
            return State.WAITING
        return State.RUNNING if request_id in self._running else None

    # -- life of a request --------------------------------------------------------------------------------------

    def add(self, request_id: str, *, priority: int = 0, deadline: float | None = None) -> None:
        """Put a new request among the waiting; called by the thread that submits."""
        assert self.state(request_id) is None, f"{request_id} is live already"
        assert not self.is_full
        entry = Entry(request_id, priority, self.num_accepted, deadline)
        self.num_accepted += 1
        self._waiting[request_id] = entry
        heapq.heappush(self._heap, (priority, entry.arrival, request_id))
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, request_id))

    def admit(self) -> list[str]:
        """Move waiting requests into free slots; return their ids. Called by the engine thread before `next_group`."""
        admitted = []
        while self._waiting and len(self._slots) < self.max_num_seqs:
            _, arrival, request_id = heapq.heappop(self._heap)
            entry = self._waiting.get(request_id)
            if entry is None or entry.arrival != arrival:
                continue
            del self._waiting[request_id]
            entry.device_time = self._virtual_time
            entry.work = Work(WorkKind.START, ("start", request_id), rows=0)
            self._running[request_id] = self._slots[request_id] = entry
            admitted.append(request_id)
        return admitted

    def next_group(self) -> Group | None:
        """Return what to execute next, or None if no running request needs the device."""
        ready = sorted((e for e in self._slots.values() if e.work is not None), key=self.turn)
        if not ready:
            return None
        steps = [entry for entry in ready if _kind(entry) in (WorkKind.FORWARD, WorkKind.STEP)]
        leader = self._out_of_turn(ready, anyway=not steps)
        if leader is None:
            leader = steps[0]
            self._virtual_time = max(self._virtual_time, leader.device_time)
        work = leader.work
        assert work is not None
        if work.kind is not WorkKind.FORWARD or work.solo_reason is not None:
            return Group(work.kind, (leader.request_id,), work.rows, work.solo_reason)
        members, rows = [leader.request_id], work.rows
        max_rows = self.max_batch_rows if work.max_rows is None else min(work.max_rows, self.max_batch_rows)
        for entry in steps[1:]:
            other = entry.work
            assert other is not None
            if other.kind is not WorkKind.FORWARD or other.key != work.key:
                continue
            # A call that parked after memory had set a limit knows of it, one that parked before does not.
            limit = max_rows if other.max_rows is None else min(other.max_rows, max_rows)
            if rows + other.rows <= limit:
                members.append(entry.request_id)
                rows += other.rows
                max_rows = limit
        return Group(WorkKind.FORWARD, tuple(members), rows)

    def _out_of_turn(self, ready: Iterable[Entry], *, anyway: bool) -> Entry | None:
        """Return the request whose DECODE or START goes before the next step; with `anyway` there is no step."""
        decode = next((entry for entry in ready if _kind(entry) is WorkKind.DECODE), None)
        if decode is not None and (anyway or self._may_decode):
            return decode
        start = next((entry for entry in ready if _kind(entry) is WorkKind.START), None)
        if start is not None and (anyway or self._num_starts < self.max_num_seqs):
            return start
        return None

    def turn(self, entry: Entry) -> tuple[float, ...]:
        """Return whose turn it is: the smallest leads the next group. A subclass may order otherwise."""
        return (entry.device_time, entry.arrival)

    def charge(self, group: Group, seconds: float) -> None:
        """Add each member's share of the time of a forward, step or decode that has just run to its device time."""
        if group.kind is WorkKind.START:
            self._num_starts += 1
            return
        if group.kind is WorkKind.DECODE:
            self._decode_seconds += seconds
            # The next one is taken to be like this one.
            self._may_decode = self._decode_seconds + seconds <= self._step_seconds / 2
        else:
            self._step_seconds, self._decode_seconds, self._may_decode = seconds, 0.0, True
            self._num_starts = 0
        for request_id in group.request_ids:
            self._running[request_id].device_time += seconds / len(group.request_ids)

    def set_work(self, request_id: str, work: Work) -> None:
        """Say what a running request needs next."""
        self._slots[request_id].work = work

    def release(self, request_id: str) -> None:
        """Free the slot of a running request that needs the device no more; it stays running until `end`."""
        self._leave(request_id)
        self._running[request_id].work = None

    def end(self, request_id: str, state: State) -> None:
        """Take a live request out for good."""
        if request_id in self._slots:
            self._leave(request_id)
        if self._waiting.pop(request_id, None) is None:
            del self._running[request_id]
        self.num_ended[state] += 1
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._waiting):
            self._heap = [(e.priority, e.arrival, e.request_id) for e in self._waiting.values()]
            heapq.heapify(self._heap)
        if len(self._deadlines) > 64 and len(self._deadlines) > 2 * (len(self._waiting) + len(self._running)):
            live = (*self._waiting.values(), *self._running.values())
            self._deadlines = [(e.deadline, e.request_id) for e in live if e.deadline is not None]
            heapq.heapify(self._deadlines)

    def _leave(self, request_id: str) -> None:
        """Free a slot. What its request had after it last led goes into the virtual time, in equal shares of the slots.

        Otherwise requests that never lead twice (of one step, say) would each start where the one before them had
        started, and a stream of them would starve the others.
        """
        ahead = self._slots[request_id].device_time - self._virtual_time
        self._virtual_time += max(0.0, ahead) / len(self._slots)
        del self._slots[request_id]

    # -- deadlines ----------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """Return the nearest deadline of a live request, or None."""
        while self._deadlines:
            deadline, request_id = self._deadlines[0]
            entry = self._waiting.get(request_id) or self._running.get(request_id)
            if entry is not None and entry.deadline == deadline:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def pop_expired(self, now: float) -> list[str]:
        """Return the ids of live requests whose deadline is not after `now`; each is returned once."""
        expired = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            request_id = heapq.heappop(self._deadlines)[1]
            entry = self._waiting.get(request_id) or self._running[request_id]
            entry.deadline = None  # so that neither an older entry of the heap nor its rebuilding brings it back
            expired.append(request_id)
        return expired

    def live(self) -> Iterable[str]:
        """Return the ids of all live requests: the running, then the waiting ones."""
        return [*self._running, *self._waiting]

    def holds_slot(self, request_id: str) -> bool:
        """Whether a request is running and still needs the device."""
        return request_id in self._slots


def _kind(entry: Entry) -> WorkKind | None:
    return None if entry.work is None else entry.work.kind
