"""An executor around another one, which notes what each forward of a denoiser took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..engine.executor import Capabilities, Executor, Report, Work, WorkKind
from ..errors import DiffusionError
from ..request import DiffusionRequest, EventKind
from ..timing import now


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward.

    Attributes:
        denoiser: name of the pipeline's component.
        requests, rows: that shared it.
        seconds: until the device was done with it, and the requests had taken their scheduler steps.
        solo_reason: why it could not be shared, or None.
    """

    denoiser: str
    requests: int
    rows: int
    seconds: float
    solo_reason: str | None


class Meter:
    """Passes everything on to an executor; see `engine.executor.Executor` for who calls what.

    Args:
        inner: does the work.
        synchronize: waits until the device is done; without it, the time of a forward would be that of its launch.

    Attributes:
        forwards: since `reset`, in order.
        steps: denoising steps since `reset`.
    """

    def __init__(self, inner: Executor, synchronize: Callable[[], None]) -> None:
        self.forwards: list[Forward] = []
        self.steps = 0
        self._inner = inner
        self._synchronize = synchronize
        self._works: dict[str, Work] = {}

    def reset(self) -> None:
        """Forget what was noted; called while nothing runs."""
        self.forwards = []
        self.steps = 0

    @property
    def capabilities(self) -> Capabilities:
        """Of the inner executor."""
        return self._inner.capabilities

    def start(self) -> None:
        """See `Executor.start`."""
        self._inner.start()

    def close(self) -> None:
        """See `Executor.close`."""
        self._inner.close()

    def add_req(self, request: DiffusionRequest) -> None:
        """See `Executor.add_req`."""
        self._inner.add_req(request)

    def execute(self, kind: WorkKind, request_ids: Sequence[str]) -> list[Report]:
        """Note the time, the rows and the steps of a forward; see `Executor.execute`."""
        works = [self._works[request_id] for request_id in request_ids if request_id in self._works]
        begin = now()
        reports = self._inner.execute(kind, request_ids)
        self._synchronize()
        seconds = now() - begin
        if kind is WorkKind.FORWARD:
            key = works[0].key
            self.forwards.append(
                Forward(
                    # A pipeline's executor begins its keys with the name of the meeting point.
                    denoiser=str(key[0]) if isinstance(key, tuple) and key else "denoiser",
                    requests=len(works),
                    rows=sum(work.rows for work in works),
                    seconds=seconds,
                    solo_reason=works[0].solo_reason,
                )
            )
        for report in reports:
            self.steps += sum(event.kind is EventKind.STEP for event in report.events)
            if report.work is not None:
                self._works[report.request_id] = report.work
            else:
                self._works.pop(report.request_id, None)
        return reports

    def abort(self, request_id: str, error: DiffusionError) -> Report:
        """See `Executor.abort`."""
        self._works.pop(request_id, None)
        return self._inner.abort(request_id, error)

    def _dummy_run(self, height: int | None, width: int | None) -> None:
        self._inner._dummy_run(height, width)
