"""End a server so that running requests finish, and see it out where it does not leave by itself.

Two things keep a server of this release from exiting though it has nothing left to do: a connection or a stream that a
client keeps open, and a request that it refused on a stream that ended. So whether it has drained is judged from
outside: its metrics say that no request runs or waits, or no client is connected any more.
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
"""How long after its exit time-out a server that should have ended by itself is ended."""

_POLL_S = 0.25


def drain(server: TritonServer, on_wait: Callable[[str], None] | None = None) -> bool:
    """Ask the server to stop, wait for its requests up to its exit time-out, and end it.

    Args:
        server: a server, running or not.
        on_wait: called whenever that changes with what the server still waits for.

    Returns:
        Whether every request was answered.
    """
    if not server.is_running:
        return True
    server.terminate()
    deadline = time.monotonic() + server.exit_timeout + OVERTIME_S
    idle_since: float | None = None
    unloaded_since: float | None = None
    told = ""
    while server.wait(_POLL_S) is None:
        now = time.monotonic()
        waits_for = _pending(server)
        idle_since = (idle_since or now) if waits_for is None else None
        unloaded_since = (unloaded_since or now) if server.is_unloaded else None
        if waits_for is not None and waits_for != told and on_wait is not None:
            on_wait(waits_for)
            told = waits_for
        if now - (idle_since or now) > IDLE_S or now - (unloaded_since or now) > UNLOADED_S:
            if on_wait is not None:
                on_wait("nothing: all requests are answered, but the server does not exit, so it is ended")
            server.kill()
            server.wait()
        elif now > deadline:
            server.kill()
            server.wait()
    server.close()
    return idle_since is not None or server.returncode == 0


def _pending(server: TritonServer) -> str | None:
    """Say what the server still works on; ``None`` if that is nothing."""
    if server.is_unloaded:
        return None  # a model is unloaded only after its last request
    work = endpoints.read_work(server.addresses.local_host, server.addresses.metrics_port)
    if work is not None and work.is_idle:
        return None
    clients = _count_clients(server)
    if clients == 0:
        return None
    if work is not None and work.complete:
        return f"requests: {work}"
    return f"clients that are connected: {clients}" if clients else "running requests"


def _count_clients(server: TritonServer) -> int | None:
    """Count the connections to the HTTP and gRPC ports that the server's own stubs do not hold.

    Returns ``None`` where the system does not tell.
    """
    if server.pid is None:
        return 0
    ports = {server.addresses.http_port, server.addresses.grpc_port}
    try:
        peers = {
            connection.raddr
            for connection in psutil.Process(server.pid).net_connections("tcp")
            if connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port in ports
        }
        for pid in server.stub_pids():
            peers -= {connection.laddr for connection in psutil.Process(pid).net_connections("tcp")}
    except psutil.NoSuchProcess:
        return 0
    except (psutil.Error, OSError):
        return None
    return len(peers)
