"""The load generator, on a client that keeps everything in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.clients import Answer
from benchmarks.load import Record, closed_loop, open_loop
from benchmarks.workload import Job, make_jobs

STEP_S = 0.001


class FakeClient:
    """Draws a picture of the seed's number, a step at a time; seed 13 fails."""

    def __init__(self, log: Log) -> None:
        self.log = log

    async def open(self) -> None:
        self.log.opened += 1

    async def close(self) -> None:
        self.log.closed += 1

    async def draw(self, job: Job, *, progress: bool = False, cancel_at: int | None = None) -> Answer:
        self.log.seeds.append(job.seed)
        self.log.running += 1
        self.log.most = max(self.log.most, self.log.running)
        answer = Answer(times={"time_total_ms": 1.0})
        try:
            for step in range(1, job.steps + 1):
                await asyncio.sleep(STEP_S)
                if job.seed == 13:
                    raise RuntimeError("unlucky")
                if progress or cancel_at is not None:
                    answer.step_times.append(asyncio.get_running_loop().time())
                if step == cancel_at:
                    return answer
        finally:
            self.log.running -= 1
        answer.picture = np.full((1, 1, 3), job.seed, dtype=np.uint8)
        return answer


class Log:
    def __init__(self) -> None:
        self.opened = self.closed = self.running = self.most = 0
        self.seeds: list[int] = []

    @property
    def connect(self) -> Callable[[], FakeClient]:
        return lambda: FakeClient(self)


def test_a_closed_loop_keeps_so_many_in_flight_and_sends_each_job_once() -> None:
    log, jobs = Log(), make_jobs(12, (1, 2, 3))
    load = closed_loop(log.connect, jobs, 4)
    load.check()
    assert (log.most, log.opened, log.closed) == (4, 4, 4)
    assert sorted(log.seeds) == [job.seed for job in jobs]
    assert [picture[0, 0, 0] for picture in load.pictures] == [job.seed for job in jobs]
    assert [record.steps for record in load.records] == [job.steps for job in jobs]
    assert load.seconds == max(record.end for record in load.records)


def test_more_clients_than_jobs_are_not_opened() -> None:
    log = Log()
    closed_loop(log.connect, make_jobs(2, (1,)), 8)
    assert log.opened == 2


def test_an_open_loop_waits_for_instants_and_not_for_answers() -> None:
    log, jobs = Log(), make_jobs(6, (50,))
    arrivals = [0.0, 0.001, 0.002, 0.003, 0.004, 0.005]
    load = open_loop(log.connect, jobs, arrivals)
    load.check()
    assert log.most == 6
    for record, due in zip(load.records, arrivals, strict=True):
        assert record.arrival == pytest.approx(due)
        assert record.send >= due
        assert record.latency_s == record.end - record.arrival  # what the generator was late counts


def test_records_of_steps_and_cancelling() -> None:
    jobs = make_jobs(4, (5,))
    load = closed_loop(Log().connect, jobs, 2, progress=True, cancel_at={1: 2})
    load.check(cancelled=1)
    assert [record.outcome for record in load.records] == ["completed", "cancelled", "completed", "completed"]
    assert [len(record.step_times) for record in load.records] == [5, 2, 5, 5]
    assert load.pictures[1] is None
    for record in load.records:
        assert record.first_step == record.step_times[0]
        assert record.send <= record.first_step <= record.end
    assert len(load.latencies_s) == 3


def test_a_request_that_was_to_be_cancelled_and_was_not() -> None:
    with pytest.raises(RuntimeError, match="not all requests were cancelled"):
        closed_loop(Log().connect, make_jobs(2, (1,)), 2).check(cancelled=1)


def test_a_failure_is_recorded_and_stops_nobody_else() -> None:
    load = closed_loop(Log().connect, make_jobs(20, (1,)), 4)
    assert [record.index for record in load.records if record.outcome == "failed"] == [13]
    assert load.records[13].error == "RuntimeError: unlucky"
    with pytest.raises(RuntimeError, match="1 of 20 requests failed; the first: RuntimeError: unlucky"):
        load.check()


def test_records_survive_a_file() -> None:
    (record,) = closed_loop(Log().connect, make_jobs(1, (3,)), 1, progress=True).records
    data = record.as_dict()
    assert Record(**data).as_dict() == data
    assert data["step_times"] == [round(at, 6) for at in record.step_times]
