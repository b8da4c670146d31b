"""Throw-away model repositories and a launcher under test; every test leaves no process and no shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from diffusion_backend.serve.ports import free_ports

DEADLINE_S = 60.0
"""For what should take a second or two; generous, as other work may share the machine."""

ECHO = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "text", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_input({"name": "delay_s", "data_type": "TYPE_FP32", "dims": [1], "optional": True})
        config.add_output({"name": "text", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(0)
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args):
        self.gauge = None
        if GAUGE:
            self.family = pb_utils.MetricFamily(
                name="diffusion_requests_running", description="running", kind=pb_utils.MetricFamily.GAUGE
            )
            self.gauge = self.family.Metric(labels={"model": args["model_name"]})

    def execute(self, requests):
        for request in requests:
            if self.gauge is not None:
                self.gauge.increment(1)
            text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
            delay = pb_utils.get_input_tensor_by_name(request, "delay_s")
            if delay is not None:
                time.sleep(float(delay.as_numpy()[0]))
            response = pb_utils.InferenceResponse([pb_utils.Tensor("text", text)])
            request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            if self.gauge is not None:
                self.gauge.increment(-1)
"""

BROKEN = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("no weights at 'here'; set the parameter 'model'")

    def execute(self, requests):
        return []
"""

SLOW = """
import time

class TritonPythonModel:
    def initialize(self, args):
        time.sleep(600)

    def execute(self, requests):
        return []
"""

PLAIN_CONFIG = """
input [ { name: "a" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "b" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""


class Repository:
    """A model repository to write models into."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def add(self, name: str, source: str, config: str = PLAIN_CONFIG) -> None:
        version = self.path / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(source)
        (self.path / name / "config.pbtxt").write_text(f'backend: "python"\n{config}')

    def add_echo(self, name: str = "echo", *, gauge: bool = False) -> None:
        self.add(name, f"GAUGE = {gauge}\n{ECHO}", config="")

    def add_broken(self, name: str = "broken") -> None:
        self.add(name, BROKEN)

    def add_slow(self, name: str = "slow") -> None:
        self.add(name, SLOW)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


COMMAND = (sys.executable, "-m", "diffusion_backend.serve")


class Launcher:
    """``python -m diffusion_backend.serve``, or another command that runs it, in a process of its own."""

    def __init__(self, repository: Path, tmp_dir: Path, *args: str, command: Sequence[str] = COMMAND) -> None:
        self.http_port, self.grpc_port, self.metrics_port = free_ports("127.0.0.1", 3)
        self.tmp_dir = tmp_dir
        self.env = os.environ | {
            "MODEL_REPOSITORY": str(repository),
            "HTTP_PORT": str(self.http_port),
            "GRPC_PORT": str(self.grpc_port),
            "METRICS_PORT": str(self.metrics_port),
            "TMPDIR": str(tmp_dir),
        }
        self.process = subprocess.Popen(
            [*command, *args],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._closed = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def output(self) -> str:
        with self._changed:
            return "".join(self._lines)

    def wait_for(self, text: str) -> None:
        """Wait until the launcher has printed ``text``."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or text in "".join(self._lines), DEADLINE_S)
        assert text in self.output, self.output

    def wait_ready(self) -> None:
        self.wait_for("Ctrl-C stops the server")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = DEADLINE_S) -> int:
        """Wait until the launcher and all that writes to its output have ended; return its exit code."""
        code = self.process.wait(timeout)
        self._reader.join(DEADLINE_S)
        return code

    def server_pid(self) -> int:
        return self._descendant("tritonserver")

    def stub_pid(self) -> int:
        return self._descendant("triton_python_b")

    def keeper_pid(self) -> int:
        (pid,) = children(self.process.pid)
        return pid

    def leftovers(self) -> list[str]:
        """Return what is left in shared memory and in the temporary folder."""
        regions = [name for name in os.listdir("/dev/shm") if name.startswith(f"diffusion_{self.process.pid}_")]
        return regions + [path.name for path in self.tmp_dir.iterdir()]

    def _descendant(self, name: str) -> int:
        pids = [self.process.pid]
        while pids:
            pids = [child for pid in pids for child in children(pid)]
            for pid in pids:
                if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                    return pid
        raise AssertionError(f"no process {name} under the launcher:\n{self.output}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)  # the keeper ends the rest
        self.wait()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    """Start launchers; at the end, all of them are ended and must have left nothing."""
    launchers: list[Launcher] = []

    def start(repository: Path, *args: str, command: Sequence[str] = COMMAND) -> Launcher:
        tmp_dir = tmp_path / f"tmp{len(launchers)}"
        tmp_dir.mkdir()
        launchers.append(Launcher(repository, tmp_dir, *args, command=command))
        return launchers[-1]

    yield start
    for launcher in launchers:
        launcher.close()
        wait_until(lambda launcher=launcher: not launcher.leftovers(), "shared memory and folders removed")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep out what `make test` and the user's shell set."""
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS", "PROMPT", "PYTHON", "HOST"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _nothing_left_in_shared_memory() -> Iterator[None]:
    before = _own_regions()  # of the servers that other folders' tests keep for the whole session
    yield
    assert _own_regions() - before == set()


def _own_regions() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"diffusion_{os.getpid()}_")}


def wait_until(condition: Callable[[], object], what: str, timeout: float = DEADLINE_S) -> None:
    """Wait until ``condition`` holds; fail if it does not in ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:.0f} s: {what}"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Return the process ids of the children of ``pid``."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def is_gone(pid: int) -> bool:
    """Return whether no such process runs; one that is dead and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
