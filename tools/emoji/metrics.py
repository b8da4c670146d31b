"""Which emoji a picture shows: the nearest of all the originals."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

# Pictures are compared after averaging over blocks, so that a shifted edge counts little.
COMPARED_SIZE = 16


def shrink(pictures: np.ndarray) -> np.ndarray:
    """Average `uint8[count, 64, 64, 3]` over blocks to `float32[count, 16 * 16 * 3]` in 0..1."""
    count, side = pictures.shape[:2]
    block = side // COMPARED_SIZE
    blocks = pictures.reshape(count, COMPARED_SIZE, block, COMPARED_SIZE, block, 3)
    return blocks.mean(axis=(2, 4), dtype=np.float32).reshape(count, -1) / 255


class NearestEmoji:
    """Ranks the originals by their distance to a picture."""

    def __init__(self, originals: np.ndarray) -> None:
        """`originals` is `uint8[count, 64, 64, 3]`, in the order of the labels."""
        self._originals = shrink(originals)

    def ranking(self, picture: np.ndarray) -> np.ndarray:
        """Return the indices of all the originals, nearest first, for one `uint8[64, 64, 3]`."""
        distances = np.square(self._originals - shrink(picture[None])).sum(axis=1)
        return np.argsort(distances, kind="stable")

    def rank(self, picture: np.ndarray, index: int) -> int:
        """Return the place of the original `index` among the nearest: 0 when it is the nearest."""
        return int(np.flatnonzero(self.ranking(picture) == index)[0])


def share_within(ranks: Iterable[int], places: int) -> float:
    """Return the share of ranks that are among the first `places`."""
    ranks = list(ranks)
    return sum(rank < places for rank in ranks) / len(ranks)
