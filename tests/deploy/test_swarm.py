"""The same compose file as a stack of a Swarm of one node, on loopback addresses."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusion_backend.serve.ports import free_ports
from tests.deploy.stack import READY_TIMEOUT_S, Stack, docker, docker_client, run, wait_until

STACK = f"diffusion-swarm-{os.getpid()}"


@pytest.fixture(scope="module")
def swarm(stack: Stack) -> Iterator[None]:
    """A Swarm of this node alone."""
    if docker("info", "--format", "{{.Swarm.LocalNodeState}}").strip() != "inactive":
        pytest.skip("this machine's engine belongs to a Swarm already")
    # An engine that leaves a Swarm cuts its other containers off (seen with 20.10): there may be none.
    stack.down()
    if docker("ps", "--quiet").split():
        pytest.skip("other containers run on this machine's engine, and would be cut off when it leaves the Swarm")
    docker("swarm", "init", "--advertise-addr", "127.0.0.1", "--listen-addr", "127.0.0.1")
    yield
    docker("swarm", "leave", "--force")
    docker("network", "rm", "docker_gwbridge")


@pytest.fixture(scope="module")
def https_port(swarm: None, images: dict[str, str], certificates: Path) -> Iterator[int]:
    """The stack, deployed; at the end nothing of it may be left."""
    port, grpc_port = free_ports("0.0.0.0", 2)
    settings = {
        "TLS_HTTP_PORT": str(port),
        "TLS_GRPC_PORT": str(grpc_port),
        "TLS_CERTIFICATE": str(certificates / "server.pem"),
        "READY_TIMEOUT_S": READY_TIMEOUT_S,
    }
    client = docker_client()
    assert client is not None
    files = ["-c", "docker-compose.yml", "-c", "docker-compose.swarm.yml"]
    run([client, "stack", "deploy", "--resolve-image", "never", *files, STACK], images | settings)
    docker("service", "rm", f"{STACK}_grafana")  # there is no stand-in for its image
    yield port
    docker("stack", "rm", STACK)
    wait_until(lambda: leftovers("container", "network", "secret") == [], "the stack is gone")
    docker("volume", "rm", *leftovers("volume"))
    assert leftovers("service", "container", "network", "secret", "volume") == []


def leftovers(*kinds: str) -> list[str]:
    """Return the names or ids of what there is of the stack."""
    label = f"label=com.docker.stack.namespace={STACK}"
    everything = {"container": ["--all"]}
    return [
        name
        for kind in kinds
        for name in docker(kind, "ls", *everything.get(kind, []), "--quiet", "--filter", label).split()
    ]


def running(service: str) -> list[str]:
    """Return the containers of a service whose health check says that they work."""
    label = f"label=com.docker.swarm.service.name={STACK}_{service}"
    return docker("ps", "--quiet", "--filter", label, "--filter", "health=healthy").split()


def scraped() -> list[str]:
    """Return what Prometheus says of the servers that it knows: up or down."""
    prometheus = running("prometheus")
    if not prometheus:
        return []
    url = "http://127.0.0.1:9090/api/v1/targets?state=active"
    targets = json.loads(docker("exec", prometheus[0], "wget", "-q", "-O", "-", url))["data"]["activeTargets"]
    return [target["health"] for target in targets if target["labels"]["job"] == "triton"]


def test_it_draws_through_tls_and_scales(https_port, certificates):
    for service in ("triton", "tls", "balancer", "prometheus"):
        wait_until(lambda service=service: len(running(service)) == 1, f"{service} healthy")
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))

    def draw() -> tuple[int, int]:
        connection = http.client.HTTPSConnection("localhost", https_port, context=context, timeout=60)
        connection.request("POST", "/v2/models/emoji_unary/generate", json.dumps({"prompt": "red apple"}))
        response = connection.getresponse()
        body = response.read()
        connection.close()
        # Until the balancer knows a server it answers with a page of its own.
        return response.status, len(json.loads(body)["images"]) if response.status == 200 else 0

    wait_until(lambda: draw()[0] == 200, "a picture")
    assert draw() == (200, 64 * 64 * 3)
    docker("service", "scale", "--detach", f"{STACK}_triton=2")
    wait_until(lambda: len(running("triton")) == 2, "two servers")
    wait_until(lambda: scraped() == ["up", "up"], "Prometheus scrapes both")
    assert draw() == (200, 64 * 64 * 3)


def test_the_servers_are_locked_down_as_far_as_swarm_can(https_port):
    wait_until(lambda: running("triton") != [], "a healthy server")
    for container in running("triton"):
        status = docker("exec", container, "cat", "/proc/1/status")
        assert "CapEff:\t0000000000000000" in status
        assert "Read-only file system" in docker("exec", container, "sh", "-c", "touch /opt/x 2>&1 || true")
        size = docker("exec", container, "df", "--block-size=1", "--output=size", "/dev/shm").split()[-1]
        assert int(size) == 1 << 30
