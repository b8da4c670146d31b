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


@dataclass(frozen=True, slots=True)
class Job:
    """One request for one picture.

    Attributes:
        steps: denoising steps; each is one forward of the denoiser (the model's scheduler is DDIM).
        guidance: guidance scale; over 1 every forward has a row with the prompt and one without.
    """

    prompt: str
    steps: int
    guidance: float
    seed: int

    @property
    def rows(self) -> int:
        """Rows of each of its forwards."""
        return 2 if self.guidance > 1 else 1

    def as_dict(self) -> dict[str, Any]:
        """Return it as a JSON object; `Job(**it)` gives it back."""
        return asdict(self)


def make_jobs(count: int, steps: Sequence[int], *, shuffle_seed: int = 0) -> list[Job]:
    """Return `count` jobs whose lengths are the `steps` in equal shares, in an order that looks random but is fixed."""
    lengths = [steps[i % len(steps)] for i in range(count)]
    random.Random(shuffle_seed).shuffle(lengths)
    return [Job(PROMPTS[i % len(PROMPTS)], length, GUIDANCE, seed=i) for i, length in enumerate(lengths)]
