"""The pipeline that every baseline serves: loaded once, called for one job or for several of one shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from numpy.typing import NDArray

from benchmarks.workload import Job

MAX_BATCH = 16
"""Pictures in one call of the baselines that batch: as many as our engine has slots for."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(model: str) -> Any:
    """Load the pipeline from its folder, in float32, as it is served."""
    pipeline = DiffusionPipeline.from_pretrained(model).to(DEVICE, torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@torch.inference_mode()
def draw(pipeline: Any, jobs: Sequence[Job]) -> list[NDArray[np.uint8]]:
    """Draw jobs of one shape in one call, as a user of the pipeline does; return pictures on the host: (H, W, 3)."""
    (shape,) = {job.shape for job in jobs}
    steps, guidance, side = shape
    images = pipeline(
        [job.prompt for job in jobs],
        num_inference_steps=steps,
        guidance_scale=guidance,
        height=side,
        width=side,
        generator=[torch.Generator("cpu").manual_seed(job.seed) for job in jobs],
        output_type="pt",
    ).images
    pixels = (images * 255).round().to(torch.uint8).movedim(1, -1).contiguous().cpu().numpy()
    return list(pixels)


def grouped(jobs: Sequence[Job]) -> list[list[int]]:
    """Return the indices of the jobs in groups that one call can draw, shortest calls first."""
    groups: dict[tuple[int, float, int], list[int]] = {}
    for index, job in enumerate(jobs):
        groups.setdefault(job.shape, []).append(index)
    return sorted(groups.values(), key=lambda group: len(group) * jobs[group[0]].steps * jobs[group[0]].side ** 2)


def synchronize() -> None:
    """Wait until the device has done what it was given."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
