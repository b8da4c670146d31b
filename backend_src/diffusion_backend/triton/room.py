"""Whether an answer fits into the shared memory through which it reaches the server."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UnavailableError

SHARED_MEMORY = "/dev/shm"

FIRST_ROOM = 2**18
"""Bytes that need no more memory: a part of what each model's process begins with (1 MiB, Triton's default)."""

_MARGIN = 2**20
"""What a send needs besides the data; the memory of a process grows in steps of this size."""


class NoRoomError(UnavailableError):
    """An answer does not fit into the shared memory."""

    def __init__(self, size: int, *, request_id: str = "") -> None:
        super().__init__(
            f"the result of {size / 2**20:.1f} MiB does not fit into the server's shared memory; ask for fewer or "
            "smaller outputs, or for files (output_format), or give the server more (docker: --shm-size)",
            request_id=request_id,
        )


def size_of(value: NDArray[Any]) -> int:
    """Return the bytes of a tensor, those of its texts where it holds texts."""
    if value.dtype == np.object_:
        return sum(len(item) for item in value.reshape(-1))
    return int(value.nbytes)


def is_tight(size: int) -> bool:
    """Whether there may be too little room for `size` bytes more. What is in use already may have room, too."""
    if size <= FIRST_ROOM:
        return False
    stat = os.statvfs(SHARED_MEMORY)
    return stat.f_bavail * stat.f_frsize < size + _MARGIN
