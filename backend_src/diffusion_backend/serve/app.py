"""Serve a model repository until told to stop: what ``python -m diffusion_backend.serve`` does once it has its options.

    start ── wait until ready ── announce ── wait for a signal or the server's end ── drain
      ▲                                                                         │
      └──────────────── pause, if restarts are allowed ◀── the server died ─────┘

The first SIGINT, SIGTERM or SIGHUP drains, the second ends the server at once.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from diffusion_backend.serve.access import KEY_VARIABLE
from diffusion_backend.serve.endpoints import ModelState
from diffusion_backend.serve.errors import ServeError, ServerExitError
from diffusion_backend.serve.hint import suggest_command
from diffusion_backend.serve.log import LogLine, first_line, printable
from diffusion_backend.serve.restarts import Restarts
from diffusion_backend.serve.server import TritonServer

EXIT_OK = 0
EXIT_FAILED = 1


class App:
    """Runs one server in the foreground and tells about it.

    Args:
        make_server: makes the server, given what to call with each line of its log and what to call at its end.
        console: where to write.
        ready_timeout: seconds until the models must be loaded.
        strict: whether every model must load.
        verbose: whether to show the server's whole log.
        max_restarts: how often in an hour a server that had served, and died, is started again.
    """

    def __init__(
        self,
        make_server: Callable[[Callable[[LogLine], None], Callable[[], None]], TritonServer],
        console: Console,
        *,
        ready_timeout: float,
        strict: bool,
        verbose: bool,
        max_restarts: int = 0,
    ) -> None:
        self._make_server = make_server
        self._restarts = Restarts(max_restarts)
        self._has_served = False
        self._console = console
        self._ready_timeout = ready_timeout
        self._strict = strict
        self._verbose = verbose
        self._signals: list[int] = []
        self._renew_server()

    def _renew_server(self) -> None:
        """Make a server, and a queue for what happens to it and for signals."""
        self._loading = True
        # A SimpleQueue may be filled by a signal handler while the same thread waits on it.
        self._events: queue.SimpleQueue[None] = queue.SimpleQueue()
        put = self._events.put
        self._server = self._make_server(self._show_line, lambda: put(None))

    def run(self) -> int:
        """Serve; return the exit code. To be called by the main thread, which gets the signals."""
        with self._handling_signals():
            while True:
                try:
                    with self._server as server:
                        return self._serve(server)
                except ServeError as error:
                    if self._signals and self._loading:  # there was no request yet that could be lost
                        return EXIT_OK
                    self._console.print(f"[bold red]error[/] {escape(str(error))}")
                may_restart = self._has_served and not self._signals
                pause = self._restarts.next_pause() if may_restart else None
                if pause is None:
                    return EXIT_FAILED
                self._console.print(f"starting the server again in {pause:.0f} s")
                if not self._sleep(pause):
                    return EXIT_OK
                self._renew_server()

    def _serve(self, server: TritonServer) -> int:
        """Serve with one server until told to stop; return the exit code.

        Raises:
            ServeError: it could not be started, or it died.
        """
        models = self._wait_ready(server)
        if models is None:  # told to stop before there was a request to wait for
            self._console.print("stopping")
            return EXIT_OK
        self._has_served = True
        self._announce(server, models)
        self._events.get()
        if server.is_running:
            return self._stop(server)
        raise ServerExitError(server.describe_exit())

    def _sleep(self, seconds: float) -> bool:
        """Sleep; return whether nobody has told us to stop."""
        end = time.monotonic() + seconds
        while not self._signals and (left := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=left)
        return not self._signals

    def _wait_ready(self, server: TritonServer) -> list[ModelState] | None:
        """Wait for the models; return ``None`` if told to stop meanwhile."""
        begin = time.monotonic()
        with self._progress() as tell:
            try:
                models = server.wait_ready(self._ready_timeout, strict=self._strict, on_progress=tell)
            except _StopWaitingError:
                return None
        self._loading = False
        self._console.print(f"[bold green]ready[/] after {time.monotonic() - begin:.1f} s")
        return models

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Callable[[Sequence[str], float], None]]:
        """Yield a function that shows how far the loading is: a line that renews itself on a terminal, else few."""
        what = starting = "starting the Triton server"
        status: Status | None = None
        if self._console.is_terminal:
            status = self._console.status(starting)
            status.start()
        told: list[str] = []

        def tell(loading: Sequence[str], elapsed: float) -> None:
            if self._signals:
                raise _StopWaitingError
            nonlocal what
            if loading:
                what = f"loading {', '.join(loading)}"
            elif what != starting:
                what = "opening the endpoints"
            if status is not None:
                status.update(f"{escape(what)} ({elapsed:.0f} s)")
            elif what not in told:
                told.append(what)
                self._console.print(f"{escape(what)} ({elapsed:.0f} s)")

        try:
            yield tell
        finally:
            if status is not None:
                status.stop()

    def _announce(self, server: TritonServer, models: Sequence[ModelState]) -> None:
        """Say what is served where, and how to try it."""
        lines = ["", "models"]
        for model in models:
            name = f"{model.name} {model.version}".strip()
            if model.is_ready:
                lines.append(f"  [green]ready[/]   {escape(name)}")
            elif model.state:
                lines.append(f"  [red]failed[/]  {escape(name)}: {escape(first_line(model.reason))}")
            else:
                lines.append(f"  not loaded  {escape(name)}")
        ready = [model.name for model in models if model.is_ready]
        lines += [
            "endpoints",
            f"  HTTP     {server.url_http}",
            f"  gRPC     {server.url_grpc}",
            f"  metrics  {server.url_metrics}",
            *_guard_lines(server),
            "try",
            f"  {escape(suggest_command(server.url_http, ready))}",
            "",
            "Ctrl-C stops the server after its running requests.",
        ]
        self._console.print("\n".join(lines))

    def _stop(self, server: TritonServer) -> int:
        """Drain the server and say what it waits for; return the exit code.

        Raises:
            ServerExitError: the process of a model died meanwhile.
        """
        self._console.print(
            f"stopping: running requests have up to {server.exit_timeout:.0f} s to finish "
            "(a second Ctrl-C ends them now)"
        )
        begin = time.monotonic()
        drained = server.drain(lambda what: self._console.print(f"  waiting for {escape(what)}"))
        if len(self._signals) > 1:
            self._console.print("[bold red]stopped[/] at once; running requests were cut off")
            return 128 + self._signals[-1]
        if server.failure is not None:
            raise ServerExitError(server.describe_exit())
        if not drained:
            self._console.print(
                f"[bold red]stopped[/] after {time.monotonic() - begin:.1f} s; requests that still ran were cut off. "
                "Allow more time with --exit-timeout"
            )
            return EXIT_FAILED
        self._console.print(f"[bold green]stopped[/] after {time.monotonic() - begin:.1f} s")
        return EXIT_OK

    def _show_line(self, line: LogLine) -> None:
        """Show one line of the server's log; called by the thread that reads it."""
        if self._verbose:
            self._console.print(printable(line.raw), markup=False, highlight=False, soft_wrap=True)
        elif line.is_readable and not (self._loading and line.is_load_failure):  # told when all is loaded
            text = line.raw
            if line.level:
                text = f"{_LEVELS[line.level]}{line.source}: {line.text}"
            self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True, style="dim")

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup lets it outlive the terminal
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._signals.append(number)
        if len(self._signals) > 1:
            self._server.kill()
        self._events.put(None)


def _guard_lines(server: TritonServer) -> list[str]:
    """Say which endpoints are closed, and warn where other machines reach the rest."""
    lines = []
    if server.access.apis:
        key = f"the key of {KEY_VARIABLE} or {KEY_VARIABLE}_FILE (docs/security.md)"
        lines.append(f"  closed   {', '.join(server.access.apis)}: need {key}")
    else:
        lines.append("  [yellow]warning[/]: RESTRICTED_APIS is none: whoever reaches the server may administer it")
    if server.addresses.is_public:
        open_ones = "HTTP is" if server.has_tls else "HTTP and gRPC are"
        lines.append(
            f"  [yellow]warning[/]: {open_ones} open to every machine that reaches {escape(server.addresses.host)}, "
            "without TLS and without a key. Put a proxy with TLS in front (docs/security.md), "
            f"{'' if server.has_tls else 'give gRPC a certificate (GRPC_TLS_CERT), '}or set HOST=127.0.0.1"
        )
    return lines


class _StopWaitingError(Exception):
    """A signal came while the models were loading."""


_LEVELS = {"I": "", "W": "warning ", "E": "error ", "F": "error "}
