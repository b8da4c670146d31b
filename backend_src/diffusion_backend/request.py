"""The messages of the engine: what comes in, what is told on the way, what goes out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from .errors import DiffusionError, InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

    from .timing import RequestRecord

PICTURES = ("image", "mask_image", "control_image")
"""The fields that hold pictures."""

MAX_SEED = 2**63 - 1
_RANDOM_SEED_BITS = 32  # short enough to be typed again by a person


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionRequest:
    """One request, with the names that `diffusers` uses. `None` means: the pipeline's own default.

    Attributes:
        request_id: names the request in logs and errors; unique among the live ones.
        prompt: one or more prompts; the outputs come in their order (A, A, B, B).
        negative_prompt: one for each prompt, or None.
        num_inference_steps, guidance_scale, height, width, num_frames: as in `diffusers` (pixels, frames).
        strength, frame_rate: as in `diffusers` (0 to 1; frames a second).
        duration_s: length of the sound or video, in seconds.
        image, mask_image, control_image: a picture (PIL, RGB; the mask L) for each prompt, or None.
        num_outputs_per_prompt: outputs for each prompt.
        seeds: the seed of each output, prompt by prompt; `resolve_seeds` makes them.
        preview_interval: a preview every so many steps; 0 for none.
        priority: smaller is sooner; equal ones in order of arrival.
        timeout_s: seconds from `submit` after which the request is given up; None for no limit.
        scheduler: the class name of a `diffusers` scheduler to use instead of the pipeline's own.
        lora: names of LoRA adapters (or paths under the model's `lora_root`), each with its weight.
        extra_args: further arguments of the pipeline's `__call__`.
    """

    request_id: str
    prompt: tuple[str, ...]
    seeds: tuple[int, ...]
    negative_prompt: tuple[str, ...] | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    strength: float | None = None
    frame_rate: float | None = None
    duration_s: float | None = None
    image: tuple[Image, ...] | None = None
    mask_image: tuple[Image, ...] | None = None
    control_image: tuple[Image, ...] | None = None
    num_outputs_per_prompt: int = 1
    preview_interval: int = 0
    priority: int = 0
    timeout_s: float | None = None
    scheduler: str | None = None
    lora: tuple[tuple[str, float], ...] = ()
    extra_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidArgumentError("prompt", "at least one prompt is needed", request_id=self.request_id)
        if self.num_outputs_per_prompt < 1:
            raise InvalidArgumentError(
                "num_outputs_per_prompt", f"{self.num_outputs_per_prompt} is not allowed; it must be at least 1"
            )
        if len(self.seeds) != self.num_outputs:
            raise InvalidArgumentError("seed", f"{len(self.seeds)} seeds for {self.num_outputs} outputs")
        for name in ("negative_prompt", *PICTURES):
            given = getattr(self, name)
            if given is not None and len(given) != len(self.prompt):
                raise InvalidArgumentError(name, f"{len(given)} given for {len(self.prompt)} prompts")

    @property
    def num_outputs(self) -> int:
        """Outputs of the whole request."""
        return len(self.prompt) * self.num_outputs_per_prompt

    @classmethod
    def make(
        cls, prompt: str | tuple[str, ...], *, seed: int | None = None, request_id: str | None = None, **params: Any
    ) -> DiffusionRequest:
        """Make a request from a prompt (or several), drawing what is left out: the seed and the id."""
        prompts = (prompt,) if isinstance(prompt, str) else tuple(prompt)
        n = params.get("num_outputs_per_prompt", 1)
        return cls(
            request_id=request_id or secrets.token_hex(8),
            prompt=prompts,
            seeds=resolve_seeds([seed] * len(prompts), n),
            **params,
        )


def resolve_seeds(base: list[int | None], num_outputs_per_prompt: int) -> tuple[int, ...]:
    """Return the seed of each output, prompt by prompt.

    Output k of a prompt with base seed s has the seed s + k (modulo 2^63), so that each output can be made again
    alone, and a prompt of a request of several gives what it gives in a request of its own. A base of None is drawn.

    Args:
        base: for each prompt its seed in [0, 2^63 - 1], or None.
        num_outputs_per_prompt: outputs of each prompt; at least 1.

    Raises:
        InvalidArgumentError: a seed is out of range.
    """
    seeds: list[int] = []
    for s in base:
        if s is None:
            s = secrets.randbits(_RANDOM_SEED_BITS)
        if not 0 <= s <= MAX_SEED:
            raise InvalidArgumentError(
                "seed", f"{s} is not allowed; it must be from 0 to {MAX_SEED}, or left out for a random one"
            )
        seeds.extend((s + k) & MAX_SEED for k in range(num_outputs_per_prompt))
    return tuple(seeds)


class EventKind(StrEnum):
    """What an event tells. FINISHED, FAILED and CANCELLED are final: exactly one of them ends each request."""

    QUEUED = "queued"
    STARTED = "started"
    STEP = "step"
    PREVIEW = "preview"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing follows."""
        return self in _FINAL


_FINAL = frozenset({EventKind.FINISHED, EventKind.FAILED, EventKind.CANCELLED})


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a request.

    Attributes:
        at: when it happened, in seconds of `timing.now()`.
        step, num_steps: denoising steps done and in all (0 before they are known).
        preview: uint8 (n, H, W, 3), with PREVIEW.
        result: with FINISHED.
        error: with FAILED and CANCELLED.
        record: where the time went, with the final ones.
    """

    kind: EventKind
    request_id: str
    at: float
    step: int = 0
    num_steps: int = 0
    preview: NDArray[np.uint8] | None = None
    result: DiffusionResult | None = None
    error: DiffusionError | None = None
    record: RequestRecord | None = None


@dataclass(frozen=True, slots=True)
class DiffusionOutput:
    """What a pipeline made, on the host.

    Attributes:
        images: uint8 (n, H, W, 3).
        video: uint8 (n, F, H, W, 3), with `frame_rate` in frames a second.
        audio: float32 (n, channels, samples) in [-1, 1], with `sample_rate` in Hz.
    """

    images: NDArray[np.uint8] | None = None
    video: NDArray[np.uint8] | None = None
    audio: NDArray[np.float32] | None = None
    frame_rate: float | None = None
    sample_rate: int | None = None

    @property
    def modalities(self) -> tuple[str, ...]:
        """Those of `image`, `video`, `audio` that are there."""
        pairs = (("image", self.images), ("video", self.video), ("audio", self.audio))
        return tuple(name for name, value in pairs if value is not None)


@dataclass(frozen=True, slots=True)
class DeferredOutput:
    """An output that is on its way to the host: `get` waits for it, and is called by the thread that finishes it."""

    get: Callable[[], DiffusionOutput]


@dataclass(frozen=True, slots=True)
class DiffusionResult:
    """The end of a request that went well.

    Attributes:
        output: what was made.
        seeds: one for each output.
        record: where the time went, and the parameters really used.
        payload: what the `finalize` function given to `submit` returned, else None.
    """

    output: DiffusionOutput
    seeds: tuple[int, ...]
    record: RequestRecord
    payload: Any = None
