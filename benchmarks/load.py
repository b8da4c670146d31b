"""The load generator: sends jobs to any client, in a closed loop or at given instants, and keeps a record of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.clients import Client
from benchmarks.workload import Job

OPEN_CONNECTIONS = 8
"""Connections of an open loop, which its requests take in turns."""

Connect = Callable[[], Client]
"""Makes a client, not yet connected."""


@dataclass(slots=True)
class Record:
    """One request. Instants are seconds since the first arrival of its run; None where there was no such instant.

    Attributes:
        index: which job of the run it is.
        arrival: when it was to be sent (in a closed loop, when the answer before it had come).
        send: when it was sent.
        first_step: when the first step event came, where events were asked for.
        end: when its answer was there, or it was given up.
        outcome: `completed`, `cancelled` or `failed`.
        steps, guidance, side: of the job.
        error: of one that failed.
        step_times: when each step event came.
        times: the server's `time_*_ms`, where it tells them.
        build_ms, parse_ms: the client's own work.
    """

    index: int
    arrival: float
    steps: int
    guidance: float
    side: int
    send: float = 0.0
    first_step: float | None = None
    end: float = 0.0
    outcome: str = "failed"
    error: str | None = None
    step_times: list[float] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    build_ms: float = 0.0
    parse_ms: float = 0.0

    @property
    def latency_s(self) -> float:
        """Seconds from the arrival to the end: a client that is late must not make the server look quick."""
        return self.end - self.arrival

    def as_dict(self) -> dict[str, Any]:
        """Return it as a JSON object, rounded to microseconds; `Record(**it)` gives it back."""
        return {name: _rounded(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Load:
    """What a run of the generator gave.

    Attributes:
        seconds: from the first arrival to the last end.
        records: of each job, in the order of the jobs.
        pictures: of each job, uint8 (H, W, 3), or None.
    """

    seconds: float
    records: list[Record]
    pictures: list[NDArray[np.uint8] | None]

    @property
    def latencies_s(self) -> list[float]:
        """Of the completed ones."""
        return [record.latency_s for record in self.records if record.outcome == "completed"]

    def check(self, *, cancelled: int = 0) -> None:
        """Raise RuntimeError unless all were completed, but for those that were to be cancelled."""
        failed = [record for record in self.records if record.outcome == "failed"]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(self.records)} requests failed; the first: {failed[0].error}")
        if sum(record.outcome == "cancelled" for record in self.records) != cancelled:
            raise RuntimeError("not all requests were cancelled that were to be")


def closed_loop(connect: Connect, jobs: Sequence[Job], concurrency: int, **options: Any) -> Load:
    """Send the jobs in their order, `concurrency` of them in flight: each answer is followed by the next request.

    Every one of the concurrent clients has a connection of its own, opened before the clock starts.

    Args:
        options: `progress` and `cancel_at` (the step for each index that is to be cancelled).
    """
    return asyncio.run(_Run(jobs, **options).closed(connect, min(concurrency, len(jobs))))


def open_loop(connect: Connect, jobs: Sequence[Job], arrivals: Sequence[float], **options: Any) -> Load:
    """Send each job at its instant, whether or not earlier ones are done; see `closed_loop` for the options."""
    return asyncio.run(_Run(jobs, **options).open(connect, arrivals))


class _Run:
    def __init__(
        self, jobs: Sequence[Job], *, progress: bool = False, cancel_at: Mapping[int, int] | None = None
    ) -> None:
        self._jobs = jobs
        self._progress = progress
        self._cancel_at = cancel_at or {}
        self._records: dict[int, Record] = {}
        self._pictures: dict[int, NDArray[np.uint8] | None] = {}
        self._begin = 0.0

    async def closed(self, connect: Connect, concurrency: int) -> Load:
        upcoming = iter(range(len(self._jobs)))

        async def client(connection: Client) -> None:
            for index in upcoming:  # shared: the next free client takes the next job
                await self._send(connection, index, time.monotonic())

        return await self._run(connect, concurrency, lambda connections: [client(each) for each in connections])

    async def open(self, connect: Connect, arrivals: Sequence[float]) -> Load:
        async def one(connection: Client, index: int) -> None:
            due = self._begin + arrivals[index]
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await self._send(connection, index, due)

        return await self._run(
            connect,
            OPEN_CONNECTIONS,
            lambda connections: [one(connections[i % len(connections)], i) for i in range(len(self._jobs))],
        )

    async def _run(self, connect: Connect, count: int, tasks: Callable[[list[Client]], list[Any]]) -> Load:
        connections = [connect() for _ in range(count)]
        try:
            await asyncio.gather(*(connection.open() for connection in connections))
            self._begin = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for task in tasks(connections):
                    group.create_task(task)
        finally:
            await asyncio.gather(*(connection.close() for connection in connections))
        order = range(len(self._jobs))
        records = [self._records[index] for index in order]
        return Load(max(record.end for record in records), records, [self._pictures[index] for index in order])

    async def _send(self, connection: Client, index: int, arrival: float) -> None:
        job = self._jobs[index]
        record = Record(index, arrival - self._begin, job.steps, job.guidance, job.side)
        self._records[index] = record
        self._pictures[index] = None
        record.send = time.monotonic() - self._begin
        try:
            answer = await connection.draw(job, progress=self._progress, cancel_at=self._cancel_at.get(index))
        except Exception as error:
            record.error = f"{type(error).__name__}: {error}"
        else:
            record.outcome = "cancelled" if answer.picture is None else "completed"
            record.step_times = [came - self._begin for came in answer.step_times]
            record.first_step = record.step_times[0] if record.step_times else None
            record.times = answer.times
            record.build_ms, record.parse_ms = answer.build_s * 1e3, answer.parse_s * 1e3
            self._pictures[index] = answer.picture
        record.end = time.monotonic() - self._begin


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return value
