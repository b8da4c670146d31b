"""The row layout: a table of what calls look like for one row and for two, and what becomes of them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

from diffusion_backend.pipelines import fingerprint, layout
from diffusion_backend.pipelines.layout import Constant, Each, Fields, Items, LayoutError, Rows, Shared, Sum


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Bundle:
    hidden: torch.Tensor
    scale: float


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal in type, structure and contents."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    parts, others = layout._parts(a), layout._parts(b)
    if parts is None:
        return bool(a == b)
    return [n for n, _ in parts] == [n for n, _ in others] and all(
        same(x, y) for (_, x), (_, y) in zip(parts, others, strict=True)
    )


TABLE = torch.arange(6.0)


# name: value for one row, value for two, the rule, another value for two rows, and one and the other merged.
CASES: dict[str, tuple[Any, Any, Any, Any, Any]] = {
    "batch axis 0": (
        numbers(1, 4),
        numbers(2, 4),
        Rows(0, 2),
        numbers(2, 4, seed=1),
        torch.cat([numbers(1, 4), numbers(2, 4, seed=1)]),
    ),
    "batch axis 1": (
        numbers(7, 1, 4),
        numbers(7, 2, 4),
        Rows(1, 3),
        numbers(7, 2, 4, seed=1),
        torch.cat([numbers(7, 1, 4), numbers(7, 2, 4, seed=1)], dim=1),
    ),
    "timestep of no dimension": (
        torch.tensor(981),
        torch.tensor(981),
        Each(0),
        torch.tensor(1),
        torch.tensor([981, 1, 1]),
    ),
    "timestep of one element": (
        torch.tensor([981.0]),
        torch.tensor([981.0]),
        Each(1),
        torch.tensor([1.0]),
        torch.tensor([981.0, 1.0, 1.0]),
    ),
    "timestep for each row": (
        torch.tensor([5]),
        torch.tensor([5, 5]),
        Rows(0, 1),
        torch.tensor([3, 4]),
        torch.tensor([5, 3, 4]),
    ),
    "shared table": (TABLE, TABLE, Shared(1), TABLE.clone(), TABLE),
    "list of tensors": (
        [numbers(3)],
        [numbers(3), numbers(3)],
        Items(list),
        [numbers(3, seed=1), numbers(3, seed=2)],
        [numbers(3), numbers(3, seed=1), numbers(3, seed=2)],
    ),
    "tuple of equal texts": (("a",), ("a", "a"), Items(tuple), ("a", "a"), ("a", "a", "a")),
    "number of rows": (1, 2, Sum(), 2, 3),
    "a number": (8, 8, Constant(), 8, 8),
    "a flag": (False, False, Constant(), False, False),
    "nothing": (None, None, Constant(), None, None),
    "nested dicts": (
        {"a": {"b": numbers(1, 2), "c": "x"}},
        {"a": {"b": numbers(2, 2), "c": "x"}},
        Fields(dict, ("a",), (Fields(dict, ("b", "c"), (Rows(0, 2), Constant())),)),
        {"a": {"b": numbers(2, 2, seed=1), "c": "x"}},
        {"a": {"b": torch.cat([numbers(1, 2), numbers(2, 2, seed=1)]), "c": "x"}},
    ),
    "ordered dict": (
        OrderedDict(x=numbers(1, 2)),
        OrderedDict(x=numbers(2, 2)),
        Fields(OrderedDict, ("x",), (Rows(0, 2),)),
        OrderedDict(x=numbers(2, 2, seed=1)),
        OrderedDict(x=torch.cat([numbers(1, 2), numbers(2, 2, seed=1)])),
    ),
    "model output": (
        UNet2DConditionOutput(sample=numbers(1, 2)),
        UNet2DConditionOutput(sample=numbers(2, 2)),
        Fields(UNet2DConditionOutput, ("sample",), (Rows(0, 2),)),
        UNet2DConditionOutput(sample=numbers(2, 2, seed=1)),
        UNet2DConditionOutput(sample=torch.cat([numbers(1, 2), numbers(2, 2, seed=1)])),
    ),
    "dataclass": (
        Bundle(numbers(1, 2), 0.5),
        Bundle(numbers(2, 2), 0.5),
        Fields(Bundle, ("hidden", "scale"), (Rows(0, 2), Constant())),
        Bundle(numbers(2, 2, seed=1), 0.5),
        Bundle(torch.cat([numbers(1, 2), numbers(2, 2, seed=1)]), 0.5),
    ),
    "named tuple": (
        Pair(numbers(1, 2), TABLE),
        Pair(numbers(2, 2), TABLE),
        Fields(Pair, (0, 1), (Rows(0, 2), Shared(1))),
        Pair(numbers(2, 2, seed=1), TABLE),
        Pair(torch.cat([numbers(1, 2), numbers(2, 2, seed=1)]), TABLE),
    ),
    "residuals of a control net": (
        (numbers(1, 2), numbers(1, 3)),
        (numbers(2, 2), numbers(2, 3)),
        Fields(tuple, (0, 1), (Rows(0, 2), Rows(0, 2))),
        (numbers(2, 2, seed=1), numbers(2, 3, seed=1)),
        (
            torch.cat([numbers(1, 2), numbers(2, 2, seed=1)]),
            torch.cat([numbers(1, 3), numbers(2, 3, seed=1)]),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_learned_and_merges_calls_of_different_numbers_of_rows(name: str) -> None:
    one, two, rule, other, merged = CASES[name]
    assert layout.learn(one, two) == rule
    assert layout.matches(rule, one)
    assert layout.matches(rule, other)
    assert layout.key(rule, one, 1) == layout.key(rule, other, 2)
    assert same(layout.merge(rule, [one, other], [1, 2]), merged)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if layout.has_rows(case[2])])
def test_splitting_undoes_merging(name: str) -> None:
    one, _, rule, other, merged = CASES[name]
    first, second = layout.split(rule, merged, [1, 2])
    assert same(first, one)
    assert same(second, other)
    assert layout.count_rows(rule, one) == 1
    assert layout.count_rows(rule, merged) == 3


def test_only_tensors_and_lists_of_rows_are_a_batch() -> None:
    without = {"timestep of no dimension", "timestep of one element", "shared table", "number of rows", "a number"}
    without |= {"a flag", "nothing"}
    assert {name for name, case in CASES.items() if not layout.has_rows(case[2])} == without


@pytest.mark.parametrize(
    ("one", "two", "reason", "text"),
    [
        (numbers(1, 4), numbers(3, 4), "axis", r"arguments has the shape \(1, 4\), then \(3, 4\)"),
        (numbers(1, 4), numbers(2, 8), "axis", "shape"),
        (numbers(1, 4), numbers(2, 4, 1), "structure", "tensor of another kind"),
        (numbers(1, 4), numbers(2, 4).half(), "structure", "tensor of another kind"),
        (numbers(1, 4), None, "structure", "tensor of another kind"),
        (None, numbers(1, 4), "argument", "then"),
        ({"a": 1}, {"b": 1}, "structure", "the parts of arguments differ"),
        ({"a": 1}, [1], "structure", "arguments is dict, then list"),
        ((1,), {0: 1}, "structure", "arguments is tuple, then dict"),
        (Pair(TABLE, TABLE), [TABLE, TABLE], "structure", "arguments is Pair, then list"),
        ([1, 2], [1, 2, 3], "structure", "the parts of arguments differ"),
        (3, 5, "argument", "arguments is 3, then 5"),
        (3, "3", "structure", "arguments is an int, then str"),
        (1, True, "structure", "arguments is an int, then bool"),
        (True, False, "argument", "arguments is True, then False"),
        (0.5, 0.75, "argument", r"arguments is 0\.5, then 0\.75"),
        ("a", "b", "argument", "arguments is 'a', then 'b'"),
        ({"a": {"b": 0.5}}, {"a": {"b": 1.0}}, "argument", r"arguments\.a\.b is 0\.5"),
    ],
)
def test_calls_that_do_not_correspond_are_an_error_with_a_reason(one: Any, two: Any, reason: str, text: str) -> None:
    with pytest.raises(LayoutError, match=text) as caught:
        layout.learn(one, two)
    assert caught.value.reason == reason


def test_lists_and_tuples_stand_for_each_other() -> None:
    """A pipeline passes its residuals once as a list and once as a tuple; they are merged into the first one's kind."""
    one, two = [numbers(1, 2), numbers(1, 3)], (numbers(2, 2, seed=1), numbers(2, 3, seed=1))
    rule = layout.learn(one, two)
    assert rule == Fields(list, (0, 1), (Rows(0, 2), Rows(0, 2)))
    assert layout.matches(rule, two)
    assert layout.key(rule, one, 1) == layout.key(rule, two, 2)
    merged = layout.merge(rule, [one, two], [1, 2])
    assert type(merged) is list
    assert [tuple(part.shape) for part in merged] == [(3, 2), (3, 3)]


