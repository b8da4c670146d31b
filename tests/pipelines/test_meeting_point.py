"""Where calls meet: unknown shapes of call are guessed, tried out when two first meet, and learned or rejected."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffusion_backend.engine import WorkKind
from diffusion_backend.pipelines import equality, layout
from diffusion_backend.pipelines.executor import _Raised, run_calls
from diffusion_backend.pipelines.layout import LayoutError
from diffusion_backend.pipelines.meeting_point import Call, CallLayout, MeetingPoint, RequestGreenlet
from diffusion_backend.pipelines.recording import drive


class Module:
    """Something with a `forward`; counts the rows of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.rows: list[int] = []

    def forward(self, x: torch.Tensor, t: Any = 0, *, scale: float = 1.0) -> Any:
        """Say what comes of `x`."""
        self.rows.append(len(x))
        return self.function(x, t) * scale


def rows_apart(x: torch.Tensor, t: Any) -> torch.Tensor:
    return x * 2 + (t.reshape(-1, 1, 1) if isinstance(t, torch.Tensor) else t)


def rows_mixed(x: torch.Tensor, t: Any) -> torch.Tensor:
    return x - x.mean(dim=0, keepdim=True)


def point_of(module: Module, **fields: Any) -> MeetingPoint:
    return MeetingPoint("unet", WorkKind.FORWARD, module.forward, **fields)


def call(point: MeetingPoint, rows: int, value: float, t: float = 0.5, **kwargs: Any) -> Call:
    return Call(point, (torch.full((rows, 2, 2), value), torch.tensor(t)), kwargs)


def test_outside_a_request_the_module_works_as_ever() -> None:
    module = Module(rows_apart)
    original = module.forward
    point_of(module).install(module, "forward")
    assert torch.equal(module.forward(torch.ones(1, 2, 2)), torch.full((1, 2, 2), 2.0))
    assert inspect.signature(module.forward) == inspect.signature(original)  # pipelines ask for it
    assert module.forward.__doc__ == "Say what comes of `x`."


def test_inside_a_request_the_call_parks_and_goes_on_with_what_it_is_given() -> None:
    module = Module(rows_apart)
    point = point_of(module)
    point.install(module, "forward")
    parked: list[Call] = []

    def answer(made: Call) -> Any:
        parked.append(made)
        return made.args[0] + 10

    x = torch.ones(1, 2, 2)
    assert torch.equal(drive(RequestGreenlet(lambda: module.forward(x, 3, scale=2.0)), answer), x + 10)
    assert [c.arguments for c in parked] == [((x, 3), {"scale": 2.0})]
    assert parked[0].point is point
    assert module.rows == []


def test_an_exception_that_is_thrown_in_reaches_the_caller_of_the_module() -> None:
    module = Module(rows_apart)
    point_of(module).install(module, "forward")

    def pipeline() -> str:
        try:
            module.forward(torch.ones(1, 2, 2))
        except ValueError as error:
            return str(error)
        return "nothing"

    def answer(_call: Call) -> Any:
        raise ValueError("no")

    assert drive(RequestGreenlet(pipeline), answer) == "no"


def test_a_new_shape_of_call_is_tried_out_when_two_first_meet_and_joint_from_then_on() -> None:
    module = Module(rows_apart)
    point = point_of(module)
    assert point.solo_reason == "unknown_call"
    first, second = call(point, 1, 1.0, 0.25), call(point, 2, 3.0, 0.75)
    key, rows, reason = point.describe(first)
    assert (rows, reason) == (1, None)
    assert point.describe(second) == (key, 2, None)
    outputs = run_calls([first, second])
    assert module.rows == [1, 2, 3]  # each alone, and the try
    assert point.solo_reason is None
    module.rows.clear()
    again = run_calls([first, second])
    assert module.rows == [3]
    for one, two in zip(outputs, again, strict=True):
        assert torch.equal(one, two)
    assert torch.equal(again[1], torch.full((2, 2, 2), 6.75))


def test_a_shape_of_call_whose_rows_are_not_independent_is_rejected_and_right() -> None:
    module = Module(rows_mixed)
    point = point_of(module)
    calls = [call(point, 2, 1.0), call(point, 2, 5.0, 0.75)]
    point.describe(calls[0])
    outputs = run_calls(calls)
    assert all(torch.equal(output, torch.zeros(2, 2, 2)) for output in outputs)
    assert point.solo_reason == "self_check"
    assert point.describe(calls[0]) == (("unet", id(calls[0])), 2, "self_check")


def test_a_rejected_shape_does_not_keep_others_from_joining() -> None:
    point = point_of(Module(rows_mixed))
    mixed = [call(point, 2, 1.0), call(point, 2, 5.0)]
    point.describe(mixed[0])
    run_calls(mixed)
    other = call(point, 1, 1.0, scale=2.0)
    assert point.describe(other)[2] is None


