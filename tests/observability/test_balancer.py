"""The balancer's own metrics and the alert on them: a real HAProxy before a real server, and a real Prometheus."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusion_backend.serve import TritonServer
from diffusion_backend.serve.ports import free_ports
from tests.observability.conftest import READY_S, SCRAPE_S, needs_prometheus
from tests.serve.conftest import Repository
from tests.support.client import eventually
from tools.dashboard.prometheus import Prometheus, write_config

ROOT = Path(__file__).parents[2]
ALERT = "DiffusionBalancerEmpty"

needs_haproxy = pytest.mark.skipif(
    shutil.which("haproxy") is None, reason="HAProxy is not installed (Debian's package: haproxy)"
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TritonServer]:
    """A server of a model that echoes."""
    repository = Repository(tmp_path / "repository")
    repository.add_echo()
    with TritonServer(repository.path) as server:
        server.wait_ready(READY_S)
        yield server


@pytest.fixture
def balancer(server: TritonServer, tmp_path: Path) -> Iterator[str]:
    """Where the metrics of an HAProxy before that server are: `host:port`. It asks no name server for it."""
    http_port, grpc_port, metrics_port = free_ports("127.0.0.1", 3)
    path = tmp_path / "haproxy.cfg"
    path.write_text(
        configuration(
            {
                "bind :8404": f"bind 127.0.0.1:{metrics_port}",
                "http 64 triton:8000": f"http 2 {server.address_http}",
                "grpc 64 triton:8001": f"grpc 2 {server.url_grpc}",
                "connect port 8000": f"connect port {server.addresses.http_port}",
            }
        )
    )
    settings = {
        "HTTP_BIND": f"127.0.0.1:{http_port}",
        "GRPC_BIND": f"127.0.0.1:{grpc_port} proto h2",
        "MAX_BODY_BYTES": "1000",
    }
    with subprocess.Popen(["haproxy", "-db", "-f", path], env=os.environ | settings) as process:
        try:
            yield f"127.0.0.1:{metrics_port}"
        finally:
            process.kill()


def configuration(changes: dict[str, str]) -> str:
    """Return the configuration of the deployment with these changes."""
    text = (ROOT / "deploy" / "proxy" / "haproxy.cfg").read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@needs_haproxy
@needs_prometheus
def test_a_balancer_whose_last_server_is_gone_raises_the_alert(
    server: TritonServer, balancer: str, tmp_path: Path
) -> None:
    folder = tmp_path / "prometheus"
    folder.mkdir()
    config = write_config(folder, balancer, SCRAPE_S, job_name="balancer")
    with Prometheus(config, folder / "data") as prometheus:

        def active() -> dict[str, float]:
            found = prometheus.query("haproxy_backend_active_servers")
            return {series.labels["proxy"]: series.values[0] for series in found}

        eventually(lambda: active() == {"http_pool": 2, "grpc_pool": 2}, "the balancer has found the server")
        assert prometheus.query("scrape_samples_scraped")[0].values[0] < 1000
        assert prometheus.query(f'ALERTS{{alertname="{ALERT}"}}') == []
        server.close()
        eventually(lambda: active() == {"http_pool": 0, "grpc_pool": 0}, "the balancer has lost it")
        eventually(lambda: prometheus.query(f'ALERTS{{alertname="{ALERT}"}}'), "the alert waits for its minute")
        (alert,) = prometheus.query(f'ALERTS{{alertname="{ALERT}"}}')
        assert alert.labels["instance"] == balancer
