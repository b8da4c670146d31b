"""The executor with faults on purpose: each strikes where the real one would, inside the pipeline's own calls.

So what is tried out is what production runs: joint forwards that raise, run out of memory or return NaN, and the
retries that keep such faults with their request. `loader.load` makes this executor only for a model with the parameter
`faults`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.executor import Report, WorkKind
from ..faults import FaultPlan
from ..request import DeferredOutput, DiffusionOutput
from . import layout
from .executor import PipelineExecutor, _Active
from .meeting_point import Call, MeetingPoint
from .step_meter import StepMeter


class FaultyExecutor(PipelineExecutor):
    """A `PipelineExecutor` whose requests suffer what a plan says; see there for its methods."""

    def __init__(self, *args: Any, plan: FaultPlan, **options: Any) -> None:
        super().__init__(*args, **options)
        self._plan = plan

    def _dummy_run(self, height: int | None, width: int | None) -> None:
        """Warm up without faults: the warm-up is no request of anybody's."""
        plan, self._plan = self._plan, FaultPlan(())
        try:
            super()._dummy_run(height, width)
        finally:
            self._plan = plan

    def _call(self, active: _Active) -> DiffusionOutput | DeferredOutput:
        self._plan.strike("preprocess", [active.request])
        return super()._call(active)

    def _on_step(self, active: _Active, meter: StepMeter) -> None:
        if not active.met_at_step:  # no meeting point in this pipeline, where the fault would have struck
            self._plan.strike("step", [active.request], steps=[meter.step])
        super()._on_step(active, meter)

    def _resume(self, active: _Active, value: Any) -> Report:
        report = super()._resume(active, value)
        if active.call is not None and report.work is not None:
            # In place: the key of the call's work holds its identity.
            active.call.point = _FaultyPoint(active.call.point, active, report.work.rows, self._plan)  # type: ignore[assignment]
        return report


class _FaultyPoint:
    """Stands before the meeting point of one parked call."""

    def __init__(self, point: MeetingPoint, active: _Active, rows: int, plan: FaultPlan) -> None:
        self._point = point
        self._active = active
        self._rows = rows
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._point, name)

    def run_one(self, call: Call) -> Any:
        """See `MeetingPoint.run_one`."""
        is_nan = self._strike([call])
        return _spoiled(self._point.run_one(call), is_nan[0])

    def run_joint(self, calls: Sequence[Call]) -> list[Any]:
        """See `MeetingPoint.run_joint`."""
        is_nan = self._strike(calls)
        return [_spoiled(*pair) for pair in zip(self._point.run_joint(calls), is_nan, strict=True)]

    def _strike(self, calls: Sequence[Call]) -> list[bool]:
        """Do to the common forward (or decode) of parked calls what is planned; see `FaultPlan.strike`."""
        points: list[Any] = [call.point for call in calls]  # of this class, all of them
        meters = [point._active.meter for point in points]
        return self._plan.strike(
            "decode" if self._point.kind is WorkKind.DECODE else "step",
            [point._active.request for point in points],
            steps=[meter.step + 1 if meter is not None else 1 for meter in meters],
            rows=sum(point._rows for point in points),
        )


def _spoiled(output: Any, spoil: bool) -> Any:
    """Return an output, in NaN if it is to be spoiled; other requests have other parts of the same memory."""
    for tensor in layout.tensors(output) if spoil else ():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    return output