def test_a_call_without_rows_is_unknown() -> None:
    point = point_of(Module(rows_apart))
    odd = Call(point, (3,), {})
    assert point.describe(odd) == (("unet", id(odd)), 1, "unknown_call")


def test_a_disabled_point_says_why_for_every_call() -> None:
    point = point_of(Module(rows_apart), disabled="disabled")
    assert point.describe(call(point, 1, 1.0))[2] == "disabled"
    assert point.solo_reason == "disabled"


def test_calls_of_other_sizes_steps_and_settings_do_and_do_not_fit_together() -> None:
    point = point_of(Module(rows_apart))

    def key(made: Call) -> Any:
        return point.describe(made)[0]

    base = key(call(point, 1, 1.0, 0.25))
    assert key(call(point, 3, 2.0, 0.75)) == base
    assert key(call(point, 1, 1.0, scale=1.0)) != base
    assert key(call(point, 1, 1.0, scale=1.0)) != key(call(point, 1, 1.0, scale=2.0))
    assert key(Call(point, (torch.ones(1, 3, 2), torch.tensor(0.5)), {})) != base
    assert key(Call(point, (torch.ones(1, 2, 2).half(), torch.tensor(0.5)), {})) != base


def test_a_batch_of_nothing_runs_by_itself() -> None:
    point = point_of(Module(rows_apart))
    point.describe(call(point, 1, 1.0))
    assert point.describe(call(point, 0, 1.0))[2] == "argument"


def learned(function: Callable[..., Any]) -> tuple[Module, MeetingPoint]:
    module = Module(function)
    point = point_of(module)
    one, two = call(point, 1, 1.0), call(point, 2, 1.0)
    rule = layout.learn(one.arguments, two.arguments)
    point.layouts.append(CallLayout(rule, layout.learn(torch.zeros(1, 2, 2), torch.zeros(2, 2, 2))))
    return module, point


@pytest.mark.parametrize(
    "function",
    [
        lambda x, t: torch.cat([x, x[:1]]) if len(x) > 1 else x,  # another number of rows
        lambda x, t: x.sum() if len(x) > 1 else x,  # another structure
    ],
)
def test_an_output_that_cannot_be_split_ends_joint_forwards_and_loses_no_answer(function: Callable[..., Any]) -> None:
    module, point = learned(function)
    calls = [call(point, 1, float(i)) for i in range(3)]
    outputs = run_calls(calls)
    assert [float(output.mean()) for output in outputs] == [0.0, 1.0, 2.0]
    assert module.rows == [3, 1, 1, 1]
    assert point.solo_reason == "output"
    assert point.describe(calls[0])[2] == "output"


def test_one_culprit_in_a_joint_forward_is_found() -> None:
    def picky(x: torch.Tensor, t: Any) -> torch.Tensor:
        if (x == 7).any():
            raise ValueError("seven")
        return x

    _, point = learned(picky)
    outputs = run_calls([call(point, 1, float(value)) for value in (6, 7, 8)])
    assert isinstance(outputs[1], _Raised)
    assert [float(outputs[i].mean()) for i in (0, 2)] == [6.0, 8.0]
    assert point.solo_reason is None  # a fault of one request does not end joint forwards


def test_run_joint_tells_an_output_of_another_structure_apart() -> None:
    _, point = learned(lambda x, t: x.sum())
    with pytest.raises(LayoutError, match="another structure"):
        point.run_joint([call(point, 1, 1.0), call(point, 1, 2.0)])


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([0.5, 0.0], [0.75, 0.0], 0.25),  # absolute below one
        ([10.0, 0.0], [15.0, 0.0], 0.5),  # relative above
        ([float("nan"), 1.0], [float("nan"), 1.0], 0.0),
        ([float("inf"), 1.0], [float("inf"), 1.0], 0.0),
        ([float("nan"), 1.0], [0.0, 1.0], float("inf")),
        ([float("inf"), 1.0], [float("-inf"), 1.0], float("inf")),
        ([], [], 0.0),
        ([1.0], [1.0, 2.0], float("inf")),
    ],
)
def test_the_largest_difference_is_relative_to_the_output(one: Any, two: Any, expected: float) -> None:
    assert equality.largest_difference((torch.tensor(one),), (torch.tensor(two),)) == expected


def test_outputs_of_another_structure_differ_infinitely() -> None:
    x = torch.ones(2)
    assert equality.largest_difference((x, x), (x,)) == float("inf")
    assert equality.largest_difference((), ()) == 0.0


def test_the_tolerance_is_that_of_the_coarsest_dtype() -> None:
    assert equality.tolerance_of(torch.ones(1)) == 1e-4
    assert equality.tolerance_of((torch.ones(1), torch.ones(1, dtype=torch.bfloat16))) == 5e-2
    assert equality.tolerance_of(()) == 1e-4
