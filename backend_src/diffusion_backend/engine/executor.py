"""What the engine asks of whatever runs the pipelines.

The messages are plain data, so an executor may live in this process (`pipelines.PipelineExecutor`) or in another one.
The engine thread is its only caller, from `start` to `close`; replies therefore cannot be swapped.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from ..errors import DiffusionError
from ..request import DeferredOutput, DiffusionOutput, DiffusionRequest, Event


class WorkKind(Enum):
    """The kinds of work that a running request can need next."""

    START = "start"
    """Begin the pipeline's call, up to its first meeting point."""
    FORWARD = "forward"
    """One forward of a denoiser, together with all others of the same key."""
    STEP = "step"
    """One step of a pipeline whose denoiser is no meeting point, by itself."""
    DECODE = "decode"
    """One decode, by itself."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one running request needs next.

    Attributes:
        key: requests whose FORWARD works have equal keys may share one forward.
        rows: rows that it adds to the forward.
        solo_reason: why it can share with nobody, or None.
        max_rows: the most rows of a forward that it shares, where memory sets a lower limit than the engine; or None.
    """

    kind: WorkKind
    key: Hashable
    rows: int = 1
    solo_reason: str | None = None
    max_rows: int | None = None


@dataclass(frozen=True, slots=True)
class PromptCacheUse:
    """What happened to the cache of prompt embeddings since the last report.

    Attributes:
        hits, misses: prompts whose embeddings were there; and those that were encoded.
        bytes_added: bytes that its entries have become more; negative if they have become less.
    """

    hits: int
    misses: int
    bytes_added: int


@dataclass(slots=True)
class Report:
    """What came of a request's work: it needs more work, or has an output, or an error; exactly one of the three.

    Attributes:
        events: STEP and PREVIEW events since the last report, in order.
        params: with the report of START, the parameters that are really used, by their `diffusers` names.
        prompt_cache: what happened to the cache meanwhile, in the first report of an `execute`; None for nothing.
    """

    request_id: str
    work: Work | None = None
    output: DiffusionOutput | DeferredOutput | None = None
    error: DiffusionError | None = None
    events: list[Event] = field(default_factory=list)
    params: dict[str, object] = field(default_factory=dict)
    prompt_cache: PromptCacheUse | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a loaded pipeline can take in and give out; resolved once, when it is loaded.

    Attributes:
        pipeline_class: name of the `diffusers` class.
        modalities: those of `image`, `video`, `audio` that it makes.
        arguments: names of its `__call__` arguments.
        needs: the pictures that a request must have (`image`, `mask_image`, `control_image`).
        pictures_in_lists: whether its call takes a list of pictures, one for each prompt.
        sample_rate: of the sound, in Hz, or None.
        defaults: the defaults of `num_inference_steps`, `guidance_scale`, `height`, `width` where they are known.
        size_multiple: heights and widths must be multiples of it (pixels).
        max_steps: most steps that the pipeline's scheduler can be asked for, or None.
        schedulers: class names of the schedulers that may be asked for.
        supports_previews: whether PREVIEW events can be made.
        joint: for each meeting point, None if its calls are batched, else the reason why not.
        exclusive: whether a call changes the shared modules, so that only one request can run at a time.
        rows_per_output: most rows of the denoiser that one output needs (2 with classifier-free guidance).
        adapters: names of the LoRA adapters that may be asked for.
        adapter_root: the folder, resolved, whose adapters may be asked for by path; None for none.
    """

    pipeline_class: str
    modalities: tuple[str, ...]
    arguments: frozenset[str]
    defaults: dict[str, Any]
    size_multiple: int = 1
    needs: tuple[str, ...] = ()
    pictures_in_lists: bool = False
    sample_rate: int | None = None
    max_steps: int | None = None
    schedulers: tuple[str, ...] = ()
    supports_previews: bool = False
    joint: dict[str, str | None] = field(default_factory=dict)
    exclusive: bool = False
    rows_per_output: int = 1
    adapters: tuple[str, ...] = ()
    adapter_root: Path | None = None

    @property
    def supports_audio_output(self) -> bool:
        """Whether it makes sound."""
        return "audio" in self.modalities


class Executor(Protocol):
    """Runs pipelines; every method is called by the engine thread only."""

    @property
    def capabilities(self) -> Capabilities:
        """What the loaded pipeline can do; constant."""

    def start(self) -> None:
        """Called once, first, on the engine thread (grad mode and the like are thread state)."""

    def close(self) -> None:
        """Called once, last; ends what still runs and frees the device."""

    def add_req(self, request: DiffusionRequest) -> None:
        """Take in an admitted request; its first work is START. Must not run anything yet."""

    def execute(self, kind: WorkKind, request_ids: Sequence[str]) -> list[Report]:
        """Run one unit of work for these requests (several only with FORWARD); one report each, in their order."""

    def abort(self, request_id: str, error: DiffusionError) -> Report:
        """End a request that was taken in, wherever it stands; the report carries an error, mostly `error`."""

    def _dummy_run(self, height: int | None, width: int | None) -> None:
        """Run the smallest request of this size once, to warm up; nothing of it is kept."""
