"""One real server under a load of every kind of request, and a real Prometheus that has scraped it meanwhile."""

from __future__ import annotations

import time
import urllib.request
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from diffusion_backend.serve import TritonServer
from diffusion_backend.telemetry import OUTCOMES
from tests.server.conftest import QUEUE, Blocker, Repository
from tests.support.client import Served, eventually
from tests.support.families import stable_diffusion
from tools.dashboard.load import Load
from tools.dashboard.prometheus import Prometheus, is_installed, write_config

READY_S = 300.0
"""Generous: other work may share the machine."""

SCRAPE_S = 1
MODELS = ("emoji", "tight", "pag")
KINDS = ("fine", "cancelled", "fine", "wrong", "fine", "late", "fine", "failing")

needs_prometheus = pytest.mark.skipif(
    not is_installed(), reason="Prometheus is not installed (Debian's package: prometheus)"
)


@dataclass(frozen=True)
class Scraped:
    """A Prometheus with the metrics of a load.

    Attributes:
        page: the server's metrics when the load had ended, as Prometheus gets them.
        start, end: of the load, seconds since the epoch.
    """

    prometheus: Prometheus
    page: str
    start: float
    end: float


def make_repository(folder: Path) -> Path:
    """The models that ship; one with one slot; one that batching was meant for and cannot be had for."""
    repository = Repository(folder / "repository")
    repository.add_shipped("emoji")
    repository.add_shipped("emoji_unary")
    repository.add_streaming("tight", {"max_num_seqs": "1"}, QUEUE % 64)
    (pag,) = (case for case in stable_diffusion.CASES if case.pipeline == "StableDiffusionPAGPipeline")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the pipeline is made of
        pag.build().save_pretrained(folder / "pag")
    repository.add_streaming("pag", {"model": str(folder / "pag"), "default_height": "32", "default_width": "32"})
    return repository.path


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The client of the server."""
    with TritonServer(make_repository(tmp_path_factory.mktemp("observed"))) as server:
        server.wait_ready(READY_S, strict=True)
        client = Served.of(server)
        yield client
        client.close()


@pytest.fixture(scope="session")
def scraped(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """All of it, with the load over; it lasted until every kind of ending had been scraped in the course of it."""
    folder = tmp_path_factory.mktemp("prometheus")
    with Prometheus(write_config(folder, served.metrics_url, SCRAPE_S), folder / "data") as prometheus:
        eventually(lambda: prometheus.query("up == 1"), "a first scrape")
        start = time.time()
        with Load(served, "emoji", 6, KINDS), Load(served, "pag", 1, ("fine",)), Blocker(served, "tight"):
            waiting = served.stream("tight", prompt="patient", num_inference_steps=1)
            eventually(lambda: _wait_in_vain(served), "a time-out in Triton's queue")
            eventually(lambda: _seen(prometheus), "every outcome, over some scrapes", READY_S)
        waiting.result()
        with urllib.request.urlopen(f"http://{served.metrics_url}/metrics", timeout=60) as response:
            page = response.read().decode()
        end = time.time()
        eventually(lambda: prometheus.query("timestamp(up)")[0].values[0] > end, "a last scrape")
        yield Scraped(prometheus, page, start, end)


def _wait_in_vain(served: Served) -> bool:
    """Send a request to the model whose one slot is taken; tell whether Triton has counted two as timed out."""
    call = served.stream("tight", prompt="late", timeout_s=0.2).wait()
    call.close()
    assert call.error is not None
    return served.metrics().get("nv_inference_request_failure_total", "tight", reason="REJECTED") >= 2


def _seen(prometheus: Prometheus) -> bool:
    """Whether each outcome came up again and again between scrapes."""
    rates = 'sum by (outcome) (changes(diffusion_requests_total{model="emoji"}[10m]))'
    changes = {found.labels["outcome"]: found.values[0] for found in prometheus.query(rates)}
    return all(changes.get(outcome, 0) >= 3 for outcome in OUTCOMES)