def test_one_element_can_be_learned_as_shared() -> None:
    one = torch.tensor([0.5])
    assert layout.learn(one, one, each=False) == Shared(1)
    assert layout.learn(torch.tensor(0.5), torch.tensor(0.5), each=False) == Each(0)


def test_an_empty_list_is_no_batch() -> None:
    assert layout.learn([], []) == Fields(list, (), ())


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        (Rows(0, 2), numbers(3)),
        (Rows(0, 2), [1]),
        (Shared(1), numbers(1, 1)),
        (Each(1), numbers(2)),
        (Each(0), 3),
        (Items(list), {0: 1}),
        (Sum(), True),
        (Sum(), 1.0),
        (Constant(), numbers(1)),
        (Fields(dict, ("a",), (Constant(),)), {"a": 1, "b": 2}),
        (Fields(dict, ("a",), (Constant(),)), OrderedDict(a=1)),
        (Fields(dict, ("a",), (Rows(0, 1),)), {"a": None}),
        (Fields(tuple, (0,), (Constant(),)), {0: 1}),
        (Fields(Pair, (0, 1), (Shared(1), Shared(1))), (TABLE, TABLE)),
    ],
)
def test_a_value_of_another_structure_does_not_match(rule: Any, value: Any) -> None:
    assert not layout.matches(rule, value)


