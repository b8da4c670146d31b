"""The bound of the fair order: how much device time others get while a request that is ready waits for its turn.

In start-time fair queueing (Goyal, Vin and Cheng, 1996, theorem 1) two flows that both have work differ by at most one
longest unit of each. Here a request is a flow, and requests come and go. Let n be the slots and L the longest forward.
A request leads when its device time d is the smallest, so it is then at most L ahead of the virtual time v. Until it
leads again, only those lead whose device time is at most d:

- those that started before v passed d, at most n at once, each for less than 2 L until it is past d: 2 n L;
- those that ended meanwhile: with every end v rises by at least 1/n of what its request had had, and at most n lives
  overlap, so they had at most n² L before v passed d.

Together n (n + 2) L, counted for requests that share no forward: shared ones only come sooner.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diffusion_backend.engine import Scheduler, Work, WorkKind
from diffusion_backend.engine.scheduler import State
from tests.model_based.effort import EFFORT

JOBS = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from([0.01, 0.1, 1.0, 5.0]), st.integers(0, 3)), min_size=1, max_size=60
)
"""Steps of each request, seconds of each of them, and how many turns after the one before it arrives."""


@given(slots=st.integers(1, 5), jobs=JOBS)
@EFFORT
def test_nobody_waits_longer_than_the_bound(slots: int, jobs: list[tuple[int, float, int]]) -> None:
    scheduler = Scheduler(max_num_seqs=slots, max_batch_rows=32, max_waiting=len(jobs))
    longest = max(seconds for _, seconds, _ in jobs)
    left = {f"r{k}": steps for k, (steps, _, _) in enumerate(jobs)}
    cost = {f"r{k}": seconds for k, (_, seconds, _) in enumerate(jobs)}
    arrives: dict[int, list[str]] = {}
    at = 0
    for name, (_, _, gap) in zip(left, jobs, strict=True):
        at += gap
        arrives.setdefault(at, []).append(name)
    waited: dict[str, float] = {}
    turn = 0
    while left:
        for name in arrives.pop(turn, []):
            scheduler.add(name)
        turn += 1
        for name in scheduler.admit():
            waited[name] = 0.0
        group = scheduler.next_group()
        if group is None:
            continue
        (name,) = group.request_ids
        seconds = cost[name] if group.kind is WorkKind.FORWARD else 0.0
        scheduler.charge(group, seconds)
        for other in waited:
            waited[other] = 0.0 if other == name else waited[other] + seconds
        assert max(waited.values()) <= slots * (slots + 2) * longest, (name, waited)
        left[name] -= group.kind is WorkKind.FORWARD
        if left[name]:
            scheduler.set_work(name, Work(WorkKind.FORWARD, name))
        else:
            scheduler.end(name, State.FINISHED)
            del left[name], waited[name]


@given(slots=st.integers(2, 5), steps=st.integers(1, 3), small=st.sampled_from([0.01, 0.1]))
@EFFORT
def test_an_endless_stream_of_newcomers_does_not_hold_the_others_up(slots: int, steps: int, small: float) -> None:
    """The same bound where it is hardest: all other slots always hold a request that has only just come."""
    scheduler = Scheduler(max_num_seqs=slots, max_batch_rows=32, max_waiting=10)
    scheduler.add("huge")
    left: dict[str, int] = {"huge": 5}
    others, count = 0.0, 0
    while left["huge"]:
        while scheduler.num_waiting < 2:
            count += 1
            left[f"r{count}"] = steps
            scheduler.add(f"r{count}")
        scheduler.admit()
        group = scheduler.next_group()
        assert group is not None
        (name,) = group.request_ids
        seconds = 0.0 if group.kind is not WorkKind.FORWARD else 1.0 if name == "huge" else small
        scheduler.charge(group, seconds)
        others = 0.0 if name == "huge" else others + seconds
        assert others <= slots * (slots + 2) * 1.0, f"{count} have come, and the huge one still waits"
        left[name] -= group.kind is WorkKind.FORWARD
        if left[name]:
            scheduler.set_work(name, Work(WorkKind.FORWARD, name))
        else:
            scheduler.end(name, State.FINISHED)
