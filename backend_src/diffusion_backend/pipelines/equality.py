"""When the output of a merged call counts as the output of the call alone."""

from __future__ import annotations

from typing import Any

import torch

from . import layout

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest difference, relative to the larger of 1 and the largest output, between a merged call and the call alone.

A few units of the type's precision, grown by the depth of a network: other row counts take other matrix kernels.
"""


def tolerance_of(output: Any) -> float:
    """Return the tolerance for an output: that of its coarsest dtype."""
    return max((TOLERANCES.get(tensor.dtype, 1e-4) for tensor in layout.tensors(output)), default=1e-4)


def largest_difference(one: Any, two: Any) -> float:
    """Return the largest difference of two outputs relative to the larger of 1 and their largest value.

    Infinite if the structures differ; places where both are NaN count as equal.
    """
    ones, twos = list(layout.tensors(one)), list(layout.tensors(two))
    if [t.shape for t in ones] != [t.shape for t in twos]:
        return float("inf")
    return max((_difference(a, b) for a, b in zip(ones, twos, strict=True)), default=0.0)


def _difference(one: torch.Tensor, two: torch.Tensor) -> float:
    if one.numel() == 0:
        return 0.0
    a, b = one.detach().double(), two.detach().double()
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))  # infinities of one sign are equal too
    difference = torch.where(same, 0.0, (a - b).abs())
    scale = torch.where(torch.isfinite(a), a.abs(), 0.0).max().clamp(min=1.0)
    largest = float((difference / scale).max())
    return largest if largest == largest else float("inf")
