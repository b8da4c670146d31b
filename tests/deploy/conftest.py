"""The images and the stack that the tests share; skipped with the reason where no Docker engine can be had.

`DEPLOY_IMAGES=keep` in the environment takes the images as the last run left them, to work on the tests themselves.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusion_backend.serve.ports import free_ports
from tests.deploy.stack import IMAGES, READY_TIMEOUT_S, Stack, docker, docker_client, missing, run

PORTS = (
    "HTTP_PORT",
    "GRPC_PORT",
    "BALANCER_HTTP_PORT",
    "BALANCER_GRPC_PORT",
    "TLS_HTTP_PORT",
    "TLS_GRPC_PORT",
    "PROMETHEUS_PORT",
)


@pytest.fixture(scope="session")
def engine() -> None:
    """A Docker engine, and all that the images are made of."""
    reason = missing()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def images(engine: None) -> dict[str, str]:
    """The stand-ins and our image, built anew; what has not changed comes from the engine's cache."""
    if os.environ.get("DEPLOY_IMAGES") == "keep":
        return IMAGES
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diffusion-backend" / "deploy"
    wheels = cache / "wheelhouse"
    run(["deploy/docker/stand-ins.sh", str(cache)], IMAGES)
    run(["deploy/docker/wheelhouse.sh", str(wheels)])
    _import_wheels(wheels)
    build = ["build", "--quiet", "--tag", IMAGES["DIFFUSION_IMAGE"]]
    arguments = [word for name in ("TRITON_IMAGE", "WHEELHOUSE") for word in ("--build-arg", f"{name}={IMAGES[name]}")]
    docker(*build, *arguments, ".")
    return IMAGES


def _import_wheels(folder: Path) -> None:
    """Make the wheelhouse's image, unless it is there: only the same image lets the engine use what it has cached."""
    tag = IMAGES["WHEELHOUSE"]
    names = " ".join(sorted(path.name for path in folder.glob("*.whl")))
    client = docker_client()
    assert client is not None
    known = [client, "inspect", "--format", "{{.Comment}}", tag]
    if subprocess.run(known, capture_output=True, text=True, check=False).stdout.strip() == names:
        return
    with subprocess.Popen(["tar", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE) as tar:
        command = [client, "import", "--message", names, "-", tag]
        subprocess.run(command, stdin=tar.stdout, check=True, capture_output=True)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with server.pem, which the proxy reads, and ca.pem, which clients trust."""
    folder = tmp_path_factory.mktemp("certificates")
    run(["deploy/proxy/make-certificate.sh", str(folder)])
    return folder


@pytest.fixture(scope="session")
def stack(images: dict[str, str], certificates: Path) -> Iterator[Stack]:
    """The stack, not started yet; at the end nothing of it may be left."""
    ports = dict(zip(PORTS, map(str, free_ports("127.0.0.1", len(PORTS))), strict=True))
    settings = {"TLS_CERTIFICATE": str(certificates / "server.pem"), "READY_TIMEOUT_S": READY_TIMEOUT_S}
    made = Stack(f"diffusion-test-{os.getpid()}", ports | settings)
    yield made
    made.down()
    assert made.leftovers() == []
