"""Everything that is measured, running side by side: our server as it ships, and the baselines.

They are all started before the first measurement and sleep between their turns, so that the arms of a round can follow
each other at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks.baselines.tensors import INPUTS
from benchmarks.clients import Client, HttpClient, StreamClient, UnaryClient
from diffusion_backend.serve import TritonServer
from diffusion_backend.serve.layout import find_libpython
from diffusion_backend.serve.ports import free_ports

ROOT = Path(__file__).resolve().parents[1]
READY_S = 900.0
_POLL_S = 0.1

BASELINES: dict[str, str] = {
    "served_solo": "this project, joint forwards off",
    "triton_plain": "Triton Python model, request by request",
    "fastapi_threads": "FastAPI, thread pool",
    "triton_batched": "Triton Python model, dynamic batching",
    "pytriton_batch": "PyTriton, @batch",
    "litserve_batch": "LitServe, batching",
}
"""The servers that a user would write instead, and what the tables call them."""

BATCHING = ("triton_batched", "pytriton_batch", "litserve_batch")
"""Those that batch at the request level."""

EXTRAS = {"litserve_batch": "litserve", "fastapi_threads": "fastapi"}
"""The packages of benchmarks/requirements.txt that a baseline needs."""

POLLING = ("litserve_batch",)
"""Those that look for requests without rest while there are none; they are stopped between their turns."""

_BEHIND_TRITON = ("served_solo", "triton_plain", "triton_batched")
_MAX_BATCH = 16
_QUEUE_DELAY_US = 5_000


def missing_extras(names: Sequence[str]) -> list[str]:
    """Return the packages that the named baselines need and that are not installed."""
    return sorted({EXTRAS[name] for name in names if name in EXTRAS and find_spec(EXTRAS[name]) is None})


class Fleet:
    """Starts servers, and makes clients of them; ends them when its block is left.

    Args:
        model: folder of the pipeline.
        env: environment of every server; its thread settings are the arms'.
        baselines: names of `BASELINES` to start beside our server.
    """

    def __init__(self, model: Path, env: Mapping[str, str], baselines: Sequence[str] = ()) -> None:
        self._model = model.resolve()
        self._env = dict(env)
        self._stack = ExitStack()
        self._clients: dict[str, Callable[[], Client]] = {}
        self._waits: list[Callable[[], None]] = []
        self._roots: dict[str, int] = {}
        self.baselines = tuple(baselines)
        self.served: TritonServer

    def __enter__(self) -> Self:
        with self._stack as stack:
            self.served = stack.enter_context(TritonServer(ROOT / "model_repository", env=self._env))
            self._add_server("served", self.served)
            self._clients["served"] = lambda: StreamClient(self.served.url_grpc, "emoji")
            self._start_behind_triton([name for name in self.baselines if name in _BEHIND_TRITON])
            for name in self.baselines:
                if name not in _BEHIND_TRITON:
                    self._start_process(name)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def wait_ready(self) -> None:
        """Wait until every server answers. Raises RuntimeError or ServeError with what a server said if one ended."""
        for wait in self._waits:
            wait()
        for name in self.baselines:
            self._signal(name, signal.SIGSTOP)

    @contextmanager
    def awake(self, name: str) -> Iterator[None]:
        """Let a server run that is stopped between its turns; the others always run."""
        self._signal(name, signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(name, signal.SIGSTOP)

    def _signal(self, name: str, number: signal.Signals) -> None:
        if name in POLLING:
            for pid in self.processes()[name]:
                os.kill(pid, number)

    def connect(self, name: str) -> Callable[[], Client]:
        """Return what makes a client of a server."""
        return self._clients[name]

    def processes(self) -> dict[str, list[int]]:
        """Return the processes of each server, those that it started included."""
        found = {}
        for name, pid in self._roots.items():
            root = psutil.Process(pid)
            found[name] = [root.pid, *(child.pid for child in root.children(recursive=True))]
        return found

    def _add_server(self, name: str, server: TritonServer) -> None:
        self._waits.append(lambda: _ignore(server.wait_ready(READY_S, strict=True)))
        assert server.pid is not None
        self._roots[name] = server.pid

    def _start_behind_triton(self, names: Sequence[str]) -> None:
        if not names:
            return
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="baselines-")))
        for name in names:
            add_model(folder, name, self._model)
        # Its half a minute for the start of a model's process is too little where all servers start at once.
        patience = ["--backend-config=python,stub-timeout-seconds=300"]
        server = self._stack.enter_context(TritonServer(folder, env=self._env, extra_args=patience))
        self._add_server("triton_baselines", server)
        for name in names:
            make = StreamClient if name == "served_solo" else UnaryClient
            self._clients[name] = lambda make=make, name=name: make(server.url_grpc, name)

    def _start_process(self, name: str) -> None:
        ports = free_ports("127.0.0.1", 3)
        behind_triton = name == "pytriton_batch"
        arguments = [str(self._model), *map(str, ports if behind_triton else ports[:1])]
        process = self._stack.enter_context(ServerOfBaseline(name, arguments, self._env))
        self._roots[name] = process.pid
        if behind_triton:
            url = f"127.0.0.1:{ports[0]}"
            self._clients[name] = lambda: UnaryClient(url, name)
            self._waits.append(lambda: process.wait(f"http://127.0.0.1:{ports[1]}/v2/models/{name}/ready"))
        else:
            url = f"http://127.0.0.1:{ports[0]}"
            self._clients[name] = lambda: HttpClient(url)
            self._waits.append(lambda: process.wait(f"{url}/health"))


class ServerOfBaseline:
    """A baseline in a process of its own, with everything that it starts.

    Args:
        name: its module in `benchmarks.baselines`.
        arguments: of its command line.
        env: its environment.
    """

    def __init__(self, name: str, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self._name = name
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  # a pipe that nobody reads would fill up
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.baselines.{name}", *arguments],
            cwd=ROOT,
            env=_with_libpython(env),
            stdout=self._said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The first process."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        children = psutil.Process(self.pid).children(recursive=True) if self._process.poll() is None else []
        for each in (self._process, *children):
            each.send_signal(signal.SIGCONT)  # what is stopped would not end
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for child in children:  # what it has left behind; psutil knows a number that was given anew
            if child.is_running():
                child.kill()
        self._said.close()

    def wait(self, url: str) -> None:
        """Wait until an address answers with 200. Raises RuntimeError if the process ended, or after a long time."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(_POLL_S)
        self._said.seek(0)
        raise RuntimeError(f"the baseline {self._name} did not start:\n{self._said.read()[-2000:]}")


