"""Results off the device without holding up the engine's thread.

The engine's thread only queues the copy into pinned host memory; whoever reads the result waits for the copy's event
first. On the CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..errors import NotFiniteError
from ..request import DeferredOutput, DiffusionOutput
from .outputs import FIELDS, check_finite, is_finite, quantize, to_output


class HostCopier(Protocol):
    """Copies a tensor of one kind of device to the host; a test replaces it to prove the order."""

    def copy(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Queue the copy; return the host's tensor, and a function that waits until it may be read."""


@dataclass(frozen=True, slots=True)
class CudaCopier:
    """Copies with `non_blocking=True` into pinned memory, and an event."""

    def copy(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """See `HostCopier.copy`; called by the engine's thread, the wait by the thread that reads."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        with torch.cuda.device(tensor.device):
            host.copy_(tensor, non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        # The device's tensor is kept until the copy is done: its memory must not be given to another one before.
        return host, lambda: _wait(event, tensor)


def _wait(event: Any, kept: torch.Tensor) -> None:
    event.synchronize()
    del kept


class _Staged:
    """An output object whose device tensors are on their way to the host."""


def defer_output(
    raw: Any, *, sample_rate: int | None, frame_rate: float | None, copier: HostCopier | None = None
) -> DeferredOutput:
    """Queue the copies of a pipeline's output; called by the engine's thread.

    Pictures become bytes on the device first: a quarter of the data crosses.

    Args:
        raw: as for `to_output`.
        sample_rate, frame_rate: as for `to_output`.
        copier: for tensors that are not on the CPU; by default CUDA's.

    Returns:
        What the finishing thread gets the output from.
    """
    staged = _Staged()
    waits: list[Callable[[], None]] = []
    finite: dict[str, torch.Tensor] = {}  # of what was checked on the device, before it became bytes there
    for name in FIELDS:
        value = getattr(raw, name, None)
        if isinstance(value, torch.Tensor) and (value.device.type != "cpu" or copier is not None):
            copy = (copier or CudaCopier()).copy
            if FIELDS[name] == "pictures":
                finite[name], wait = copy(is_finite(value))
                waits.append(wait)
            value, wait = copy(quantize(value) if FIELDS[name] == "pictures" else value.float())
            waits.append(wait)
        setattr(staged, name, value)

    def get() -> DiffusionOutput:
        for wait in waits:
            wait()
        for name, flag in finite.items():
            if not flag:
                raise NotFiniteError(name)
        check_finite(staged)
        return to_output(staged, sample_rate=sample_rate, frame_rate=frame_rate)

    return DeferredOutput(get)
