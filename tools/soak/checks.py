"""Judges a run: is everything flat, was nothing lost, do the books balance?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .books import Line
from .calls import Told
from .watch import Sample

WARM_UP = 0.1
"""Share of the run after which everything must be flat."""

MAX_KIB_PER_1000 = 256.0
"""A process may grow by a quarter of a KiB a request: less than what a request could leave behind."""

MIN_REQUESTS = 2000
"""Of fewer requests the memory is told, but not judged: the allocators are still filling their pools."""

MAX_MORE_DESCRIPTORS = 8
"""Connections that the server keeps open come and go; a leak of one in a hundred requests is found in a thousand."""

MAX_MORE_THREADS = 32
"""The pools of asyncio and gRPC fill up to their limits; a leak of one in a hundred requests is found in 4,000."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold.

    Attributes:
        name: what it is.
        holds: whether it does.
        says: the figure and the limit, in words.
    """

    name: str
    holds: bool
    says: str


@dataclass(frozen=True, slots=True)
class Slope:
    """A straight line through a process's memory while idle, after the warm-up.

    Attributes:
        kib_per_1000: its growth in KiB for each 1,000 requests.
        error: the standard error of that; infinite with fewer than three samples.
        first_kib, last_kib: the memory at its first and last sample.
    """

    kib_per_1000: float
    error: float
    first_kib: int
    last_kib: int

    @property
    def grows(self) -> bool:
        """Whether it grows by more than is allowed, and that is no chance (two standard errors)."""
        return self.kib_per_1000 - 2 * self.error > MAX_KIB_PER_1000

    @property
    def is_unclear(self) -> bool:
        """Whether the run was too short, or its memory too restless, to tell whether it grows by more than that."""
        return not self.grows and self.kib_per_1000 + 2 * self.error > MAX_KIB_PER_1000


def settled(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of the idle server after the warm-up; those of the whole run if it had fewer than three."""
    idle = [sample for sample in samples if sample.idle]
    late = [sample for sample in idle if sample.requests >= WARM_UP * idle[-1].requests and sample.requests > 0]
    return late if len(late) >= 3 else idle


def slope(samples: Sequence[Sample], process: str) -> Slope:
    """Return the slope of a process's own memory by ordinary least squares."""
    x = np.array([sample.requests for sample in samples], dtype=float) / 1000
    y = np.array([sample.processes[process].own_kib for sample in samples], dtype=float)
    spread = float(((x - x.mean()) ** 2).sum())
    if len(x) < 3 or spread == 0:
        return Slope(0.0, float("inf"), int(y[0]), int(y[-1]))
    rate = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    rest = y - y.mean() - rate * (x - x.mean())
    error = float(np.sqrt((rest**2).sum() / (len(x) - 2) / spread))
    return Slope(rate, error, int(y[0]), int(y[-1]))


def check_flat(samples: Sequence[Sample]) -> list[Check]:
    """Return the checks of memory, descriptors, threads and shared memory."""
    late = settled(samples)
    first, last = late[0], late[-1]
    checks = []
    for process in first.processes:
        found = slope(late, process)
        says = (
            f"{found.kib_per_1000:+.0f} ± {found.error:.0f} KiB per 1,000 requests "
            f"({found.first_kib / 1024:.1f} to {found.last_kib / 1024:.1f} MiB; at most {MAX_KIB_PER_1000:.0f})"
        )
        if found.is_unclear:
            says += "; that it grows by more is not shown, and not excluded"
        if last.requests < MIN_REQUESTS:
            says += f"; too few requests to judge, {MIN_REQUESTS} are needed"
        checks.append(Check(f"memory of {process}", last.requests < MIN_REQUESTS or not found.grows, says))
    for what, most in (("descriptors", MAX_MORE_DESCRIPTORS), ("threads", MAX_MORE_THREADS)):
        for process in first.processes:
            before, after = getattr(first.processes[process], what), getattr(last.processes[process], what)
            checks.append(
                Check(f"{what} of {process}", after - before <= most, f"{before} to {after}; at most {most} more")
            )
    regions = f"{first.shm_regions} to {last.shm_regions} regions, {first.shm_kib} to {last.shm_kib} KiB"
    checks.append(
        Check("shared memory", (last.shm_regions, last.shm_kib) <= (first.shm_regions, first.shm_kib), regions)
    )
    return checks


def check_answers(told: Sequence[Told]) -> list[Check]:
    """Return the checks of what the clients saw."""
    bad = {"lost": "no request was lost", "wrong": "every answer was right"}
    checks = []
    for ended, name in bad.items():
        those = [one for one in told if one.ended == ended]
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(one.plan.kind for one in those).items())
        example = f"; request {those[0].plan.number}: {those[0].problem}" if those else ""
        checks.append(Check(name, not those, f"{len(those)} of {len(told)} {ended}{kinds and f' ({kinds})'}{example}"))
    compared = [one for one in told if one.plan.probe is not None]
    same = sum(one.ended == "finished" for one in compared)
    checks.append(Check("as alone", same == len(compared), f"{same} of {len(compared)} compared with the idle server"))
    return checks


def check_books(lines: Sequence[Line]) -> list[Check]:
    """Return the checks of the metrics against what the client counted."""
    checks = []
    for line in lines:
        wanted = f"{line.client:g}"
        if line.highest != line.client:
            wanted = (
                f"{line.client:g} or more" if line.highest == float("inf") else f"{line.client:g} to {line.highest:g}"
            )
        checks.append(Check(line.name, line.balances, f"{line.server:g}; the client counted {wanted}"))
    return checks
