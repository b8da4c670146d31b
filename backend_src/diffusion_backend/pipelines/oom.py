"""Too little memory: told from everything else that can go wrong, and remembered."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception tells that the device or the host has too little memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


class RowLimits:
    """How many rows fit into a forward, learned from those that did not; used by the engine's thread only.

    What does not fit at one size does not fit at a larger one either, so a limit holds for all rows of at least as many
    elements. It holds until the model is loaded again: trying out now and then whether more fits would cost somebody a
    failed forward each time.
    """

    def __init__(self) -> None:
        self._limits: dict[int, int] = {}  # elements of a row -> rows

    def note(self, row_elements: int, rows: int) -> None:
        """Remember that rows of this size are to be run at most so many at once."""
        self._limits[row_elements] = min(rows, self._limits.get(row_elements, rows))

    def of(self, row_elements: int) -> int | None:
        """Return the most rows of this size for one forward, or None where nothing is known."""
        return min((rows for size, rows in self._limits.items() if size <= row_elements), default=None)

    def __bool__(self) -> bool:
        return bool(self._limits)
