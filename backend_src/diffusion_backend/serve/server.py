"""The embedded Triton server as an object: start it, wait for it, drain it, end it; it leaves nothing behind."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from diffusion_backend.serve import drain as draining
from diffusion_backend.serve import endpoints
from diffusion_backend.serve.access import KEY_VARIABLE, Access
from diffusion_backend.serve.command import Addresses, build_command, check_extra, check_repository, control_mode
from diffusion_backend.serve.endpoints import ModelState
from diffusion_backend.serve.errors import LoadError, ReadyTimeoutError, ServeError, ServerExitError
from diffusion_backend.serve.layout import SERVER_DIR_VARIABLE, make_layout
from diffusion_backend.serve.log import LineCallback, LoadProgress, LogLine, explain_end, first_line
from diffusion_backend.serve.ports import check_distinct, check_port, free_ports
from diffusion_backend.serve.process import ServerProcess
from diffusion_backend.serve.tls import GrpcTls
from diffusion_backend.serve.watch import StubDeath, StubWatch, find_stubs

_POLL_S = 0.2


class TritonServer:
    """One embedded Triton server on this machine.

    Methods may be called from any thread. ``with TritonServer(...) as server`` starts it, and ends it at once when the
    block is left; call ``drain`` first to let running requests finish.

    Args:
        model_repository: folder of models (or an address such as ``s3://...``).
        host: address of the interface to listen on.
        http_port, grpc_port, metrics_port: 1 to 65535, or 0 to take a free port.
        metrics_address: address of the interface to listen on for metrics.
        access: which endpoints need the administrator's key; by default all that can, with a random key.
        grpc_tls: TLS for gRPC; by default it has none.
        exit_timeout: seconds for which ``drain`` waits for running requests; at least 1.
        log_verbose: level of the server's verbose log, 0 for none.
        log_file: file to which every line of the server's log is appended.
        on_line: called with every line of the server's log, by the thread that reads it.
        on_exit: called once after the server has ended and all is cleaned up, by a thread of this object.
        extra_args: further arguments for tritonserver.
        env: environment of the server, this process's own unless given; search paths are added to it.
        watch_stubs: whether to take the server down when the process of a Python model dies.
    """

    def __init__(
        self,
        model_repository: str | os.PathLike[str],
        *,
        host: str = "127.0.0.1",
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        metrics_address: str = "127.0.0.1",
        access: Access | None = None,
        grpc_tls: GrpcTls | None = None,
        exit_timeout: float = 30.0,
        log_verbose: int = 0,
        log_file: str | os.PathLike[str] | None = None,
        on_line: LineCallback | None = None,
        on_exit: Callable[[], None] | None = None,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        watch_stubs: bool = True,
    ) -> None:
        self.model_repository = os.fspath(model_repository)
        self.exit_timeout = exit_timeout
        self.shm_prefix = f"diffusion_{os.getpid()}_{uuid.uuid4().hex[:8]}_"
        self.failure: str | None = None
        self.access = access or Access()
        self._wanted = (host, http_port, grpc_port, metrics_port, metrics_address)
        self._grpc_tls = grpc_tls
        self._addresses: Addresses | None = None
        self._log_verbose = log_verbose
        self._log_file = log_file
        self._on_line = on_line
        self._on_exit = on_exit
        self._extra_args = tuple(extra_args)
        self._env = dict(os.environ if env is None else env)
        self._env.pop(KEY_VARIABLE, None)  # the models' processes need not know it
        self._watch_stubs = watch_stubs
        self._steady = control_mode(self._extra_args) == "none"

        self._progress = LoadProgress()
        self._process: ServerProcess | None = None
        self._stop_fifo = Path()
        self._watch: StubWatch | None = None

    # ---- starting ----

    def start(self) -> Self:
        """Start the server and return at once; ``wait_ready`` waits until the models are loaded.

        Raises:
            SetupError: if this machine or this Python cannot run the server.
            RepositoryError, ArgumentError, PortError: if an argument is wrong or a port is taken.
        """
        if self._process is not None:
            raise ServeError("This server has been started before. Make a new TritonServer.")
        check_extra(self._extra_args)
        check_repository(self.model_repository)
        self._addresses = _choose_addresses(*self._wanted)
        layout = make_layout(self._env.get(SERVER_DIR_VARIABLE, ""))
        command = build_command(
            layout.binary,
            layout.backend_dir,
            self.model_repository,
            self._addresses,
            guards=[*self.access.arguments(), *(() if self._grpc_tls is None else self._grpc_tls.arguments())],
            shm_prefix=self.shm_prefix,
            # Its own limit is a backstop: who still runs then is told first, and the models are to be unloaded.
            exit_timeout=self.exit_timeout + draining.OVERTIME_S,
            log_verbose=self._log_verbose,
            extra_args=self._extra_args,
        )
        self._stop_fifo = layout.stop_fifo
        try:
            self._process = ServerProcess(
                command,
                secret=self.access.key,
                env=layout.environment(
                    self._env | ({} if self._grpc_tls is None else self._grpc_tls.environment()),
                    grpc_endpoint=self.url_grpc,
                ),
                shm_prefix=self.shm_prefix,
                folder=layout.root,
                log_file=self._log_file,
                on_line=self._take_line,
                on_end=self._take_end,
            )
        except BaseException:
            layout.remove()
            raise
        return self

    def wait_ready(
        self,
        timeout: float = 300.0,
        *,
        strict: bool = False,
        on_progress: Callable[[Sequence[str], float], None] | None = None,
    ) -> list[ModelState]:
        """Wait until the server takes requests; return every model with its state.

        Args:
            timeout: seconds.
            strict: whether every model must load; otherwise one is enough.
            on_progress: called several times a second with the models being loaded and the seconds since the call.

        Raises:
            LoadError: if no model loaded, or not every one and ``strict``; the server still runs then.
            ServerExitError: if the server ended.
            ReadyTimeoutError: if the time is up; the server still runs then.
        """
        begin = time.monotonic()
        while True:
            if self.wait(_POLL_S) is not None:
                raise ServerExitError(self.describe_exit())
            loading = tuple(self._progress.loading)
            if (models := self._ask_models()) is not None:
                break
            elapsed = time.monotonic() - begin
            if elapsed > timeout:
                what = f"still loading {', '.join(loading)}" if loading else "no model was being loaded"
                raise ReadyTimeoutError(
                    f"The server was not ready within {timeout:.0f} s ({what}). Allow more with --ready-timeout"
                )
            if on_progress is not None:
                on_progress(loading, elapsed)
        self._check_models(models, strict)
        if self._watch_stubs and self._watch is None and self.pid is not None:
            self._watch = StubWatch(
                self.pid, steady=self._steady, is_model_ready=self.is_model_ready, on_death=self._stub_died
            )
            self._watch.start()
        return models

    def _ask_models(self) -> list[ModelState] | None:
        """Return the models once all endpoints answer: the server opens them, metrics last, after it has loaded."""
        host, http_port = self.addresses.local_host, self.addresses.http_port
        metrics = self.addresses.local_metrics_host, self.addresses.metrics_port
        if not endpoints.is_live(host, http_port) or endpoints.read_work(*metrics) is None:
            return None
        try:
            return [self._explain(model) for model in endpoints.list_models(host, http_port, self.access.http_headers)]
        except (OSError, http.client.HTTPException):
            return None  # it is ending; the next turn of the loop sees that

    def _explain(self, model: ModelState) -> ModelState:
        """Return a model, with the reason if its configuration was refused: the server lists it without a state."""
        if model.state or not self._steady:
            return model
        reason = self._progress.refused.get(model.name, "the server refused its configuration; see its log (--verbose)")
        return replace(model, state="UNAVAILABLE", reason=reason)

    def _check_models(self, models: Sequence[ModelState], strict: bool) -> None:
        failed = [model for model in models if model.state == "UNAVAILABLE"]
        some_ready = any(model.is_ready for model in models)
        if (failed or self._steady) and not some_ready:
            head = "No model could be loaded"
        elif failed and strict:
            head = "Not every model could be loaded"
        else:
            return
        reasons = "".join(f"\n  {model.name}: {first_line(model.reason)}" for model in failed)
        raise LoadError(f"{head} from {self.model_repository}.{reasons}\nFor all that the server says: --verbose")

    # ---- asking ----

    @property
    def addresses(self) -> Addresses:
        """Where the server listens; known once it has been started."""
        if self._addresses is None:
            raise ServeError("The server has not been started. Call start() first.")
        return self._addresses

    @property
    def url_http(self) -> str:
        """Base URL of the HTTP endpoint, such as ``http://127.0.0.1:8000``."""
        return f"http://{self.address_http}"

    @property
    def address_http(self) -> str:
        """The HTTP endpoint as ``tritonclient.http`` wants it, such as ``127.0.0.1:8000``."""
        return self.addresses.local(self.addresses.http_port)

    @property
    def url_grpc(self) -> str:
        """The gRPC endpoint as ``tritonclient.grpc`` wants it, such as ``127.0.0.1:8001``."""
        return self.addresses.local(self.addresses.grpc_port)

    @property
    def url_metrics(self) -> str:
        """URL of the Prometheus metrics, such as ``http://127.0.0.1:8002/metrics``."""
        return f"http://{self.addresses.local_metrics}/metrics"

    @property
    def has_tls(self) -> bool:
        """Whether gRPC is encrypted."""
        return self._grpc_tls is not None

    @property
    def pid(self) -> int | None:
        """Process id of tritonserver; ``None`` before the start."""
        return self._process.pid if self._process is not None else None

    @property
    def returncode(self) -> int | None:
        """Exit code of tritonserver, minus the number of the signal that ended it; ``None`` while it runs."""
        return self._process.returncode if self._process is not None else None

    @property
    def is_running(self) -> bool:
        """Whether the server has been started and anything of it still runs."""
        return self._process is not None and self._process.returncode is None

    @property
    def is_unloaded(self) -> bool:
        """Whether the server, while stopping, has unloaded all its models."""
        return self._progress.unloaded

    @property
    def loaded_models(self) -> frozenset[str]:
        """Names of the models that are loaded, as far as the server's log has told."""
        return frozenset(self._progress.loaded)

    def stub_pids(self) -> list[int]:
        """Return the process ids of the live stubs, one for each instance of a Python model."""
        return [stub.pid for stub in find_stubs(self.pid)] if self.pid is not None and self.is_running else []

    def is_model_ready(self, model: str) -> bool:
        """Return whether the model takes requests."""
        return endpoints.is_model_ready(self.addresses.local_host, self.addresses.http_port, model)

    def log_tail(self) -> list[str]:
        """Return the last lines of the server's log, as they came."""
        return [line.raw for line in self._process.lines()] if self._process is not None else []

    def describe_exit(self) -> str:
        """Say why the server ended, in words for the one who runs it."""
        if self.failure is not None:
            return self.failure
        code = self.returncode or 0
        how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
        if code == -9:
            how += " (SIGKILL: someone ended it, or the kernel did because memory ran out)"
        lines = self._process.lines() if self._process is not None else []
        said = "".join(f"\n  {text}" for text in explain_end(lines))
        return f"The Triton server ended {how}.{' It said:' if said else ''}{said}"

    # ---- ending ----

    def terminate(self) -> None:
        """Ask the server to finish what runs, to refuse what comes, and to exit; returns at once."""
        if self._watch is not None:
            self._watch.expect_unloading()
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """End the server and its stubs at once; returns before they are gone. May be called in a signal handler."""
        if self._watch is not None:
            self._watch.stop()
        if self._process is not None:
            self._process.kill()

    def drain(self, on_wait: Callable[[str], None] | None = None) -> bool:
        """Let running requests finish, up to ``exit_timeout``, and end the server; return whether none was cut off.

        Args:
            on_wait: called whenever that changes with what the server still waits for.
        """
        return draining.drain(self, on_wait)

    def tell_stopping(self) -> None:
        """Let the models of this package end their running requests with an error; returns at once."""
        # Opening the pipe is the message: each model sleeps until somebody opens its other end.
        with contextlib.suppress(OSError):  # no model listens, or the server is gone
            os.close(os.open(self._stop_fifo, os.O_WRONLY | os.O_NONBLOCK))

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until the server has ended and all is cleaned up; return its exit code, ``None`` if the time is up."""
        return self._process.wait(timeout) if self._process is not None else None

    def close(self) -> None:
        """End the server at once if it runs, and wait until nothing of it is left; may be called again."""
        if self._process is not None:
            self.kill()
            self._process.join()
        if self._watch is not None:
            self._watch.close()

    def __enter__(self) -> Self:
        return self.start() if self._process is None else self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- called by threads of this object ----

    def _take_line(self, line: LogLine) -> None:
        self._progress.feed(line)
        if self._on_line is not None:
            self._on_line(line)

    def _take_end(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        if self._on_exit is not None:
            self._on_exit()

    def _stub_died(self, death: StubDeath) -> None:
        what = str(death)
        self.failure = f"{what[0].upper()}{what[1:]}; the server cannot answer its requests any more."
        if self._process is not None:
            self._process.kill()


def _choose_addresses(host: str, http_port: int, grpc_port: int, metrics_port: int, metrics_address: str) -> Addresses:
    """Check the ports that are given and find free ones for those that are 0."""
    ports = {"HTTP_PORT": http_port, "GRPC_PORT": grpc_port, "METRICS_PORT": metrics_port}
    hosts = {"HTTP_PORT": host, "GRPC_PORT": host, "METRICS_PORT": metrics_address}
    host_variables = {"HTTP_PORT": "HOST", "GRPC_PORT": "HOST", "METRICS_PORT": "METRICS_ADDRESS"}
    for variable, port in ports.items():
        if port:
            check_port(hosts[variable], port, variable, host_variables[variable])
    for first, second in itertools.combinations(ports, 2):
        if ports[first] and ports[first] == ports[second]:
            check_distinct(ports[first], (hosts[first], first), (hosts[second], second))
    for variable, port in ports.items():
        if not port:
            ports[variable] = next(free for free in free_ports(hosts[variable], 3) if free not in ports.values())
    return Addresses(host, ports["HTTP_PORT"], ports["GRPC_PORT"], ports["METRICS_PORT"], metrics_address)
