"""What a run measures: the arms, their sizes, and how long it may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.fleet import BASELINES

ROUND_ARMS = ("single", "load", "poisson")
"""Arms that run in every round, in turns."""

ONCE_ARMS = ("engine", "fairness", "curves", "mixes", "cancelling", "hops", "memory", "idle")
"""Arms that run once."""

ARMS = (*ROUND_ARMS, *ONCE_ARMS)

QUICK: dict[str, Any] = {
    "rounds": 1,
    "single_steps": 4,
    "single_requests": 2,
    "mixed_steps": (2, 3, 4),
    "mixed_requests": 6,
    "concurrencies": (4,),
    "curve_concurrencies": (1,),
    "curve_loads": (0.4,),
    "curve_requests": 6,
    "poisson_requests": 8,
    "forward_repeats": 2,
    "hop_requests": 3,
    "idle_s": 1.0,
    "callers_s": 0.5,
    "engine_rounds": 1,
    "engine_steps": 50,
    "fairness_rounds": 1,
    "fairness_quick": True,
}
"""What `--quick` changes: just enough to see that everything works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is run.

    Attributes:
        arms: those of `ARMS` to run.
        baselines: those of `fleet.BASELINES` to run beside the bare pipeline.
        rounds: of each of `ROUND_ARMS`, at most.
        budget_s: no round is begun that would not end before so many seconds have passed; 0 for no limit.
        single_steps, single_requests: length and number of the requests of the arm `single`, in each round.
        mixed_steps, mixed_guidances, mixed_requests: lengths, guidance scales and number of the requests of the arm
            `load`, in each round; the other arms with many requests take theirs from the same values.
        concurrencies: requests in flight in the arm `load`.
        forward_repeats: forwards timed for each number of rows, at each of several places of a round.
        poisson_load, poisson_requests: arrivals of the arm `poisson`, as a share of our throughput at the largest of
            `concurrencies` in the same round; and how many, in each round.
        curve_concurrencies, curve_loads, curve_requests: of the arm `curves`; the loads are shares as above.
        mixed_sides: sizes in a part of the arm `mixes`.
        hop_requests: of the arm `hops`.
        idle_s: seconds for which the idle server is watched.
        callers, callers_s: threads that wait for the engine, and for how long they are watched.
        waiting, engine_rounds, engine_steps: queue lengths of the arm `engine`, its rounds, and steps timed in each.
        fairness_rounds, fairness_quick: rounds of the arm `fairness`, and whether its loads are small ones.
        threads, wait_policy: see `machine.thread_environment`.
    """

    model: Path
    arms: tuple[str, ...] = ARMS
    baselines: tuple[str, ...] = tuple(BASELINES)
    rounds: int = 3
    budget_s: float = 0.0
    single_steps: int = 20
    single_requests: int = 6
    mixed_steps: tuple[int, ...] = (8, 20, 40)
    mixed_guidances: tuple[float, ...] = (1.0, 3.0, 7.5)
    mixed_requests: int = 24
    concurrencies: tuple[int, ...] = (8, 16)
    forward_repeats: int = 5
    poisson_load: float = 0.8
    poisson_requests: int = 40
    curve_concurrencies: tuple[int, ...] = (1, 4, 32)
    curve_loads: tuple[float, ...] = (0.3, 0.55)
    curve_requests: int = 24
    mixed_sides: tuple[int, ...] = (64, 64, 64, 80)
    hop_requests: int = 8
    idle_s: float = 8.0
    callers: int = 64
    callers_s: float = 3.0
    waiting: tuple[int, ...] = (1, 64, 1000)
    engine_rounds: int = 3
    engine_steps: int = 300
    fairness_rounds: int = 1
    fairness_quick: bool = False
    threads: int = 1
    wait_policy: str = "PASSIVE"

    @property
    def needs_servers(self) -> bool:
        """Whether an arm runs on servers."""
        return bool(set(self.arms) - {"engine", "fairness", "hops"})

    def as_dict(self) -> dict[str, Any]:
        """Return it as a JSON object, without the folders of this machine."""
        return asdict(self) | {"model": self.model.name}


class Clock:
    """How far a run is, for those who wait, and whether another round fits into its time.

    Args:
        say: called with what is being done, before each piece of work.
        budget_s: see `Settings`.
        rounds: the rounds to come.
    """

    def __init__(self, say: Callable[[str], None], budget_s: float, rounds: int) -> None:
        self._say = say
        self._budget_s = budget_s
        self._rounds = rounds
        self._begin = time.monotonic()
        self._round_begin = self._begin
        self._round = 0
        self._round_s = 0.0

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._begin

    def say(self, what: str) -> None:
        """Tell what is being done, and how long the rounds to come will take once one of them is over."""
        where = f"round {self._round} of {self._rounds}: " if self._round else ""
        left = ""
        if self._round_s and self._round:
            rest = self._round_s * (self._rounds - self._round + 1) - (time.monotonic() - self._round_begin)
            left = f" (rounds end in about {max(0.0, rest) / 60:.1f} min)"
        self._say(f"[{self.seconds / 60:4.1f} min] {where}{what}{left}")

    def begin_round(self) -> bool:
        """Begin a round; False if there is none to come, or if it would not end in time."""
        if self._round == self._rounds:
            return False
        if self._round and self._budget_s and self.seconds + 1.05 * self._round_s > self._budget_s:
            self._rounds = self._round
            return False
        self._round += 1
        self._round_begin = time.monotonic()
        return True

    def end_round(self) -> None:
        """End a round; the longest so far is what the next one is taken to need."""
        self._round_s = max(self._round_s, time.monotonic() - self._round_begin)

    def end_rounds(self) -> None:
        """Say no more of rounds."""
        self._round = 0
