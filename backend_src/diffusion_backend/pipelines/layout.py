"""The row layout of a denoiser's arguments and outputs: learned from two calls, never written down.

Compare the arguments of a call with n rows and of one with 2n: what doubled is a batch. The result is a tree of rules
in the shape of the arguments; it can tell the key by which calls may be merged, merge several calls into one, and split
the output again.

    Rows      a tensor; the axis that doubled is the batch axis, merged by concatenation
    Each      a tensor of one element (a timestep) that did not change: becomes one value a row
    Shared    a tensor that did not change: must be equal in all calls merged (a table of positions, say)
    Items     a list or tuple whose length doubled: merged by concatenation
    Sum       an integer that doubled (a batch size): merged by addition
    Constant  anything else that did not change: must be equal
    Fields    a dict, list, tuple or dataclass: rules for its parts
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .fingerprint import fingerprint

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class LayoutError(Exception):
    """Two calls do not tell how rows are laid out; `reason` is a short word for a metric label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """A tensor with its rows along `axis`."""

    axis: int
    ndim: int


@dataclasses.dataclass(frozen=True, slots=True)
class Each:
    """A tensor of one element (of 0 or 1 dimensions) that holds for every row of its call."""

    ndim: int


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """A tensor that all rows share."""

    ndim: int


@dataclasses.dataclass(frozen=True, slots=True)
class Items:
    """A list or tuple with one item a row."""

    kind: type


@dataclasses.dataclass(frozen=True, slots=True)
class Sum:
    """An integer proportional to the rows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """A value that all rows share."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """A container whose parts have rules of their own, in the container's order."""

    kind: type
    names: tuple[Hashable, ...]
    parts: tuple[Rule, ...]


Rule = Rows | Each | Shared | Items | Sum | Constant | Fields


def learn(one: Any, two: Any, *, each: bool = True, where: str = "arguments") -> Rule:
    """Return the rule for `one`, a value of a call with n rows, given its counterpart `two` of a call with 2n.

    Args:
        each: whether a one-element tensor of one dimension that did not change holds for each row (`Each`) or for all
            (`Shared`); both occur, so a caller tries the first and falls back to the second. Tensors of no dimension
            are always `Each`.
        where: names the value in errors.

    Raises:
        LayoutError: the two cannot be told apart, or do not correspond.
    """
    if isinstance(one, torch.Tensor):
        return _learn_tensor(one, two, each, where)
    parts = _parts(one)
    if parts is not None:
        return _learn_container(one, two, parts, each, where)
    if isinstance(one, bool) or not isinstance(one, int):
        if isinstance(one, _SCALARS) and one != two:
            raise LayoutError("argument", f"{where} is {one!r}, then {two!r}")
        return Constant()
    if isinstance(two, bool) or not isinstance(two, int):
        raise LayoutError("structure", f"{where} is an int, then {type(two).__name__}")
    if one == two:
        return Constant()
    if two == 2 * one:
        return Sum()
    raise LayoutError("argument", f"{where} is {one}, then {two}")


def _learn_container(one: Any, two: Any, parts: list[tuple[Hashable, Any]], each: bool, where: str) -> Rule:
    others = _parts(two)
    if others is None or not _same_kind(type(one), two):
        raise LayoutError("structure", f"{where} is {type(one).__name__}, then {type(two).__name__}")
    if isinstance(one, list | tuple) and len(others) == 2 * len(parts) > 0:
        return Items(type(one))
    names = tuple(name for name, _ in parts)
    if names != tuple(name for name, _ in others):
        raise LayoutError("structure", f"the parts of {where} differ")
    return Fields(
        type(one),
        names,
        tuple(learn(a, b, each=each, where=f"{where}.{name}") for (name, a), (_, b) in zip(parts, others, strict=True)),
    )


def _learn_tensor(one: torch.Tensor, two: Any, each: bool, where: str) -> Rule:
    if not isinstance(two, torch.Tensor) or one.ndim != two.ndim or one.dtype != two.dtype:
        raise LayoutError("structure", f"{where} is a tensor of another kind in the second call")
    differing = [axis for axis in range(one.ndim) if one.shape[axis] != two.shape[axis]]
    if not differing:
        if one.ndim == 0 or (each and one.ndim == 1 and one.numel() == 1):
            return Each(one.ndim)
        return Shared(one.ndim)
    if len(differing) == 1 and two.shape[differing[0]] == 2 * one.shape[differing[0]]:
        return Rows(differing[0], one.ndim)
    raise LayoutError("axis", f"{where} has the shape {tuple(one.shape)}, then {tuple(two.shape)}")


