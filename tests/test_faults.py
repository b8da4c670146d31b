"""Faults on purpose: how they are written, where they are refused, and whom they strike."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from typing import Any

import pytest

from diffusion_backend.config import ModelConfig
from diffusion_backend.errors import ConfigurationError
from diffusion_backend.faults import ALLOW_VARIABLE, Fault, FaultPlan, InjectedFaultError, check_allowed, parse_faults
from diffusion_backend.request import DiffusionRequest


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def make(prompt: str = "a", seed: int = 1) -> DiffusionRequest:
    return DiffusionRequest.make(prompt, seed=seed)


def test_all_keys_are_read() -> None:
    text = '[{"fault": "hang", "phase": "step", "step": 3, "seconds": 0.5, "prompt": "p", "seed": 7}, {"fault": "die"}]'
    assert parse_faults("faults", text) == (
        Fault(fault="hang", phase="step", step=3, seconds=0.5, prompt="p", seed=7),
        Fault(fault="die", phase="step", step=1),
    )
    assert parse_faults("faults", "[]") == ()


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("raise", "it must be a JSON list of objects"),
        ({}, "fault: None is not one of raise, hang, nan, out_of_memory, die"),
        ({"fault": "rais"}, "fault: 'rais' is not one of raise, hang, nan, out_of_memory, die; did you mean 'raise'?"),
        (
            {"fault": "raise", "phase": "decoding"},
            "phase: 'decoding' is not one of load, preprocess, step, decode; did",
        ),
        ({"fault": "raise", "steps": 1}, "a fault has no 'steps'; did you mean 'step'? (it has fault, phase, step, "),
        ({"fault": "raise", "step": 0}, "step: 0 is not allowed; it must be at least 1"),
        ({"fault": "raise", "step": 1.5}, "step: 1.5 is not allowed; it must be of type int"),
        ({"fault": "raise", "seed": -1}, "seed: -1 is not allowed; it must be at least 0"),
        ({"fault": "raise", "seed": True}, "seed: True is not allowed; it must be of type int"),
        ({"fault": "raise", "prompt": 1}, "prompt: 1 is not allowed; it must be of type str"),
        ({"fault": "hang", "seconds": float("inf")}, "seconds: inf is not allowed; it must be finite"),
        ({"fault": "hang", "seconds": float("nan")}, "seconds: nan is not allowed; it must be finite"),
        ({"fault": "raise", "seed": 10**400}, f"seed: {10**400} is not allowed"),
        ({"fault": "hang", "seconds": -1}, "seconds: -1 is not allowed; it must be at least 0"),
        ({"fault": "raise", "seconds": 1}, "seconds: it is only for the fault 'hang'"),
        ({"fault": "raise", "phase": "decode", "step": 1}, "step: it is only for the phase 'step'"),
        ({"fault": "raise", "rows": 1}, "rows: it is only for 'out_of_memory' in 'step'"),
        ({"fault": "out_of_memory", "rows": 1, "step": 2}, "step: not together with 'rows'"),
        ({"fault": "nan", "phase": "preprocess"}, "phase: 'nan' is only for 'step' and 'decode'"),
        (
            {"fault": "die", "phase": "load", "seed": 0},
            "phase: 'load' has no request that could have a prompt or a seed",
        ),
    ],
)
def test_a_bad_fault_is_named_with_what_is_allowed(entry: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_faults("faults", json.dumps([entry]))
    assert str(caught.value).startswith(f"parameter 'faults': {problem}")


@pytest.mark.parametrize("environment", [{}, {ALLOW_VARIABLE: "0"}, {ALLOW_VARIABLE: "true"}])
def test_faults_are_refused_without_the_switch(environment: dict[str, str]) -> None:
    check_allowed((), environment)
    with pytest.raises(ConfigurationError, match=f"faults are refused here; .* sets {ALLOW_VARIABLE}=1"):
        check_allowed((Fault(fault="raise"),), environment)
    check_allowed((Fault(fault="raise"),), {ALLOW_VARIABLE: "1"})


def test_the_loader_refuses_them_before_it_loads_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusion_backend.pipelines.loader import load

    monkeypatch.delenv(ALLOW_VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match="faults are refused here"):
        load(ModelConfig(model="nowhere/at/all", faults=(Fault(fault="raise"),)), device="cpu")


@pytest.mark.parametrize(
    ("fault", "strikes"),
    [
        (Fault(fault="raise"), [True, True, True]),
        (Fault(fault="raise", prompt="poison"), [True, False, True]),
        (Fault(fault="raise", seed=7), [False, True, True]),
        (Fault(fault="raise", prompt="poison", seed=7), [False, False, True]),
    ],
)
def test_whom_a_fault_strikes(fault: Fault, strikes: list[bool]) -> None:
    requests = [make("poisoned", 1), make("no poison", 7), make("poison", 7)]
    assert [fault.strikes(request) for request in requests] == strikes


def test_one_of_several_prompts_or_seeds_is_enough() -> None:
    request = DiffusionRequest.make(("a", "poison"), seed=3, num_outputs_per_prompt=2)
    assert Fault(fault="raise", prompt="poison", seed=4).strikes(request)


def test_a_fault_strikes_in_its_phase_and_step_only() -> None:
    plan = FaultPlan([Fault(fault="raise", step=3), Fault(fault="raise", phase="decode", prompt="b")])
    plan.strike("load", [])
    plan.strike("preprocess", [make()])
    plan.strike("decode", [make()])
    plan.strike("step", [make(), make()], steps=[2, 4], rows=4)
    with pytest.raises(InjectedFaultError, match="injected fault: raise in step 3"):
        plan.strike("step", [make(), make()], steps=[2, 3], rows=4)
    with pytest.raises(InjectedFaultError, match="injected fault: raise in decode"):
        plan.strike("decode", [make("b")])


def test_memory_ends_with_the_rows_at_any_step() -> None:
    plan = FaultPlan([Fault(fault="out_of_memory", rows=4)])
    plan.strike("step", [make(), make()], steps=[1, 9], rows=4)
    with pytest.raises(MemoryError):
        plan.strike("step", [make(), make(), make()], steps=[1, 9, 5], rows=5)


def test_nan_is_told_for_each_request() -> None:
    plan = FaultPlan([Fault(fault="nan", step=2, prompt="b")])
    assert plan.strike("step", [make("a"), make("b"), make("b")], steps=[2, 2, 1], rows=6) == [False, True, False]


def test_a_hang_takes_its_time() -> None:
    begin = time.monotonic()
    FaultPlan([Fault(fault="hang", phase="load", seconds=0.2)]).strike("load", [])
    assert time.monotonic() - begin >= 0.2


def test_death_is_not_caught_by_anything() -> None:
    code = (
        "from diffusion_backend.faults import Fault, FaultPlan\n"
        "try:\n    FaultPlan([Fault(fault='die', phase='load')]).strike('load', [])\nfinally:\n    print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -9
    assert done.stdout == ""