def add_model(folder: Path, name: str, model: Path) -> None:
    """Add a baseline behind Triton to a repository of models."""
    version = folder / name / "1"
    version.mkdir(parents=True)
    if name == "served_solo":
        shipped = ROOT / "model_repository" / "emoji"
        shutil.copy(shipped / "1" / "model.py", version)
        config = (shipped / "config.pbtxt").read_text().replace('"../../models/emoji"', f'"{model}"')
        config += _parameter("step_batching", "off")
    else:
        shutil.copy(ROOT / "benchmarks" / "baselines" / f"{name}.py", version / "model.py")
        inputs = "".join(
            f'input {{ name: "{key}" data_type: TYPE_{kind} dims: [ 1 ] }}\n' for key, kind in INPUTS.items()
        )
        config = (
            f'backend: "python"\nmax_batch_size: {_MAX_BATCH}\n{inputs}'
            'output { name: "image" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] }\n'
            f"{_parameter('root', str(ROOT))}{_parameter('model', str(model))}"
        )
        if name == "triton_batched":
            config += f"dynamic_batching {{ max_queue_delay_microseconds: {_QUEUE_DELAY_US} }}\n"
    (folder / name / "config.pbtxt").write_text(config)


def _parameter(name: str, value: str) -> str:
    return f'parameters: {{ key: "{name}" value: {{ string_value: "{value}" }} }}\n'


def _ignore(_: Any) -> None:
    """Drop a result."""


def _with_libpython(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the library of this very Python first, which PyTriton's stub loads."""
    folders = [str(find_libpython().parent), env.get("LD_LIBRARY_PATH", "")]
    return dict(env) | {"LD_LIBRARY_PATH": ":".join(filter(None, folders))}
