"""The requests that are sent: always the same ones, so that arms and runs can be compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PROMPTS = (
    "red apple",
    "blue heart",
    "pizza",
    "cat face",
    "rocket",
    "snowman",
    "sunflower",
    "octopus",
    "full moon",
    "green book",
    "fire engine",
    "umbrella",
)
GUIDANCE = 3.0
SIDE = 64


@dataclass(frozen=True, slots=True)
class Job:
    """One request for one picture.

    Attributes:
        steps: denoising steps; each is one forward of the denoiser (the model's scheduler is DDIM).
        guidance: guidance scale; over 1 every forward has a row with the prompt and one without.
        side: height and width in pixels.
    """

    prompt: str
    steps: int
    guidance: float
    seed: int
    side: int = SIDE

    @property
    def rows(self) -> int:
        """Rows of each of its forwards."""
        return 2 if self.guidance > 1 else 1

    @property
    def shape(self) -> tuple[int, float, int]:
        """What the jobs of one call of the pipeline must have in common: steps, guidance scale and size."""
        return self.steps, self.guidance, self.side

    def as_dict(self) -> dict[str, Any]:
        """Return it as a JSON object; `Job(**it)` gives it back."""
        return asdict(self)


def make_jobs(
    count: int,
    steps: Sequence[int],
    *,
    guidances: Sequence[float] = (GUIDANCE,),
    sides: Sequence[int] = (SIDE,),
    shuffle_seed: int = 0,
) -> list[Job]:
    """Return `count` jobs, in an order that looks random but is fixed.

    Args:
        steps, guidances, sides: the jobs take these in equal shares, each in an order of its own.
        shuffle_seed: of the orders.
    """
    shuffle = random.Random(shuffle_seed)

    def share(values: Sequence[Any]) -> list[Any]:
        column = [values[i % len(values)] for i in range(count)]
        shuffle.shuffle(column)
        return column

    columns = zip(share(steps), share(guidances), share(sides), strict=True)
    return [Job(PROMPTS[i % len(PROMPTS)], *row[:2], seed=i, side=row[2]) for i, row in enumerate(columns)]


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Return the instants of `count` arrivals of a Poisson process, in seconds; the first is at 0.

    Args:
        rate: arrivals a second, on average.
        seed: the same one gives the same gaps, in units of the mean gap.
    """
    gaps = random.Random(seed)
    instants = [0.0]
    while len(instants) < count:
        instants.append(instants[-1] + gaps.expovariate(1.0) / rate)
    return instants
