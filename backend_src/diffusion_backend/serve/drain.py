"""End a server so that running requests finish, and see it out where it does not leave by itself.

Two things keep a server of this release from exiting though it has nothing left to do: a connection or a stream that a
client keeps open, and a request that it refused on a stream. So whether it has drained is judged from outside: its
metrics say that no request runs or waits. Of models that are not of this package they tell only the latter: as long as
such a model is loaded and a client is connected, a request of it may be running, and the server is left alone.

    SIGTERM ── exit_timeout ──▶ the models tell those whose requests still run ── OVERTIME_S ──▶ SIGKILL
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

from diffusion_backend.serve import endpoints

if TYPE_CHECKING:
    from diffusion_backend.serve.server import TritonServer

IDLE_S = 5.0
"""For how long a server that stops must have been idle to be ended: unloading its models takes 2 to 3 seconds."""

UNLOADED_S = 2.0
"""The same once it has said that all its models are unloaded."""

OVERTIME_S = 5.0
"""For how long after the exit time-out a server may tell its callers and unload its models, before it is ended."""

SETTLED_S = 1.0
"""For how long a server must have been idle for its end to have cut off nothing: one that gives up on a request closes
its connections, too, and exits at once."""

_POLL_S = 0.25


def drain(server: TritonServer, on_wait: Callable[[str], None] | None = None) -> bool:
    """Ask the server to stop, wait for its requests up to its exit time-out, and end it.

    Args:
        server: a server, running or not.
        on_wait: called whenever that changes with what the server still waits for.

    Returns:
        Whether every request was finished; those that were not have got an error, or at last a broken connection. Not
        so if the process of a model died meanwhile: the server is ended then, and `server.failure` says why.
    """
    if not server.is_running:
        return True
    server.terminate()
    idle = _Span()
    unloaded = _Span()
    look = _Look(server)
    said = ""
    cut_off = False
    time_out = time.monotonic() + server.exit_timeout
    while server.wait(_POLL_S) is None:
        unloaded.note(server.is_unloaded)
        pending = look()
        idle.note(None if pending is None else not pending)
        if pending and pending != said and on_wait is not None:
            on_wait(pending)
            said = pending
        if not cut_off and time.monotonic() > time_out and not unloaded.holds and not idle.holds:
            cut_off = True
            server.tell_stopping()
        if idle.lasted > IDLE_S or unloaded.lasted > UNLOADED_S:
            if on_wait is not None:
                on_wait("nothing: all requests are answered, but the server does not exit, so it is ended")
            server.kill()
            server.wait()
        elif time.monotonic() > time_out + OVERTIME_S:
            server.kill()
            server.wait()
    server.close()
    if cut_off or server.failure is not None:
        return False
    return server.returncode == 0 or server.is_unloaded or idle.lasted >= SETTLED_S


class _Span:
    """For how long something has been seen to hold, without a look that said otherwise.

    Args:
        clock: returns seconds that never go back.

    Attributes:
        lasted: seconds between the first and the last of these looks; 0 after the first one, too.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self.lasted = 0.0

    @property
    def holds(self) -> bool:
        """Whether the last look that told anything said that it holds."""
        return self._since is not None

    def note(self, holds: bool | None) -> None:
        """Take note of one look; ``None`` is one that told nothing."""
        if holds is None:
            return
        if not holds:
            self._since = None
            self.lasted = 0.0
            return
        now = self._clock()
        if self._since is None:
            self._since = now
        self.lasted = now - self._since


class _Look:
    """Looks at what a server that stops still works on."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._telling: frozenset[str] = frozenset()  # models whose gauges were seen; they go before the model does

    def __call__(self) -> str | None:
        """Say what it works on: "" for nothing, ``None`` if that cannot be told now."""
        server = self._server
        if server.is_unloaded:
            return ""  # a model is unloaded only after its last request
        work = endpoints.read_work(server.addresses.local_metrics_host, server.addresses.metrics_port)
        if work is None:
            return None
        self._telling |= work.models
        if not work.is_idle:
            return f"requests: {work}"
        silent = sorted(server.loaded_models - self._telling)
        if not silent:
            return ""
        clients = _count_clients(server)
        if clients is None:
            return None
        return f"clients that are connected, perhaps for {', '.join(silent)}: {clients}" if clients else ""


def _count_clients(server: TritonServer) -> int | None:
    """Count the connections to the HTTP and gRPC ports that the server's own stubs do not hold.

    Returns ``None`` where the system does not tell, or the server is gone.
    """
    if server.pid is None:
        return None
    ports = {server.addresses.http_port, server.addresses.grpc_port}
    try:
        peers = {
            connection.raddr
            for connection in psutil.Process(server.pid).net_connections("tcp")
            if connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port in ports
        }
        for pid in server.stub_pids():
            peers -= {connection.laddr for connection in psutil.Process(pid).net_connections("tcp")}
    except (psutil.Error, OSError):
        return None
    return len(peers)