@pytest.mark.parametrize(
    ("rule", "a", "b"),
    [
        (Rows(0, 2), numbers(1, 4), numbers(1, 8)),
        (Rows(0, 2), numbers(1, 4), numbers(1, 4).half()),
        (Each(0), torch.tensor(1), torch.tensor(1.0)),
        (Shared(1), TABLE, TABLE + 1),
        (Items(list), [numbers(3)], [numbers(4)]),
        (Items(list), ["a"], ["b"]),
        (Constant(), 1, 1.0),
        (Constant(), 1, True),
        (Constant(), None, 0),
        (Constant(), object(), object()),
        (Sum(), 1, 2),
        (Fields(dict, ("a",), (Constant(),)), {"a": "x"}, {"a": "y"}),
    ],
)
def test_calls_that_differ_in_more_than_rows_have_different_keys(rule: Any, a: Any, b: Any) -> None:
    """Equal keys here would merge calls of, say, different sizes or settings: wrong pictures."""
    assert layout.key(rule, a, 1) != layout.key(rule, b, 1)
    assert layout.key(rule, a, 1) == layout.key(rule, a, 1)


def test_frames_folded_into_the_batch_axis_count_as_one_row_a_video() -> None:
    """AnimateDiff folds 16 frames into the rows of the sample, but not of the prompt."""

    def call(videos: int, seed: int = 0) -> dict[str, Any]:
        return {"sample": numbers(videos * 16, 4, seed=seed), "prompt": numbers(videos, 3, seed=seed), "n": videos}

    rule = layout.learn(call(1), call(2))
    assert rule == Fields(dict, ("sample", "prompt", "n"), (Rows(0, 2), Rows(0, 2), Sum()))
    assert [layout.count_rows(rule, call(n)) for n in (1, 2, 3)] == [1, 2, 3]
    assert layout.key(rule, call(1), 1) == layout.key(rule, call(3), 3)
    merged = layout.merge(rule, [call(1), call(2, seed=1)], [1, 2])
    assert merged["sample"].shape == (48, 4)
    assert merged["n"] == 3
    parts = layout.split(Rows(0, 2), merged["sample"], [1, 2])
    assert torch.equal(parts[0], call(1)["sample"])
    assert torch.equal(parts[1], call(2, seed=1)["sample"])
    other_length = {**call(1), "sample": numbers(24, 4)}
    assert layout.key(rule, other_length, layout.count_rows(rule, other_length)) != layout.key(rule, call(1), 1)


@pytest.mark.parametrize("value", [numbers(4, 2), [1, 2, 3, 4]])
def test_an_output_that_does_not_divide_into_the_rows_is_an_error(value: Any) -> None:
    rule = Rows(0, 2) if isinstance(value, torch.Tensor) else Items(list)
    with pytest.raises(LayoutError, match="an output of size 4 does not divide into 3 rows") as caught:
        layout.split(rule, value, [1, 2])
    assert caught.value.reason == "output"


def test_a_part_of_an_output_that_all_rows_share_goes_to_everyone() -> None:
    assert layout.split(Constant(), "x", [1, 2]) == ["x", "x"]
    first, second = layout.split(Fields(tuple, (0, 1), (Rows(0, 1), Shared(1))), (torch.arange(3), TABLE), [2, 1])
    assert torch.equal(first[0], torch.tensor([0, 1]))
    assert torch.equal(second[0], torch.tensor([2]))
    assert first[1] is TABLE
    assert second[1] is TABLE


