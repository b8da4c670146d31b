"""Equality of tensors that calls share, without comparing them at every step."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Hashable

import torch

_fingerprints: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
_digests: dict[int, tuple[int | None, Hashable]] = {}


def fingerprint(tensor: torch.Tensor) -> Hashable:
    """Return a hashable that is equal for tensors with equal contents.

    A pipeline passes the same tensor at every step, so the digest is kept for as long as the tensor lives and is not
    written to: its version counter tells. (Inference tensors have none, so theirs is made anew each time. That is why
    the executor runs under `no_grad`.)
    """
    version = None if tensor.is_inference() else tensor._version
    known = _digests.get(id(tensor))
    if version is not None and known is not None and known[0] == version and _fingerprints.get(id(tensor)) is tensor:
        return known[1]
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    digest = (
        tuple(tensor.shape),
        tensor.dtype,
        tensor.device,
        hashlib.blake2b(raw.tobytes(), digest_size=16).digest(),
    )
    if len(_digests) > 256:
        for stale in [i for i in _digests if i not in _fingerprints]:
            del _digests[stale]
    _fingerprints[id(tensor)] = tensor
    _digests[id(tensor)] = (version, digest)
    return digest