def guess(value: Any, *, items: bool, depth: int = 0) -> Rule:
    """Return a rule for a call of which no double is known, from its sizes alone; it must pass a check before use.

    The rows are the first axis of the first tensor of three or more dimensions. Every tensor whose first axis is a
    multiple of them is taken to have its rows there.

    Args:
        value: the arguments or the output of a call.
        items: whether lists and tuples of tensors with as many items as rows hold one item a row.
        depth: the containers that surely hold no rows; 2 for arguments, which are (args, kwargs).

    Raises:
        LayoutError: there is no such tensor.
    """
    sizes = [t.shape[0] for t in tensors(value) if t.ndim >= (1 if items else 3)]
    if not sizes or sizes[0] == 0:
        raise LayoutError("no_batch_axis", "no argument has rows")
    if not items:
        return _guess(value, sizes[0], items, depth)
    first = next(_lists(value, depth), None)
    if first is None:
        raise LayoutError("no_batch_axis", "no argument is a list of tensors")
    return _guess(value, len(first), items, depth)


def _lists(value: Any, depth: int) -> Iterator[list[Any] | tuple[Any, ...]]:
    """Yield the lists and tuples of tensors in a value."""
    if depth <= 0 and _is_list_of_tensors(value):
        yield value
    else:
        for _, part in _parts(value) or ():
            yield from _lists(part, depth - 1)


def _guess(value: Any, rows: int, items: bool, depth: int) -> Rule:
    if isinstance(value, torch.Tensor):
        size = value.shape[0] if value.ndim else 0
        # One row divides everything, so there only the size itself tells.
        belongs = size == rows or (rows > 1 and size > 0 and size % rows == 0)
        if belongs and not (items and value.ndim > 1):
            return Rows(0, value.ndim)
        return Each(value.ndim) if value.numel() == 1 and value.ndim <= 1 else Shared(value.ndim)
    parts = _parts(value)
    if parts is None:
        return Constant()
    if items and depth <= 0 and len(parts) == rows and _is_list_of_tensors(value):
        return Items(type(value))
    names = tuple(name for name, _ in parts)
    return Fields(type(value), names, tuple(_guess(part, rows, items, depth - 1) for _, part in parts))


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, torch.Tensor) for item in value)


def is_opaque(value: Any) -> bool:
    """Whether something in a value is neither tensor nor plain: a cache, say. It cannot be split into rows.

    As an argument such a thing may be shared, if it is the same one; as an output it belongs to all rows together.
    """
    if isinstance(value, torch.Tensor) or isinstance(value, _SCALARS):  # noqa: SIM101  # one is a type, one a tuple
        return False
    parts = _parts(value)
    return parts is None or any(is_opaque(part) for _, part in parts)


def has_rows(rule: Rule) -> bool:
    """Whether anything in the rule depends on the number of rows."""
    if isinstance(rule, Fields):
        return any(has_rows(part) for part in rule.parts)
    return isinstance(rule, Rows | Items)


def matches(rule: Rule, value: Any) -> bool:
    """Whether a value has the structure that the rule was learned from (sizes aside)."""
    if isinstance(rule, Rows | Shared):
        return isinstance(value, torch.Tensor) and value.ndim == rule.ndim
    if isinstance(rule, Each):
        return isinstance(value, torch.Tensor) and value.ndim == rule.ndim and value.numel() == 1
    if isinstance(rule, Items):
        return _same_kind(rule.kind, value)
    if isinstance(rule, Sum):
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(rule, Constant):
        return not isinstance(value, torch.Tensor)
    if not _same_kind(rule.kind, value):
        return False
    parts = _parts(value)
    assert parts is not None
    return tuple(n for n, _ in parts) == rule.names and all(
        matches(r, v) for r, (_, v) in zip(rule.parts, parts, strict=True)
    )


def can_refute(rule: Rule, values: Sequence[Any]) -> bool:
    """Whether merging these calls could show that a guessed rule is wrong: their values must differ where it matters.

    Every one-element tensor that is to hold for each row, and some tensor of rows, must differ between the calls.
    """
    eachs: list[bool] = []
    rows: list[bool] = []
    _compare(rule, values, eachs, rows)
    return all(eachs) and any(rows)


def _compare(rule: Rule, values: Sequence[Any], eachs: list[bool], rows: list[bool]) -> None:
    if isinstance(rule, Each | Rows):
        first = values[0]
        differ = any(other.shape != first.shape or not torch.equal(other, first) for other in values[1:])
        (eachs if isinstance(rule, Each) else rows).append(differ)
    elif isinstance(rule, Items):
        rows.append(True)
    elif isinstance(rule, Fields):
        columns = [[part for _, part in _parts(value) or ()] for value in values]
        for i, part in enumerate(rule.parts):
            _compare(part, [column[i] for column in columns], eachs, rows)


def count_rows(rule: Rule, value: Any) -> int:
    """Return the rows of a call: the greatest common divisor of its batch sizes.

    (Where frames are folded into the batch axis of one argument but not of another, that is the number of videos.)
    """
    return math.gcd(*_sizes(rule, value))


