"""The stack as a person handles it: `docker` and `docker compose` as commands, in a project and on ports of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600.0
"""For whatever must happen; generous, since other work may share the machine."""

READY_TIMEOUT_S = "180"
"""A server that hangs in loading, as may happen on a machine that is far too busy (docs/limits.md), starts again."""

IMAGES = {
    "TRITON_IMAGE": "localhost/tritonserver:stand-in",
    "PROMETHEUS_IMAGE": "localhost/prometheus:stand-in",
    "HAPROXY_IMAGE": "localhost/haproxy:stand-in",
    "DIFFUSION_IMAGE": "localhost/diffusion-backend:test",
    "WHEELHOUSE": "localhost/wheelhouse:test",
}
"""What the tests' images are called. Grafana has no stand-in: it is in no package that these machines can reach."""


def run(command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 3000.0) -> str:
    """Run a command in the checkout; return its standard output.

    Raises:
        AssertionError: it fails; with all that it wrote.
    """
    done = subprocess.run(
        command, cwd=ROOT, env=environment(env or {}), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without what would change the stack, and with the client that can build."""
    settings = set(re.findall(r"\$\{(\w+)", "".join(path.read_text() for path in ROOT.glob("docker-compose*.yml"))))
    kept = {k: v for k, v in os.environ.items() if k not in settings and not k.startswith("COMPOSE_")}
    client = docker_client()
    if client is not None:
        kept["PATH"] = f"{Path(client).parent}:{kept['PATH']}"
    return kept | {"DOCKER_BUILDKIT": "1"} | changes


@cache
def docker_client() -> str | None:
    """Return a `docker` that can build with BuildKit: one before version 23 has it inside, a later one needs buildx."""
    for candidate in (shutil.which("docker"), "/usr/bin/docker"):
        if candidate is None or not Path(candidate).is_file():
            continue
        version = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False).stdout
        major = re.search(r"version (\d+)\.", version)
        has_buildx = subprocess.run([candidate, "buildx", "version"], capture_output=True, check=False).returncode == 0
        if has_buildx or (major is not None and int(major[1]) < 23):
            return candidate
    return None


@cache
def compose_command() -> tuple[str, ...] | None:
    """Return the command of Docker Compose, version 2 or 1; None if there is none."""
    client = docker_client()
    if client and subprocess.run([client, "compose", "version"], capture_output=True, check=False).returncode == 0:
        return (client, "compose")
    old = shutil.which("docker-compose")
    return (old,) if old else None


def missing() -> str:
    """Say why the stack cannot be run here; "" if it can."""
    client = docker_client()
    if client is None:
        return "no docker client that can build images (Debian: apt-get install docker.io)"
    if compose_command() is None:
        return "no Docker Compose (Debian: apt-get install docker-compose)"
    if subprocess.run([client, "info"], capture_output=True, check=False).returncode != 0:
        return "no Docker engine answers; .ci/run starts one"
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        return "the stand-in images need root and debootstrap (Debian: apt-get install debootstrap)"
    return ""


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Wait until a condition holds; fail if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.2)


class Stack:
    """One project of Docker Compose.

    Args:
        project: its name; everything that belongs to it carries it as a label.
        settings: variables of the compose files.
    """

    def __init__(self, project: str, settings: Mapping[str, str]) -> None:
        self.project = project
        self.settings = dict(settings)

    def compose(self, *args: str, profiles: Sequence[str] = ()) -> str:
        """Run Docker Compose on this project."""
        command = compose_command()
        assert command is not None
        chosen = [word for profile in profiles for word in ("--profile", profile)]
        return run([*command, "--project-name", self.project, *chosen, *args], IMAGES | self.settings)

    def up(self, *services: str, profiles: Sequence[str] = (), scale: Mapping[str, int] | None = None) -> None:
        """Start services and wait until the health check of each container says that it works."""
        scaling = [word for name, count in (scale or {}).items() for word in ("--scale", f"{name}={count}")]
        self.compose("up", "--detach", "--no-build", *scaling, *services, profiles=profiles)
        for service in services:
            self.wait_healthy(service)

    def wait_healthy(self, service: str) -> None:
        def healthy() -> bool:
            states = [self.inspect(container)["State"] for container in self.containers(service)]
            return bool(states) and all(state.get("Health", {}).get("Status") == "healthy" for state in states)

        try:
            wait_until(healthy, f"{service} healthy")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs(service)}") from None

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's containers, running or not."""
        return docker(
            "ps",
            "--all",
            "--quiet",
            "--filter",
            f"label=com.docker.compose.project={self.project}",
            "--filter",
            f"label=com.docker.compose.service={service}",
        ).split()

    def container(self, service: str) -> str:
        """Return the id of a service's only container."""
        (container,) = self.containers(service)
        return container

    @staticmethod
    def inspect(container: str) -> dict[str, Any]:
        return json.loads(docker("inspect", container))[0]

    def logs(self, service: str) -> str:
        """Return what the containers of a service have written, the last lines of each."""
        return "\n".join(docker("logs", "--tail", "60", container) for container in self.containers(service))

    def down(self) -> None:
        """Stop and remove everything, volumes too."""
        self.compose("down", "--volumes", "--remove-orphans", profiles=["scale", "tls"])

    def leftovers(self) -> list[str]:
        """Return the containers, networks and volumes of this project."""
        found = []
        for kind, options in (("container", ["--all"]), ("network", []), ("volume", [])):
            label = f"label=com.docker.compose.project={self.project}"
            names = docker(kind, "ls", *options, "--quiet", "--filter", label)
            found += [f"{kind} {name}" for name in names.split()]
        return found


def docker(*args: str) -> str:
    """Run `docker`."""
    client = docker_client()
    assert client is not None
    return run([client, *args])


def metrics_of(container: str) -> str:
    """Read a server's metrics inside its container: nobody outside can."""
    script = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8002/metrics').read().decode())"
    return docker("exec", container, "python3", "-c", script)
