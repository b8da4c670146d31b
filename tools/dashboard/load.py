"""A load of every kind of request, those that fail included, so that every panel has something to show."""

from __future__ import annotations

import itertools
import threading
from typing import Any, Self

from tritonclient.utils import InferenceServerException

from tests.support.client import Served

STEPS = (8, 20, 40)
GUIDANCE = (1.0, 3.0, 7.5)
PROMPTS = ("red apple", "cat face", "rocket", "hot beverage", "sun with face")

KINDS = (*["fine"] * 9, "cancelled", *["fine"] * 9, "wrong", *["fine"] * 9, "late", *["fine"] * 9, "failing")
"""What each caller sends, over and over; each caller begins at another place."""

_WRONG: dict[str, dict[str, Any]] = {
    "wrong": {"height": 0},
    # The scheduler's third step asks for a timestep that it does not have.
    "failing": {"extra_args": {"scheduler": "DDPMScheduler", "timesteps": [900, 500, -5000]}},
    "late": {"num_inference_steps": 900, "timeout_s": 0.5},
}


class Load:
    """Callers of one model, each with one request at a time; `with` ends them.

    Args:
        callers: how many there are to begin with.
        kinds: what they send, in this order; see `KINDS`.
    """

    def __init__(self, served: Served, model: str, callers: int, kinds: tuple[str, ...] = KINDS) -> None:
        self._served = served
        self._model = model
        self._kinds = kinds
        self._threads: list[threading.Thread] = []
        self._callers = 0
        self._error: BaseException | None = None
        self.set_callers(callers)

    def set_callers(self, callers: int) -> None:
        """Let so many callers send from now on; those that are too many end with their request."""
        self._callers = callers
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for index in range(callers):
            if not any(thread.name == f"caller {index}" for thread in self._threads):
                thread = threading.Thread(target=self._call, args=(index,), name=f"caller {index}")
                self._threads.append(thread)
                thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.set_callers(0)
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _call(self, index: int) -> None:
        kinds = itertools.islice(itertools.cycle(self._kinds), 7 * index, None)
        numbers = itertools.count(index)
        try:
            while index < self._callers:
                self._send(next(kinds), next(numbers))
        except BaseException as error:
            self._error = error

    def _send(self, kind: str, number: int) -> None:
        values = {
            "prompt": PROMPTS[number % len(PROMPTS)],
            "num_inference_steps": STEPS[number % len(STEPS)],
            "guidance_scale": GUIDANCE[number // 2 % len(GUIDANCE)],
            **_WRONG.get(kind, {}),
        }
        call = self._served.stream(self._model, **values)
        if kind == "cancelled":
            call.wait_step()
            call.cancel()
        elif kind == "fine":
            call.result()
        else:
            try:
                call.result()
            except InferenceServerException:
                return
            raise AssertionError(f"a request of the kind {kind!r} did not fail")
