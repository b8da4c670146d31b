"""A model that hangs, and one that dies, under the real launcher: callers are told; the server comes back, or ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tritonclient.utils import InferenceServerException

from diffusion_backend.faults import ALLOW_VARIABLE
from tests.faults.conftest import SMALL, repository_of
from tests.server.conftest import READY_S
from tests.server.test_shutdown import Launched
from tests.support.client import DEADLINE_S, eventually

LIMIT_S = 12.0
"""The watchdog's; generous, as a forward of a few milliseconds may take long on a busy machine."""

LONG = {**SMALL, "num_inference_steps": 900}
HANG = {"fault": "hang", "phase": "step", "step": 2, "prompt": "hang"}
DIE = {"fault": "die", "phase": "step", "step": 2, "prompt": "die"}
Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Start a launcher over a model that hangs and dies when asked to; in the end, all of it must be gone."""
    started: list[Launched] = []

    def start(max_restarts: int, **parameters: str) -> Launched:
        monkeypatch.setenv(ALLOW_VARIABLE, "1")
        monkeypatch.setenv("MAX_RESTARTS", str(max_restarts))
        started.append(Launched(repository_of(tmp_path / "repository", [HANG, DIE], **parameters)))
        started[-1].wait_ready()
        return started[-1]

    yield start
    for launched in started:
        launched.close()
        eventually(lambda launched=launched: regions(launched) == [], "shared memory removed")


def regions(launched: Launched) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"diffusion_{launched.process.pid}_")]


def below(launched: Launched) -> list[psutil.Process]:
    return psutil.Process(launched.process.pid).children(recursive=True)


def wait_exit(launched: Launched, children: list[psutil.Process]) -> int:
    """Wait for the launcher's end; return its exit code. Nothing is left of it then."""
    code = launched.process.wait(DEADLINE_S)
    _, alive = psutil.wait_procs(children, 10)
    assert alive == []
    assert regions(launched) == []
    return code


def wait_back(launched: Launched) -> None:
    """Wait until the launcher has started its server again."""
    eventually(lambda: launched.output.count("Ctrl-C stops the server") == 2, "ready again", READY_S)


def test_a_hang_is_told_to_the_callers_and_the_server_is_back(launch: Launch) -> None:
    """Running ones get an error that says why, a new one is not taken, and the next server draws the same picture."""
    launched = launch(1, watchdog_timeout_s=str(LIMIT_S))
    served = launched.served
    draw = {"prompt": "red apple", "seed": 5, **SMALL}
    before = served.infer("faulty_unary", **draw)
    children = below(launched)
    neighbour = served.stream("faulty", prompt="a", **LONG).wait_step(1)
    culprit = served.stream("faulty", prompt="hang", **LONG).wait_step(1)
    for call in (neighbour, culprit):
        call.wait()
        assert "the model hangs: a forward of " in str(call.error), call.error
        assert call.error.status() == "StatusCode.INTERNAL"
    # Half of it, as the news of the step before may come late on a busy machine.
    assert culprit.ended_at - culprit.answers[-1].at >= LIMIT_S / 2, "sooner than the limit"
    refused = at_once_refused(lambda: served.infer("faulty_unary", prompt="new", **SMALL))
    print(f"a new request got: {refused}")
    wait_back(launched)
    _, alive = psutil.wait_procs(children, 10)
    assert alive == []
    assert "ended itself, as its work took longer than watchdog_timeout_s" in launched.output
    assert 'File "' in launched.output or "most recent call first" in launched.output, "no stack of the hang"
    assert (served.infer("faulty_unary", **draw).images == before.images).all()


def at_once_refused(call: Callable[[], Any]) -> str:
    begin = time.monotonic()
    with pytest.raises(InferenceServerException) as caught:
        call()
    assert time.monotonic() - begin < DEADLINE_S / 2
    return str(caught.value)


def test_a_hang_without_restarts_ends_the_launcher_for_its_supervisor(launch: Launch) -> None:
    launched = launch(0, watchdog_timeout_s=str(LIMIT_S))
    children = below(launched)
    with pytest.raises(InferenceServerException, match="the model hangs"):
        launched.served.infer("faulty_unary", prompt="hang", **SMALL)
    assert wait_exit(launched, children) == 1


def test_without_a_watchdog_a_hang_stays(launch: Launch) -> None:
    """Off by default: nothing ends by itself, and a stop in the end does."""
    launched = launch(0)
    children = below(launched)
    call = launched.served.stream("faulty", prompt="hang", **SMALL).wait_step(1)
    with pytest.raises(AssertionError, match="not ended within"):
        call.wait(LIMIT_S)
    assert launched.process.poll() is None
    launched.process.kill()
    assert wait_exit(launched, children) != 0


@pytest.mark.parametrize("how", ["fault", "kill"])
def test_death_ends_all_calls_within_five_seconds_and_the_server_is_back_47(launch: Launch, how: str) -> None:
    """47: five calls, streaming and unary; none of them hangs, and the next server draws."""
    launched = launch(1)
    served = launched.served
    children = below(launched)
    calls = [served.stream("faulty", prompt="a", **LONG).wait_step(1) for _ in range(5)]
    if how == "fault":
        culprit = served.stream("faulty", prompt="die", **LONG)
        eventually(lambda: culprit.events("step") or culprit.done, "it runs")
    else:
        stub = next(p for p in children if "stub" in " ".join(p.cmdline()) and "/faulty/" in " ".join(p.cmdline()))
        stub.kill()
    begin = time.monotonic()
    for call in calls:
        call.wait()
        assert call.error is not None
    assert max(call.ended_at for call in calls) - begin <= 5
    _, alive = psutil.wait_procs(children, 10)
    assert alive == []
    wait_back(launched)
    assert served.infer("faulty_unary", prompt="a", seed=3, **SMALL).seeds == [3]


def test_death_without_restarts_ends_the_launcher_47(launch: Launch) -> None:
    launched = launch(0)
    children = below(launched)
    with pytest.raises(InferenceServerException):
        launched.served.infer("faulty_unary", prompt="die", **SMALL)
    assert wait_exit(launched, children) == 1
    assert "The Python process of model 'faulty'" in launched.output
