"""Prompt embeddings that were made before: a text encoder need not read the same prompt twice.

The cache stands in the place of `encode_prompt` of each request's own copy of a pipeline, whatever the pipeline is. The
key is all that the call hangs on: its arguments, the adapters in force, and what the pipeline has set on its copy so
far (the guidance scale, say). A result is kept only if all of that is plain, if it is made of tensors and plain values,
and if the call drew no random numbers: so calls with pictures or generators among their arguments go past the cache.

Entries lie in the host's memory, so that they take none of the device's, and every request gets tensors of its own:
what it writes into them reaches nobody else.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import diffusers
import torch

from ..engine.executor import PromptCacheUse

log = logging.getLogger(__name__)

_PLAIN = (type(None), bool, int, str, bytes, torch.device, torch.dtype)


class _NotPlainError(Exception):
    """A value that neither a key nor an entry can be made of."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of a result, on the host, and the device that it was on."""

    tensor: torch.Tensor
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Entry:
    """A result, its tensors replaced by `_Stored`; what the call set on the pipeline; and the bytes of the tensors."""

    result: Any
    written: dict[str, Any]
    num_bytes: int


class PromptCache:
    """The results of `encode_prompt` that were used last; called by one thread (the engine's, once that runs).

    Args:
        max_bytes: most bytes of all entries together; a result that is larger by itself is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._num_bytes = 0
        self._hits = self._misses = self._told_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries together."""
        return self._num_bytes

    def attach(self, own: Any, adapters: Callable[[], Hashable]) -> None:
        """Put the cache in the place of `encode_prompt` of a request's own pipeline, and of those inside it.

        Args:
            own: from `reference.own_copy`.
            adapters: tells which adapters are in force; called when a prompt is encoded.
        """
        for path, pipeline in _with_nested(own, ""):
            if callable(getattr(type(pipeline), "encode_prompt", None)):
                vars(pipeline)["encode_prompt"] = self._cached(path, pipeline, adapters)

    def clear(self) -> None:
        """Drop all entries: for a control call that has changed what the text encoders give."""
        self._entries.clear()
        self._num_bytes = 0

    def take_use(self) -> PromptCacheUse | None:
        """Return what happened since this was called last; None for nothing."""
        if not (self._hits or self._misses or self._num_bytes != self._told_bytes):
            return None
        use = PromptCacheUse(self._hits, self._misses, self._num_bytes - self._told_bytes)
        self._hits = self._misses = 0
        self._told_bytes = self._num_bytes
        return use

    def _cached(self, path: str, pipeline: Any, adapters: Callable[[], Hashable]) -> Callable[..., Any]:
        # Not the pipeline itself: with a cycle, what a request has left on it would wait for the garbage collector.
        reference = weakref.ref(pipeline)
        untouched = dict(vars(pipeline))

        @functools.wraps(type(pipeline).encode_prompt)
        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            own = reference()
            assert own is not None, "it is called as its method"
            function = type(own).encode_prompt.__get__(own)
            try:
                state = _changed(untouched, vars(own))
                del state["encode_prompt"]  # this function
                key = _digest((path, adapters(), _frozen(args), _frozen(kwargs), _frozen(state)))
            except _NotPlainError:
                self._misses += 1
                return function(*args, **kwargs)
            entry = self._entries.get(key)
            if entry is None:
                self._misses += 1
                return self._encode(key, own, lambda: function(*args, **kwargs))
            self._hits += 1
            self._entries.move_to_end(key)
            vars(own).update(copy.deepcopy(entry.written))
            return _mapped(entry.result, _Stored, lambda stored: _copy(stored.tensor, stored.device))

        return encode_prompt

    def _encode(self, key: bytes, own: Any, call: Callable[[], Any]) -> Any:
        """Encode a prompt, and keep the result if it can be kept."""
        before, random_before = dict(vars(own)), _random_state()
        result = call()
        written = _changed(before, vars(own))
        try:
            _frozen(written)
            written = copy.deepcopy(written)  # the request goes on with its own
            kept = _mapped(result, torch.Tensor, lambda tensor: _Stored(_copy(tensor, _HOST), tensor.device))
        except (_NotPlainError, RuntimeError) as error:  # torch's, of a tensor that cannot be copied as it is
            log.debug("the embeddings of a prompt are not kept: %r", error)
            return result
        if before.keys() <= vars(own).keys() and torch.equal(random_before, _random_state()):
            self._keep(key, _Entry(kept, written, _num_bytes(kept)))
        return result

    def _keep(self, key: bytes, entry: _Entry) -> None:
        """Add an entry, and drop those that were not used for longest until all fit."""
        if not 0 < entry.num_bytes <= self.max_bytes:  # without tensors there is nothing that the bound would hold
            return
        replaced = self._entries.pop(key, None)  # two requests may encode one prompt in turns
        self._num_bytes += entry.num_bytes - (replaced.num_bytes if replaced is not None else 0)
        self._entries[key] = entry
        while self._num_bytes > self.max_bytes:
            self._num_bytes -= self._entries.popitem(last=False)[1].num_bytes


