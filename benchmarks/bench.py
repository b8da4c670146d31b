"""What the arms on servers share: the servers, the bare pipeline, and where their records go."""

from __future__ import annotations

import itertools
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.bare import BarePipeline
from benchmarks.fleet import BATCHING, Fleet
from benchmarks.load import Load, closed_loop, open_loop
from benchmarks.plan import Clock, Settings
from benchmarks.workload import Job, make_jobs

_ENDED_S = 30.0


@dataclass(slots=True)
class Bench:
    """A run under way.

    Attributes:
        records: of every request sent to a server, as JSON objects, with the arm, the server and the round.
        round: number of the round under way; 0 outside of the rounds.
    """

    settings: Settings
    clock: Clock
    fleet: Fleet
    bare: BarePipeline
    records: list[dict[str, Any]] = field(default_factory=list)
    round: int = 0
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def batching(self) -> list[str]:
        """The baselines of this run that batch at the request level."""
        return [name for name in self.settings.baselines if name in BATCHING]

    @property
    def unbatched(self) -> list[str]:
        """The other baselines of this run."""
        return [name for name in self.settings.baselines if name not in BATCHING]

    def closed(self, arm: str, server: str, jobs: Sequence[Job], concurrency: int, **options: Any) -> Load:
        """Run a closed loop on a server and keep its records; see `load.closed_loop`.

        Raises:
            RuntimeError: a request failed; then the figures would mean nothing.
        """
        with self.fleet.awake(server):
            load = closed_loop(self.fleet.connect(server), self._unseen(jobs), concurrency, **options)
        return self._kept(load, options, arm=arm, server=server, concurrency=concurrency)

    def open(
        self, arm: str, server: str, jobs: Sequence[Job], arrivals: Sequence[float], *, load: float, **options: Any
    ) -> Load:
        """Run an open loop on a server and keep its records; `load` is the share of our capacity that it is."""
        with self.fleet.awake(server):
            done = open_loop(self.fleet.connect(server), self._unseen(jobs), arrivals, **options)
        return self._kept(done, options, arm=arm, server=server, load=load)

    def capacity(self) -> float:
        """Return our throughput in a closed loop at the largest concurrency, in requests a second."""
        jobs = self.mixed_jobs(self.settings.mixed_requests)
        return len(jobs) / self.closed("capacity", "served", jobs, max(self.settings.concurrencies)).seconds

    def mixed_jobs(self, count: int, **options: Any) -> list[Job]:
        """Return jobs of the run's lengths and guidance scales; see `workload.make_jobs` for the options."""
        settings = self.settings
        return make_jobs(count, settings.mixed_steps, **{"guidances": settings.mixed_guidances} | options)

    def counters(self) -> dict[str, float]:
        """Return our model's metrics, by name, summed over their other labels."""
        return read_metrics(self.fleet.served.url_metrics, "emoji")

    def wait_until_idle(self) -> None:
        """Wait until no request of our model runs any more, so that its counters are whole."""
        deadline = time.monotonic() + _ENDED_S
        while self.counters()["diffusion_requests_running"] > 0:
            if time.monotonic() > deadline:
                raise RuntimeError(f"requests still run {_ENDED_S:.0f} s after the last answer")
            time.sleep(0.02)

    def _unseen(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs with prompts that no server has seen: repeated ones would be a gift to a cache."""
        return [replace(job, prompt=f"{job.prompt} {next(self._numbers)}") for job in jobs]

    def _kept(self, done: Load, options: dict[str, Any], /, **labels: Any) -> Load:
        done.check(cancelled=len(options.get("cancel_at") or ()))
        self.records += [labels | {"round": self.round} | record.as_dict() for record in done.records]
        return done


def read_metrics(url_metrics: str, model: str) -> dict[str, float]:
    """Return the metrics of a model by their names (without buckets), summed over their other labels."""
    totals: dict[str, float] = {}
    with urllib.request.urlopen(url_metrics, timeout=30) as page:
        for line in page.read().decode().splitlines():
            name, _, labels = line.partition("{")
            if f'model="{model}"' in labels and not name.endswith("_bucket"):
                totals[name] = totals.get(name, 0.0) + float(line.split()[-1])
    return totals
