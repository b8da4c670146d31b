"""Tiny, randomly initialised pipelines of every family, made offline: what the coverage report and tests run.

Each module of this package has a list `CASES`; `all_cases` collects them. Nothing here is downloaded: tokenizers and
text encoders are made by `components`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


def _no_inputs(index: int) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One pipeline class with tiny random components, and requests for it.

    Attributes:
        pipeline: name of the `diffusers` class.
        modality: `image`, `video`, `audio`, or several joined by `+`.
        kind: `text`, `image-to-image`, `inpaint`, `edit`, `controlnet`, `image-to-video`, `video-to-video`, …
        build: makes a new pipeline in float32 on the CPU; the caller seeds torch's global generator before.
        params: plain arguments that every request has: sizes, `num_frames`, `max_sequence_length`, ….
        inputs: the further arguments of the i-th request (pictures, masks, embeddings: of one prompt), different for
            each i and the same at every call.
        steps: the steps of the four requests.
        guidance_scale: of the four requests; None leaves it to the pipeline.
        has_prompt: whether the pipeline takes a prompt.
    """

    pipeline: str
    modality: str
    kind: str
    build: Callable[[], Any]
    params: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[int], dict[str, Any]] = _no_inputs
    steps: tuple[int, int, int, int] = (2, 3, 4, 3)
    guidance_scale: tuple[float | None, ...] = (None, None, None, None)
    has_prompt: bool = True

    def first_params(self) -> dict[str, Any]:
        """Return the guidance of the first request, if it sets one: what a model would be loaded for."""
        return {} if self.guidance_scale[0] is None else {"guidance_scale": self.guidance_scale[0]}


def all_cases() -> list[Case]:
    """Return the cases of all modules of this package, by name of the class.

    Raises:
        ValueError: a class has two cases.
    """
    cases: dict[str, Case] = {}
    for module in pkgutil.iter_modules(__path__):
        for case in getattr(importlib.import_module(f"{__name__}.{module.name}"), "CASES", []):
            if case.pipeline in cases:
                raise ValueError(f"{case.pipeline} has two cases")
            cases[case.pipeline] = case
    return [cases[name] for name in sorted(cases)]