_HOST = torch.device("cpu")
_MISSING = object()


def _with_nested(pipeline: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield a pipeline and those inside it, each with its path from the outermost."""
    yield path, pipeline
    for name, value in list(vars(pipeline).items()):
        if isinstance(value, diffusers.DiffusionPipeline):
            yield from _with_nested(value, f"{path}.{name}")


def _changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in after.items() if before.get(name, _MISSING) is not value}


def _frozen(value: Any) -> Hashable:
    """Return a hashable that is equal for equal plain values of the same types (1, 1.0 and True are three values).

    Raises:
        _NotPlainError: the value is, or holds, something else.
    """
    kind = type(value)
    if kind in _PLAIN:
        return (kind, value)
    if kind is float:
        return (kind, value.hex())
    if kind in (list, tuple):
        return (kind, tuple(_frozen(item) for item in value))
    if kind is dict:
        return (kind, tuple(sorted(((_frozen(name), _frozen(item)) for name, item in value.items()), key=repr)))
    raise _NotPlainError(kind)


def _digest(key: Hashable) -> bytes:
    """Return what stands for a key: prompts may be longer than their embeddings, and nothing bounds what keys take."""
    return hashlib.blake2b(repr(key).encode(errors="surrogatepass"), digest_size=32).digest()


def _mapped(value: Any, leaf: type, change: Callable[[Any], Any]) -> Any:
    """Return a result with each leaf changed; one that is there twice is changed once, and there twice again.

    Raises:
        _NotPlainError: there is something else in it, or a leaf cannot be changed.
    """
    made: dict[int, Any] = {}

    def walk(value: Any) -> Any:
        kind = type(value)
        if kind is leaf:
            if id(value) not in made:
                made[id(value)] = change(value)
            return made[id(value)]
        if kind in (list, tuple):
            return kind(walk(item) for item in value)
        if kind is dict:
            return {name: walk(item) for name, item in value.items()}
        _frozen(value)
        return value

    return walk(value)


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy with the same strides, so that whatever computes with it takes the same way to the same bits.

    Raises:
        RuntimeError: its elements share memory (an expanded tensor), it is no dense one, or the memory is full.
    """
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def _num_bytes(kept: Any) -> int:
    """Return the bytes of an entry's tensors."""
    sizes: list[int] = []
    _mapped(kept, _Stored, lambda stored: sizes.append(stored.tensor.untyped_storage().nbytes()))
    return sum(sizes)


def _random_state() -> torch.Tensor:
    """Return the state of torch's global generators."""
    states = [torch.get_rng_state()]
    # Else they would be made here, and nobody has drawn from them.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += torch.cuda.get_rng_state_all()
    return torch.cat(states)
