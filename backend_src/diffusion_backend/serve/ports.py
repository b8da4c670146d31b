"""Ask whether an address is free before a server that takes a minute to load fails on it."""

from __future__ import annotations

import contextlib
import errno
import random
import socket

import psutil

from diffusion_backend.serve.errors import PortError

_FREE_PORTS = range(20000, 32000)
"""Below the range from which the kernel takes outgoing connections' ports, so that none of them gets in between."""


def free_ports(host: str, count: int) -> list[int]:
    """Return ``count`` different ports that nobody listens on at ``host`` just now."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.sample(_FREE_PORTS, len(_FREE_PORTS)):
            if len(found) == count:
                break
            with contextlib.suppress(OSError):
                held.enter_context(_listen(host, port))
                found.append(port)
    if len(found) < count:
        raise PortError(f"No free port was found at {host} between {_FREE_PORTS.start} and {_FREE_PORTS.stop}.")
    return found


def check_port(host: str, port: int, variable: str, host_variable: str = "HOST") -> None:
    """Raise ``PortError`` if a server could not listen on ``host:port``.

    Args:
        host: name or address of an interface of this machine.
        port: 1 to 65535.
        variable: name of the environment variable that sets this port, for the remedy.
        host_variable: the same of the host.
    """
    try:
        _listen(host, port).close()
    except socket.gaierror as error:
        raise PortError(
            f"{host_variable} '{host}' is not a known name: {error.strerror}. Try {host_variable}=127.0.0.1"
        ) from error
    except OSError as error:
        raise PortError(_why(host, port, variable, host_variable, error)) from error


def check_distinct(port: int, first: tuple[str, str], second: tuple[str, str]) -> None:
    """Raise ``PortError`` if two endpoints of a server cannot both listen on a port that is free.

    Args:
        port: 1 to 65535, given for both.
        first, second: host and name of the environment variable that sets the port.
    """
    (host, variable), (other_host, other_variable) = first, second
    with _listen(host, port):
        try:
            _listen(other_host, port).close()  # the kernel knows which addresses overlap, such as 0.0.0.0 and any other
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise PortError(
                f"{variable} and {other_variable} are both {port}. Each needs a port of its own: "
                f"{other_variable}={free_ports(other_host, 1)[0]}"
            ) from None


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``host:port``, as the server would."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # A port that the last server's connections still linger on can be listened on at once.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener


def _why(host: str, port: int, variable: str, host_variable: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"Port {port} at {host} is in use{_user(port)}. Stop what listens there, or choose another port: "
            f"{variable}={free_ports(host, 1)[0]}"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{host_variable} '{host}' is not an address of this machine. "
            f"Try {host_variable}=127.0.0.1 (or 0.0.0.0 for all)"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"Port {port} may not be opened by this user. Choose one above 1023: {variable}={free_ports(host, 1)[0]}"
    return f"Cannot listen on {host}:{port}: {error.strerror}. Choose another port with {variable}"


def _user(port: int) -> str:
    """Name the process that listens on ``port``, where the system tells."""
    try:
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr
                and connection.laddr.port == port
                and connection.pid
            ):
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except (psutil.Error, OSError):
        pass
    return ""
