"""What `diffusion-backend check` finds out of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Denoiser:
    """What was found of one denoiser; seconds are medians over its forwards.

    Attributes:
        reasons: why its calls are not shared; empty if they are.
        calls_per_step: of one request.
        rows_alone, seconds_alone: of a forward of one request.
        requests, rows, seconds: of the largest forwards that were shared; 0 if none was.
    """

    name: str
    reasons: tuple[str, ...]
    calls_per_step: float
    rows_alone: int
    seconds_alone: float
    requests: int = 0
    rows: int = 0
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """`batched`, `in part` or `one by one`."""
        if not self.reasons:
            return "batched"
        return "in part" if self.requests > 1 else "one by one"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of this process: resident before and after loading and at most, and of the GPU at most (None without)."""

    before: int
    loaded: int
    peak: int
    gpu_peak: int | None


@dataclass(frozen=True, slots=True)
class Result:
    """What `measure` found.

    Attributes:
        modalities: of the outputs.
        denoisers: in the order in which they are called.
        shared: whether any forward of the two requests together was shared.
        difference: largest difference of an output together from alone, of 255 (for sound: of its whole range).
        allowed: the largest difference that the dtype explains.
        load_s: seconds of loading, the self-check included.
    """

    pipeline_class: str
    device: str
    dtype: str
    modalities: tuple[str, ...]
    denoisers: tuple[Denoiser, ...]
    shared: bool
    difference: float
    allowed: int
    memory: Memory
    load_s: float

    @property
    def is_right(self) -> bool:
        """Whether the outputs together are those alone."""
        return self.difference <= self.allowed

    @property
    def step_alone_s(self) -> float:
        """Seconds a step of a request alone."""
        return sum(d.calls_per_step * d.seconds_alone for d in self.denoisers)

    @property
    def step_together_s(self) -> float | None:
        """Seconds a step of `requests` together; None if no denoiser shares its forwards."""
        if self.requests < 2:
            return None
        # A denoiser that runs its calls one by one runs one for each request.
        return sum(
            d.calls_per_step * (d.seconds if d.requests > 1 else d.seconds_alone * self.requests)
            for d in self.denoisers
        )

    @property
    def requests(self) -> int:
        """Most requests that shared a forward."""
        return max((d.requests for d in self.denoisers), default=0)