# -- guesses ----------------------------------------------------------------------------------------------------


def test_a_guess_takes_the_rows_from_the_first_large_tensor() -> None:
    call = (
        (numbers(2, 4, 8), torch.tensor(7)),
        {"text": numbers(2, 5, 3), "table": TABLE[:5], "folded": numbers(6, 2)},
    )
    rule = layout.guess(call, items=False)
    assert rule == Fields(
        tuple,
        (0, 1),
        (
            Fields(tuple, (0, 1), (Rows(0, 3), Each(0))),
            Fields(dict, ("text", "table", "folded"), (Rows(0, 3), Shared(1), Rows(0, 2))),
        ),
    )


def test_the_positional_arguments_themselves_are_no_batch_list() -> None:
    """A call `forward(sample, timestep)` is a tuple of tensors too."""
    call = ((numbers(1, 4), numbers(1, 4)), {"caps": [numbers(3, 2), numbers(2, 2)]})
    rule = layout.guess(call, items=True, depth=2)
    assert isinstance(rule, Fields)
    assert isinstance(rule.parts[0], Fields)
    assert rule.parts[1] == Fields(dict, ("caps",), (Items(list),))


def test_a_guess_of_items_takes_lists_of_one_tensor_a_row() -> None:
    call = ([numbers(4, 3), numbers(5, 3)], torch.tensor([1.0, 2.0]), {"cap": [numbers(2, 3), numbers(3, 3)]})
    rule = layout.guess(call, items=True)
    assert rule == Fields(tuple, (0, 1, 2), (Items(list), Rows(0, 1), Fields(dict, ("cap",), (Items(list),))))


@pytest.mark.parametrize(
    ("value", "items"),
    [((1, "x"), False), ((numbers(2, 3),), False), ((numbers(0, 3, 3),), False), ({"a": TABLE}, True)],
)
def test_a_call_without_rows_cannot_be_guessed(value: Any, items: bool) -> None:
    with pytest.raises(LayoutError) as caught:
        layout.guess(value, items=items)
    assert caught.value.reason == "no_batch_axis"


# -- fingerprints -----------------------------------------------------------------------------------------------


def test_a_fingerprint_tells_contents_and_not_identity() -> None:
    a = numbers(3, 4)
    assert layout.fingerprint(a) == layout.fingerprint(a.clone())
    assert layout.fingerprint(a) != layout.fingerprint(a + 1)
    assert layout.fingerprint(a) != layout.fingerprint(a.reshape(4, 3))
    assert layout.fingerprint(torch.zeros(4)) != layout.fingerprint(torch.zeros(4, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float16, torch.int64, torch.complex64])
def test_every_dtype_has_a_fingerprint(dtype: torch.dtype) -> None:
    a = torch.tensor([0, 1, 1]).to(dtype)
    assert layout.fingerprint(a) == layout.fingerprint(a.clone())
    assert layout.fingerprint(a) != layout.fingerprint(a.flip(0))
    assert layout.fingerprint(a[:0]) == layout.fingerprint(a[:0])


def test_a_view_has_the_fingerprint_of_its_contents() -> None:
    a = torch.arange(12.0).reshape(3, 4)
    assert layout.fingerprint(a[:, 1]) == layout.fingerprint(torch.tensor([1.0, 5.0, 9.0]))


def test_a_change_in_place_changes_the_fingerprint() -> None:
    a = numbers(4)
    before = layout.fingerprint(a)
    assert layout.fingerprint(a) is before  # kept: it is not digested again at every step
    a[0] += 1
    assert layout.fingerprint(a) != before


def test_a_new_tensor_in_the_place_of_a_dead_one_has_its_own_fingerprint() -> None:
    """Python hands out the address of a dead object again; a table of digests by address alone would lie."""
    seen = set()
    for i in range(600):
        seen.add(layout.fingerprint(torch.full((4,), float(i))))
    assert len(seen) == 600
    assert len(fingerprint._digests) <= 257 + 1


def test_map_tensors_and_tensors_reach_every_tensor() -> None:
    value = {"a": [numbers(1), (numbers(2), 3)], "b": Bundle(numbers(3), 0.5), "c": Pair(numbers(4), numbers(5))}
    assert [t.numel() for t in layout.tensors(value)] == [1, 2, 3, 4, 5]
    doubled = layout.map_tensors(lambda t: t * 2, value)
    assert type(doubled["c"]) is Pair
    assert type(doubled["b"]) is Bundle
    assert all(torch.equal(2 * a, b) for a, b in zip(layout.tensors(value), layout.tensors(doubled), strict=True))
