"""Compares what requests gave together with what they gave alone."""

from __future__ import annotations

import math

import numpy as np

from ..request import DiffusionOutput


def difference(one: DiffusionOutput, two: DiffusionOutput) -> float:
    """Return the largest difference of two outputs, of 255; infinite if they differ in kind or shape."""
    worst = 0.0
    # The range of sound, -1 to 1, counts as 255 too.
    for name, scale in (("images", 1.0), ("video", 1.0), ("audio", 127.5)):
        a, b = getattr(one, name), getattr(two, name)
        if (a is None) != (b is None) or (a is not None and a.shape != b.shape):
            return math.inf
        if a is not None and a.size:
            apart = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max()) * scale
            worst = max(worst, math.inf if math.isnan(apart) else apart)
    return worst
