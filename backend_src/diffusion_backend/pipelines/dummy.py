"""Inputs made up for the probe and for warm-up: exactly those that a pipeline's signature takes.

A pipeline that needs a picture gets one of the right size; whether it needs one is found by offering more and more of
what its signature has, until it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter
from typing import Any

import numpy as np
from PIL import Image

PICTURES = ("image", "control_image", "reference_image", "example_image", "conditioning_image", "last_image")
MASKS = ("mask_image", "mask")
VIDEOS = ("video", "conditioning_frames", "pose_video", "face_video")

_LEVELS: tuple[tuple[str, ...], ...] = (
    (),
    ("image",),
    ("image", "mask_image"),
    ("image", "control_image"),
    ("image", "mask_image", "control_image"),
    ("image", "control_image", "control_mode"),
    ("video",),
    ("video", "mask"),
    ("conditioning_frames",),
    ("image", "video"),
)
"""What is offered beside the required arguments, in order."""


def picture(seed: int, height: int, width: int) -> Image.Image:
    """Return an RGB picture: smooth, in colours that depend on `seed`."""
    colours = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC)


def mask(height: int, width: int) -> Image.Image:
    """Return a mask with its left half set."""
    array = np.zeros((height, width), dtype=np.uint8)
    array[:, : width // 2] = 255
    return Image.fromarray(array)


def needed(names: Sequence[str], height: int, width: int) -> dict[str, Any]:
    """Return made-up pictures, by the names of a request's fields, for a request with one prompt."""
    return {name: (mask(height, width) if name in MASKS else picture(0, height, width),) for name in names}


def video(seed: int, frames: int, height: int, width: int) -> list[Image.Image]:
    """Return the frames of a video."""
    return [picture(seed * 1000 + index, height, width) for index in range(frames)]


def offers(
    parameters: Mapping[str, Parameter], *, height: int, width: int, num_frames: int
) -> Iterator[Callable[[list[int]], dict[str, Any]]]:
    """Yield, from the least to the most, functions that make the inputs of a call.

    Each takes the seeds of the call's items (one each prompt) and returns keyword arguments: single values for one
    seed, lists for several.
    """
    required = [name for name, p in parameters.items() if p.default is Parameter.empty]
    seen = set()
    for level in _LEVELS:
        names = tuple(dict.fromkeys([n for n in (*required, *level) if n in parameters and _is_known(n)]))
        if names in seen or not set(level) <= set(parameters):
            continue
        seen.add(names)

        def make(seeds: list[int], names: tuple[str, ...] = names) -> dict[str, Any]:
            made = {}
            for name in names:
                values = [_make(name, seed, height, width, num_frames) for seed in seeds]
                made[name] = values[0] if len(values) == 1 and name != "class_labels" else values
            return made

        yield make


def _is_known(name: str) -> bool:
    return name in PICTURES + MASKS + VIDEOS or name in ("class_labels", "control_mode", "source_prompt")


def _make(name: str, seed: int, height: int, width: int, num_frames: int) -> Any:
    if name in PICTURES:
        return picture(seed, height, width)
    if name in MASKS:
        return mask(height, width)
    if name in VIDEOS:
        return video(seed, num_frames, height, width)
    return "a photo" if name == "source_prompt" else seed % 2 if name == "class_labels" else 0
