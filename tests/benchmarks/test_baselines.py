"""Every baseline, as it is started for a run, serves the emoji model and draws what the bare pipeline draws."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks.bare import BarePipeline
from benchmarks.baselines.pipeline import grouped
from benchmarks.fleet import BASELINES, BATCHING, EXTRAS, Fleet, missing_extras
from benchmarks.load import closed_loop
from benchmarks.machine import thread_environment
from benchmarks.workload import Job, make_jobs
from tests.support.client import eventually

MODEL = Path(__file__).parents[2] / "models" / "emoji"
JOBS = make_jobs(6, (2, 3), guidances=(1.0, 3.0))
TOLERANCE = 2
"""Of 255, where several pictures come from one call: other row counts take other matrix kernels."""


def installed() -> list[str]:
    return [name for name in BASELINES if not missing_extras([name])]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return os.environ | thread_environment(1, "PASSIVE") | {"HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def fleet(environment: dict[str, str]) -> Iterator[Fleet]:
    with Fleet(MODEL, environment, installed()) as fleet:
        fleet.wait_ready()
        yield fleet


@pytest.fixture(scope="module")
def expected(environment: dict[str, str]) -> list[np.ndarray]:
    with BarePipeline(MODEL, environment) as bare:
        bare.wait_ready()
        return bare.run(JOBS, images=True).images


def need(name: str) -> None:
    if missing := missing_extras([name]):
        pytest.skip(f"{', '.join(missing)} of benchmarks/requirements.txt is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["served", *BASELINES])
def test_the_same_pictures_as_the_bare_pipeline(name: str, fleet: Fleet, expected: list[np.ndarray]) -> None:
    need(name)
    with fleet.awake(name):
        load = closed_loop(fleet.connect(name), JOBS, 1)
    load.check()
    for picture, other in zip(load.pictures, expected, strict=True):
        assert picture is not None
        assert np.array_equal(picture, other)
    assert not np.array_equal(expected[0], expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["served", *BASELINES])
def test_many_at_once_get_their_own_pictures(name: str, fleet: Fleet, expected: list[np.ndarray]) -> None:
    need(name)
    with fleet.awake(name):
        load = closed_loop(fleet.connect(name), JOBS, len(JOBS))
    load.check()
    for picture, other in zip(load.pictures, expected, strict=True):
        assert picture is not None
        assert int(np.abs(picture.astype(int) - other.astype(int)).max()) <= TOLERANCE


@pytest.mark.slow
def test_the_processes_of_every_server_are_known(fleet: Fleet) -> None:
    found = fleet.processes()
    assert set(found) == {"served", "triton_baselines", *(n for n in installed() if n in (*EXTRAS, "pytriton_batch"))}
    assert all(pids for pids in found.values())


@pytest.mark.slow
def test_what_polls_is_stopped_between_its_turns(fleet: Fleet) -> None:
    need("litserve_batch")
    pids = fleet.processes()["litserve_batch"]

    def states() -> set[str]:
        return {psutil.Process(pid).status() for pid in pids}

    eventually(lambda: states() == {psutil.STATUS_STOPPED}, "its processes are stopped")
    with fleet.awake("litserve_batch"):
        eventually(lambda: psutil.STATUS_STOPPED not in states(), "its processes run")
    eventually(lambda: states() == {psutil.STATUS_STOPPED}, "its processes are stopped")


def test_jobs_are_grouped_by_what_a_call_has_in_common_shortest_first() -> None:
    jobs = [Job("a", 20, 3.0, 0), Job("b", 8, 3.0, 1), Job("c", 20, 3.0, 2), Job("d", 8, 1.0, 3), Job("e", 8, 3.0, 4)]
    assert grouped(jobs) == [[3], [1, 4], [0, 2]]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.fleet.find_spec", lambda _: None)
    assert missing_extras(list(BASELINES)) == ["fastapi", "litserve"]
    assert missing_extras([name for name in BATCHING if name != "litserve_batch"]) == []
