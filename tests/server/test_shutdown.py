"""The end of a server with work: everybody is answered, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from diffusion_backend.serve.ports import free_ports
from tests.server.conftest import QUEUE, READY_S, Repository, pending
from tests.support.client import DEADLINE_S, Served, eventually


class Launched:
    """`python -m diffusion_backend.serve` in a process of its own, with a client."""

    def __init__(self, repository: Path) -> None:
        http_port, grpc_port, metrics_port = free_ports("127.0.0.1", 3)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "diffusion_backend.serve"],
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
def launched(tmp_path: Path) -> Iterator[Launched]:
    """A server of one model with five slots."""
    repository = Repository(tmp_path / "repository")
    repository.add_streaming("five", {"max_num_seqs": "5"}, QUEUE % 1024)
    repository.add_twin("five_unary")
    launched = Launched(repository.path)
    yield launched
    launched.close()


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
    wanted = {"five diffusion_requests_running": 5, "five nv_inference_pending_request_count": 5}
    eventually(lambda: pending(served, "five") == wanted, "5 run and 5 wait")
    launched.process.send_signal(signal.SIGTERM)
    assert [call.result().seeds for call in calls] == [[k] for k in range(8)]
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(answer.seeds[0] for answer in unary_calls) == [8, 9]
    served.close()
    assert launched.process.wait(DEADLINE_S) == 0, launched.output
    _, alive = psutil.wait_procs(children, 10)
    assert alive == []