def _sizes(rule: Rule, value: Any) -> Iterator[int]:
    if isinstance(rule, Rows):
        yield value.shape[rule.axis]
    elif isinstance(rule, Items):
        yield len(value)
    elif isinstance(rule, Fields):
        for part, (_, item) in zip(rule.parts, _parts(value) or (), strict=True):
            yield from _sizes(part, item)


def row_elements(rule: Rule, value: Any, rows: int) -> int:
    """Return the elements of one row of a call, over all tensors with rows: what the memory of a forward grows with."""
    if isinstance(rule, Rows):
        return int(value.numel()) // rows
    if isinstance(rule, Items):
        return sum(item.numel() for item in value if isinstance(item, torch.Tensor)) // rows
    if isinstance(rule, Fields):
        return sum(row_elements(r, v, rows) for r, (_, v) in zip(rule.parts, _parts(value) or (), strict=True))
    return 0


def key(rule: Rule, value: Any, rows: int) -> Hashable:
    """Return what must be equal in two calls for them to be merged: all but the values of rows and their number."""
    if isinstance(rule, Rows):
        shape = list(value.shape)
        shape[rule.axis] //= rows
        return (tuple(shape), value.dtype, value.device)
    if isinstance(rule, Each):
        return (value.dtype, value.device)
    if isinstance(rule, Shared):
        return fingerprint(value)
    if isinstance(rule, Items):
        return (len(value) // rows, tuple(sorted({_item_key(item) for item in value}, key=repr)))
    if isinstance(rule, Sum):
        return (int, value / rows)
    if isinstance(rule, Constant):
        return (type(value), value) if isinstance(value, _SCALARS) else id(value)
    return tuple(key(r, v, rows) for r, (_, v) in zip(rule.parts, _parts(value) or (), strict=True))


def _item_key(item: Any) -> Hashable:
    if isinstance(item, torch.Tensor):
        return (tuple(item.shape), item.dtype, item.device)
    return item if isinstance(item, _SCALARS) else id(item)


def merge(rule: Rule, values: Sequence[Any], rows: Sequence[int]) -> Any:
    """Return one value for the rows of all calls, in order; `rows[i]` is the number of rows of `values[i]`."""
    first = values[0]
    if isinstance(rule, Rows):
        return torch.cat(list(values), dim=rule.axis)
    if isinstance(rule, Each):
        return torch.cat([value.reshape(1).expand(n) for value, n in zip(values, rows, strict=True)])
    if isinstance(rule, Items):
        return rule.kind(item for value in values for item in value)
    if isinstance(rule, Sum):
        return sum(values)
    if isinstance(rule, Fields):
        columns = [[part for _, part in _parts(value) or ()] for value in values]
        return _rebuild(first, [merge(r, [c[i] for c in columns], rows) for i, r in enumerate(rule.parts)])
    return first


def split(rule: Rule, value: Any, rows: Sequence[int]) -> list[Any]:
    """Undo `merge` on an output: return the part of each call.

    Raises:
        LayoutError: the output has not as many rows as went in.
    """
    total = sum(rows)
    if isinstance(rule, Rows):
        return list(torch.split(value, _shares(value.shape[rule.axis], rows, total), dim=rule.axis))
    if isinstance(rule, Items):
        out, position = [], 0
        for share in _shares(len(value), rows, total):
            out.append(rule.kind(value[position : position + share]))
            position += share
        return out
    if isinstance(rule, Fields):
        columns = [split(r, v, rows) for r, (_, v) in zip(rule.parts, _parts(value) or (), strict=True)]
        return [_rebuild(value, [column[i] for column in columns]) for i in range(len(rows))]
    return [value] * len(rows)


def _shares(size: int, rows: Sequence[int], total: int) -> list[int]:
    if size % total:
        raise LayoutError("output", f"an output of size {size} does not divide into {total} rows")
    return [n * size // total for n in rows]


def _same_kind(kind: type, value: Any) -> bool:
    """Whether a value is of a container type; lists and plain tuples stand for each other, as pipelines mix them."""
    return type(value) is kind or (kind in (list, tuple) and type(value) in (list, tuple))


# -- containers -------------------------------------------------------------------------------------------------


def _parts(value: Any) -> list[tuple[Hashable, Any]] | None:
    """Return the named parts of a container, or None if the value is none."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def _rebuild(like: Any, parts: list[Any]) -> Any:
    """Return a container like `like` with other parts."""
    if isinstance(like, Mapping):
        named = dict(zip(like, parts, strict=True))
        return named if type(like) is dict else type(like)(**{str(k): v for k, v in named.items()})
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*parts)
    if isinstance(like, list | tuple):
        return type(like)(parts)
    return dataclasses.replace(like, **{f.name: p for f, p in zip(dataclasses.fields(like), parts, strict=True)})


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return `value` with every tensor in it replaced by `function` of it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    parts = _parts(value)
    return value if parts is None else _rebuild(value, [map_tensors(function, part) for _, part in parts])


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in a value."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for _, part in _parts(value) or ():
            yield from tensors(part)
