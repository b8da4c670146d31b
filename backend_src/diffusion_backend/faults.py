"""Faults on purpose, to see that the server survives them: raise, hang, NaN, out of memory, death.

They are configured by the model's parameter `faults`, a JSON list of objects, and happen only in a server whose
environment sets `DIFFUSION_ALLOW_FAULTS=1`; docs/reliability.md describes both. A model without the parameter runs
none of this code. `FaultPlan` knows neither torch nor Triton: the pipelines' part is `pipelines/faults.py`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .errors import ConfigurationError, did_you_mean
from .request import MAX_SEED, DiffusionRequest

log = logging.getLogger(__name__)

PARAMETER = "faults"
ALLOW_VARIABLE = "DIFFUSION_ALLOW_FAULTS"

FAULTS = ("raise", "hang", "nan", "out_of_memory", "die")
PHASES = ("load", "preprocess", "step", "decode")

_TYPES: dict[str, tuple[type, ...]] = {
    "fault": (str,),
    "phase": (str,),
    "step": (int,),
    "rows": (int,),
    "seconds": (int, float),
    "prompt": (str,),
    "seed": (int,),
}


class InjectedFaultError(RuntimeError):
    """What a fault `raise` raises: an error that nothing in this package knows how to treat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, and which requests it strikes; a request must match both `prompt` and `seed` where they are given.

    Attributes:
        fault: one of `FAULTS`.
        phase: where it strikes, one of `PHASES`: the load of the model, a request before its first step, the forward
            of its denoiser for step number `step`, or its decode.
        step: from 1; of phase `step`.
        rows: of `out_of_memory` in phase `step`: it strikes forwards of more than so many rows, at any step.
        seconds: for how long `hang` hangs; None for ever.
        prompt: what one of the request's prompts begins with; None for any.
        seed: one of the request's seeds; None for any.
    """

    fault: str
    phase: str = "step"
    step: int = 1
    rows: int | None = None
    seconds: float | None = None
    prompt: str | None = None
    seed: int | None = None

    def strikes(self, request: DiffusionRequest) -> bool:
        """Whether it is meant for this request."""
        return (self.prompt is None or any(prompt.startswith(self.prompt) for prompt in request.prompt)) and (
            self.seed is None or self.seed in request.seeds
        )

    def __str__(self) -> str:
        return f"{self.fault} in {self.phase}{f' {self.step}' if self.phase == 'step' and self.rows is None else ''}"


def parse_faults(name: str, text: str) -> tuple[Fault, ...]:
    """Return the faults of the parameter `name`, from a JSON list of objects with the attributes of `Fault`.

    Raises:
        ConfigurationError: naming what is wrong and what is allowed.
    """
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(name, f"it is not JSON: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigurationError(name, 'it must be a JSON list of objects, as \'[{"fault": "raise"}]\'')
    return tuple(_parse_one(name, entry) for entry in entries)


def _parse_one(name: str, entry: dict[str, Any]) -> Fault:
    known = [field.name for field in fields(Fault)]
    for key, value in entry.items():
        if key not in known:
            raise ConfigurationError(
                name, f"a fault has no {key!r}{did_you_mean(key, known)} (it has {', '.join(known)})"
            )
        if not isinstance(value, _TYPES[key]) or isinstance(value, bool):
            kind = " or ".join(kind.__name__ for kind in _TYPES[key])
            raise ConfigurationError(name, f"{key}: {value!r} is not allowed; it must be of type {kind}")
    for key, allowed in (("fault", FAULTS), ("phase", PHASES)):
        value = entry.get(key, "step" if key == "phase" else None)
        if value not in allowed:
            hint = did_you_mean(str(value), allowed)
            raise ConfigurationError(name, f"{key}: {value!r} is not one of {', '.join(allowed)}{hint}")
    fault = Fault(**entry)
    for key, low, high in (("step", 1, None), ("rows", 0, None), ("seconds", 0, None), ("seed", 0, MAX_SEED)):
        value = getattr(fault, key)
        if isinstance(value, float) and not math.isfinite(value):  # it does not take every integer
            raise ConfigurationError(name, f"{key}: {value} is not allowed; it must be finite")
        if value is not None and (value < low or (high is not None and value > high)):
            raise ConfigurationError(name, f"{key}: {value} is not allowed; it must be at least {low}")
    for wrong, problem in _misfits(fault, entry):
        if wrong:
            raise ConfigurationError(name, problem)
    return fault


def _misfits(fault: Fault, entry: Mapping[str, Any]) -> tuple[tuple[bool, str], ...]:
    """Return what does not go together, each with whether it is the case."""
    at_step = fault.phase == "step"
    is_memory = fault.fault == "out_of_memory"
    with_request = fault.prompt is not None or fault.seed is not None
    return (
        ("step" in entry and not at_step, "step: it is only for the phase 'step'"),
        ("step" in entry and fault.rows is not None, "step: not together with 'rows', which strikes at every step"),
        (fault.rows is not None and not (at_step and is_memory), "rows: it is only for 'out_of_memory' in 'step'"),
        (fault.seconds is not None and fault.fault != "hang", "seconds: it is only for the fault 'hang'"),
        (
            fault.fault == "nan" and fault.phase not in ("step", "decode"),
            "phase: 'nan' is only for 'step' and 'decode'",
        ),
        (fault.phase == "load" and with_request, "phase: 'load' has no request that could have a prompt or a seed"),
    )


def check_allowed(faults: Sequence[Fault], environment: Mapping[str, str] = os.environ) -> None:
    """Refuse faults in a server that was not started for them.

    Raises:
        ConfigurationError: there are some, and the environment does not set `DIFFUSION_ALLOW_FAULTS=1`.
    """
    if faults and environment.get(ALLOW_VARIABLE) != "1":
        raise ConfigurationError(
            PARAMETER,
            f"faults are refused here; they are for tests, in a server whose environment sets {ALLOW_VARIABLE}=1",
        )


class FaultPlan:
    """Makes the faults happen; called by the thread that would suffer them (the engine's, or the one that loads)."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = tuple(faults)

    def strike(
        self, phase: str, requests: Sequence[DiffusionRequest], *, steps: Sequence[int] = (), rows: int = 0
    ) -> list[bool]:
        """Do to a piece of work whatever is planned for it.

        Args:
            phase: one of `PHASES`.
            requests: whose work it is; none for `load`.
            steps: the number of the step that each of them is at, from 1; for the phase `step`.
            rows: of the forward.

        Returns:
            For each request, whether its output is to become NaN.

        Raises:
            InjectedFaultError: of `raise`.
            MemoryError: of `out_of_memory`.
        """
        is_nan = [False] * len(requests)
        for fault in self._faults:
            if fault.phase != phase:
                continue
            struck = [self._is_struck(fault, request, i, steps, rows) for i, request in enumerate(requests)]
            if phase != "load" and not any(struck):
                continue
            if fault.fault == "nan":
                is_nan = [before or now for before, now in zip(is_nan, struck, strict=True)]
            else:
                _happen(fault)
        return is_nan

    @staticmethod
    def _is_struck(fault: Fault, request: DiffusionRequest, index: int, steps: Sequence[int], rows: int) -> bool:
        if fault.rows is not None:
            return rows > fault.rows and fault.strikes(request)
        return (fault.phase != "step" or steps[index] == fault.step) and fault.strikes(request)


def _happen(fault: Fault) -> None:
    log.warning("injected fault: %s", fault)
    if fault.fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.fault == "hang":
        threading.Event().wait(fault.seconds)
    elif fault.fault == "out_of_memory":
        raise MemoryError(f"injected fault: {fault}")
    else:
        raise InjectedFaultError(f"injected fault: {fault}")
