"""The end of a server with work: everybody is answered, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from tritonclient.utils import InferenceServerException

from diffusion_backend.serve.ports import free_ports
from tests.server.conftest import LONG, QUEUE, READY_S, Repository, pending
from tests.support.client import DEADLINE_S, Served, eventually


class Launched:
    """`python -m diffusion_backend.serve` in a process of its own, with a client.

    Args:
        prefix: a command that runs it.
    """

    def __init__(self, repository: Path, *args: str, prefix: Sequence[str] = ()) -> None:
        http_port, grpc_port, metrics_port = free_ports("127.0.0.1", 3)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "diffusion_backend.serve", *args],
            env=os.environ
            | {
                "MODEL_REPOSITORY": str(repository),
                "HTTP_PORT": str(http_port),
                "GRPC_PORT": str(grpc_port),
                "METRICS_PORT": str(metrics_port),
                "DIFFUSION_GRPC_ENDPOINT": f"127.0.0.1:{grpc_port}",
                "HF_HUB_OFFLINE": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.served = Served(f"127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", f"127.0.0.1:{metrics_port}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.output += line
                if "Ctrl-C stops the server" in line:
                    self._ready.set()
        self._ready.set()

    def wait_ready(self) -> None:
        assert self._ready.wait(READY_S), self.output
        assert self.process.poll() is None, self.output

    def close(self) -> None:
        self.served.close()
        if self.process.poll() is None:
            self.process.kill()  # what it has started ends with it
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of one model with five slots."""
    repository = Repository(tmp_path / "repository")
    repository.add_streaming("five", {"max_num_seqs": "5"}, QUEUE % 1024)
    repository.add_twin("five_unary")
    return repository.path


@pytest.fixture
def launched(repository: Path) -> Iterator[Launched]:
    """A server of that repository."""
    with closing(Launched(repository)) as launched:
        yield launched


def running_and_waiting(served: Served) -> tuple[float, float]:
    """Return how many requests run, and how many wait, in Triton's queue or in the engine's."""
    gauges = pending(served, "five")
    running = gauges.pop("five diffusion_requests_running", 0)
    return running, sum(gauges.values())


def assert_gone(processes: list[psutil.Process]) -> None:
    """Check that none of them is left after a few seconds."""
    _, alive = psutil.wait_procs(processes, 10)
    assert alive == []


def test_sigterm_with_five_running_and_five_queued_48(launched):
    """Case 48: each is answered, exit code 0 within the grace period, no child left."""
    launched.wait_ready()
    served = launched.served
    children = psutil.Process(launched.process.pid).children(recursive=True)
    assert len(children) >= 4, "the keeper, tritonserver and two stubs"
    values = {"prompt": "a", "num_inference_steps": 40}
    calls = [served.stream("five", **values, seed=k) for k in range(8)]
    unary_calls = []
    threads = [
        threading.Thread(target=lambda k=k: unary_calls.append(served.infer("five_unary", **values, seed=k)))
        for k in (8, 9)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: running_and_waiting(served) == (5, 5), "5 run and 5 wait")
    launched.process.send_signal(signal.SIGTERM)
    assert [call.result().seeds for call in calls] == [[k] for k in range(8)]
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(answer.seeds[0] for answer in unary_calls) == [8, 9]
    served.close()
    assert launched.process.wait(DEADLINE_S) == 0, launched.output
    assert_gone(children)


def test_who_still_runs_at_the_end_of_the_grace_period_is_told_48(repository):
    """Case 48: ten requests that would take minutes: each is told soon after the grace period; exit code 1."""
    with closing(Launched(repository, "--exit-timeout", "3")) as launched:
        launched.wait_ready()
        served = launched.served
        children = psutil.Process(launched.process.pid).children(recursive=True)
        calls = [served.stream("five", prompt="a", **LONG).wait_step(1) for _ in range(4)]
        errors: list[Exception] = []

        def ask() -> None:
            with pytest.raises(InferenceServerException) as caught:
                served.infer("five_unary", prompt="a", **LONG)
            errors.append(caught.value)

        unary = threading.Thread(target=ask)
        unary.start()
        eventually(lambda: running_and_waiting(served) == (5, 0), "5 run")
        calls += [served.stream("five", prompt="b", **LONG) for _ in range(5)]
        eventually(lambda: running_and_waiting(served) == (5, 5), "5 wait")
        begin = time.monotonic()
        launched.process.send_signal(signal.SIGTERM)
        for call in calls:
            call.wait()
            assert call.error is not None
            assert "the server is stopping; send the request to another replica" in call.error.message()
            assert call.error.status() == "StatusCode.UNAVAILABLE"
        unary.join(DEADLINE_S)
        assert "the server is stopping" in str(errors[0])
        assert min(call.ended_at for call in calls[:4]) - begin >= 3, "a running one was not left its time"
        served.close()
        assert launched.process.wait(DEADLINE_S) == 1, launched.output
        assert "requests that still ran were cut off" in launched.output
        assert_gone(children)


def test_a_model_that_dies_while_the_server_drains_keeps_nobody_waiting_48(repository):
    """Case 48: its callers are told long before the grace period ends, and the launcher says what died; exit code 1."""
    with closing(Launched(repository, "--exit-timeout", "600")) as launched:
        launched.wait_ready()
        served = launched.served
        children = psutil.Process(launched.process.pid).children(recursive=True)
        (model,) = (child for child in children if str(repository / "five" / "1") in " ".join(child.cmdline()))
        call = served.stream("five", prompt="a", **LONG).wait_step(1)
        launched.process.send_signal(signal.SIGTERM)
        eventually(lambda: "waiting for requests: 1 running" in launched.output, "it drains")
        begin = time.monotonic()
        model.kill()
        call.wait()
        assert call.error is not None
        assert call.ended_at - begin < 60
        assert launched.process.wait(DEADLINE_S) == 1, launched.output
        assert f"The Python process of model 'five' (process {model.pid}) was ended by SIGKILL" in launched.output
        served.close()
        assert_gone(children)
