"""Put together the server's command line; only flags that release 24.10 and all later ones know."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion_backend.serve.errors import ArgumentError, RepositoryError

_STUB_TIMEOUT_S = 180

_OWNED = {
    "model-repository": "MODEL_REPOSITORY",
    "model-store": "MODEL_REPOSITORY",
    "backend-directory": "",
    "http-address": "HOST",
    "grpc-address": "HOST",
    "metrics-address": "METRICS_ADDRESS",
    "http-port": "HTTP_PORT",
    "grpc-port": "GRPC_PORT",
    "metrics-port": "METRICS_PORT",
    "exit-timeout-secs": "--exit-timeout",
    "log-verbose": "--verbose",
    "log-info": "--verbose",
    "log-file": "--log-file",
    "log-format": "",
    "allow-http": "",
    "allow-metrics": "",
    "http-restricted-api": "RESTRICTED_APIS and ADMIN_KEY",
    "grpc-restricted-protocol": "RESTRICTED_APIS and ADMIN_KEY",
    "grpc-use-ssl": "--grpc-tls-cert",
    "grpc-use-ssl-mutual": "--grpc-tls-ca",
    "grpc-server-cert": "--grpc-tls-cert",
    "grpc-server-key": "--grpc-tls-key",
    "grpc-root-cert": "--grpc-tls-ca",
}
"""Flags that the launcher sets or relies on, and what sets them there ("" if nothing does)."""


@dataclass(frozen=True)
class Addresses:
    """Where the server listens: one host for requests, one for metrics, three ports (1 to 65535)."""

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    metrics_host: str = "127.0.0.1"

    @property
    def local_host(self) -> str:
        """The host under which this machine reaches the server."""
        return _local(self.host)

    @property
    def local_metrics_host(self) -> str:
        """The host under which this machine reaches the metrics."""
        return _local(self.metrics_host)

    def local(self, port: int) -> str:
        """Return ``host:port`` of the HTTP or gRPC port as this machine reaches it."""
        return _joined(self.local_host, port)

    @property
    def local_metrics(self) -> str:
        """``host:port`` of the metrics as this machine reaches them."""
        return _joined(self.local_metrics_host, self.metrics_port)

    @property
    def is_public(self) -> bool:
        """Whether other machines may reach the endpoints that take requests."""
        return not is_loopback(self.host)


def _local(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches what listens on a host; of a name other than localhost, no."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def default_repository() -> Path:
    """Return ``model_repository`` in the current folder or, where there is none, in the checkout of this package."""
    here = Path("model_repository")
    checkout = Path(__file__).resolve().parents[3] / here
    return checkout if checkout.is_dir() and not here.is_dir() else here


def build_command(
    binary: Path,
    backend_dir: Path,
    repository: str,
    addresses: Addresses,
    *,
    guards: Sequence[str] = (),
    shm_prefix: str,
    exit_timeout: float,
    log_verbose: int,
    extra_args: Sequence[str],
) -> list[str]:
    """Return the command that starts the server.

    Args:
        binary: the tritonserver executable.
        backend_dir: folder that holds the backend ``python``.
        repository: the model repository's path or address.
        addresses: where to listen.
        guards: arguments that restrict who may call what (see ``access`` and ``tls``).
        shm_prefix: what the names of the server's shared memory regions begin with.
        exit_timeout: seconds for which the server, when stopping, waits for running requests; at least 1.
        log_verbose: level of the server's verbose log, 0 for none.
        extra_args: further arguments; they win over the defaults, but may not set what the launcher sets.

    Raises:
        ArgumentError: if an extra argument sets what the launcher sets.
    """
    check_extra(extra_args)
    defaults = {
        # One broken model must not keep the others from being served; the launcher tells which one failed. Readiness
        # would otherwise stay false as long as any model is unavailable, and no balancer would send requests.
        "exit-on-error": "false",
        "strict-readiness": "false",
        "model-control-mode": "none",
    }
    given = {_name(argument) for argument in extra_args}
    return [
        str(binary),
        f"--model-repository={repository}",
        f"--backend-directory={backend_dir}",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        f"--http-address={addresses.host}",
        f"--http-port={addresses.http_port}",
        f"--grpc-address={addresses.host}",
        f"--grpc-port={addresses.grpc_port}",
        f"--metrics-address={addresses.metrics_host}",
        f"--metrics-port={addresses.metrics_port}",
        f"--exit-timeout-secs={max(1, round(exit_timeout))}",
        f"--log-verbose={log_verbose}",
        *_stub_timeout(extra_args),
        *guards,
        *(f"--{name}={value}" for name, value in defaults.items() if name not in given),
        *extra_args,
    ]


def _stub_timeout(extra_args: Sequence[str]) -> list[str]:
    """Return how long a model's process may take to come up, unless an extra argument says it.

    Triton's own limit is 30 s. On cores with much else to do the process takes longer, and the server then ends.
    """
    if any("stub-timeout-seconds" in argument for argument in extra_args):
        return []
    return [f"--backend-config=python,stub-timeout-seconds={_STUB_TIMEOUT_S}"]


def check_extra(extra_args: Sequence[str]) -> None:
    """Raise ``ArgumentError`` if an argument sets what the launcher sets."""
    for argument in extra_args:
        name = _name(argument)
        if name in _OWNED:
            instead = f"Set it with {_OWNED[name]}." if _OWNED[name] else "It cannot be changed."
            raise ArgumentError(f"The launcher sets --{name} itself. {instead}")
        if "shm-region-prefix-name" in argument:
            raise ArgumentError("The launcher names the shared memory regions itself, to remove them at the end.")


def control_mode(extra_args: Sequence[str]) -> str:
    """Return the model control mode that the extra arguments choose: ``none``, ``poll`` or ``explicit``."""
    mode = "none"
    for position, argument in enumerate(extra_args):
        if _name(argument) == "model-control-mode":
            _, equals, value = argument.partition("=")
            following = extra_args[position + 1] if position + 1 < len(extra_args) else ""
            mode = value if equals else following
    return mode


def check_repository(repository: str) -> None:
    """Raise ``RepositoryError`` unless ``repository`` is a folder of models or an address such as ``s3://...``."""
    if "://" in repository:
        return
    path = Path(repository)
    choose = "Choose another with MODEL_REPOSITORY"
    try:
        if not path.exists():
            raise RepositoryError(f"The model repository {path.absolute()} does not exist. {choose}")
        if not path.is_dir():
            raise RepositoryError(f"The model repository {path.absolute()} is not a folder. {choose}")
        has_model = any(is_model(entry) for entry in path.iterdir())
    except OSError as error:
        raise RepositoryError(f"The model repository {path.absolute()} cannot be read: {error}. {choose}") from error
    if not has_model:
        hint = f" It looks like a model itself: try {path.absolute().parent}" if is_model(path) else ""
        raise RepositoryError(
            f"The model repository {path.absolute()} holds no model: a model is a folder with config.pbtxt or a "
            f"version folder such as '1'.{hint} {choose}"
        )


def is_model(path: Path) -> bool:
    """Return whether a folder looks like a model: it has ``config.pbtxt`` or a numbered version."""
    return path.is_dir() and (
        (path / "config.pbtxt").is_file() or any(entry.name.isdigit() and entry.is_dir() for entry in path.iterdir())
    )


def _name(argument: str) -> str:
    return argument.partition("=")[0].lstrip("-") if argument.startswith("-") else ""
