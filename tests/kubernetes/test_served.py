"""What the manifests and docs/scale.md say of the server holds for the real one, started as the container starts it."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from diffusion_backend.serve.ports import free_ports
from diffusion_backend.telemetry import ERROR_REASONS
from tests.kubernetes.rendered import FOLDER, container, environment, one
from tests.support.client import DEADLINE_S, eventually

ROOT = Path(__file__).parents[2]
READY_S = 600.0


@dataclass(frozen=True)
class Running:
    """A server: the ports that it really has, by the names of the container's ports, and what it has printed."""

    ports: dict[str, int]
    output: list[str]

    def get(self, port: str, path: str, body: dict[str, object] | None = None) -> tuple[int, str]:
        """Send a request as a probe, Prometheus or a client does; return status and text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[port], timeout=DEADLINE_S)
        try:
            connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """The launcher with the arguments and the environment of the cpu overlay, but for addresses and folders."""
    ports = dict(zip(("http", "grpc", "metrics"), free_ports("127.0.0.1", 3), strict=True))
    local = {"HOST": "127.0.0.1", "METRICS_ADDRESS": "127.0.0.1", "MODEL_REPOSITORY": str(ROOT / "model_repository")}
    local |= {f"{name.upper()}_PORT": str(port) for name, port in ports.items()}
    given = environment("cpu")
    assert set(local) <= set(given), "what is replaced here is set there"
    process = subprocess.Popen(
        [sys.executable, "-m", "diffusion_backend.serve", *container("cpu")["args"]],
        env=os.environ | given | local,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                output.append(line)
                if "Ctrl-C stops the server" in line:
                    ready.set()
        ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert ready.wait(READY_S), "".join(output)
        assert process.poll() is None, "".join(output)
        yield Running(ports, output)
        process.terminate()
        assert process.wait(DEADLINE_S) == 0, "".join(output)
    finally:
        process.kill()
        reader.join()


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_every_probe_is_answered(running: Running, probe: str) -> None:
    request = container("cpu")[probe]["httpGet"]
    assert running.get(request["port"], request["path"])[0] == 200


def test_the_log_of_requests_comes_out_of_the_container_as_it_is(running: Running) -> None:
    """A line that the launcher colours, wraps or looks for emoji in would be no JSON, or another."""
    status, _ = running.get("http", "/v2/models/emoji_unary/generate", {"prompt": ":apple:", "num_inference_steps": 1})
    assert status == 200
    eventually(lambda: any(line.startswith("{") for line in running.output), "the request's line")
    (line,) = [json.loads(line) for line in running.output if line.startswith("{")]
    assert (line["event"], line["model"], line["outcome"]) == ("request", "emoji", "completed")
    assert "prompt" not in line


def scrape(running: Running) -> str:
    """Return the page at the PodMonitor's port and path."""
    (endpoint,) = one("cpu", "PodMonitor", "diffusion-triton")["spec"]["podMetricsEndpoints"]
    status, text = running.get(endpoint["port"], endpoint["path"])
    assert status == 200
    return text


def test_the_adapters_series_are_on_the_page(running: Running) -> None:
    values = yaml.safe_load((FOLDER / "overlays" / "autoscaling" / "prometheus-adapter-values.yaml").read_text())
    (rule,) = values["rules"]["custom"]
    page = scrape(running)
    for name in re.findall(r"\b((?:nv|diffusion)_\w+)\{", rule["metricsQuery"]):
        assert re.search(rf'^{name}\{{[^}}]*model="emoji"', page, re.MULTILINE), name


def test_the_numbers_of_series_in_the_docs(running: Running) -> None:
    """Some labels have no series until the first time; the docs count them all."""
    for steps in (1, 0):  # one that is answered, and one that is refused
        running.get("http", "/v2/models/emoji_unary/generate", {"prompt": "a", "num_inference_steps": steps})
    page = scrape(running)
    counts: Counter[str] = Counter()
    buckets = 0
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            kind = sample.name.partition("_")[0]
            counts[f"{kind} {sample.labels.get('model', '')}".strip()] += 1
            buckets += sample.name.endswith("_bucket") and sample.labels["model"] == "emoji"
    docs = (ROOT / "docs" / "scale.md").read_text()

    def told(what: str) -> tuple[int, int]:
        (found,) = re.findall(rf"^\| {re.escape(what)} \| (\d+) \| (\d+) \|$", docs, re.MULTILINE)
        return int(found[0]), int(found[1])

    assert f'reason="{ERROR_REASONS[0]}"' in page
    assert told("a streaming model: `diffusion_*`") == (counts["diffusion emoji"], buckets)
    for model in ("emoji", "emoji_unary"):
        assert told("a streaming model or a twin: `nv_inference_*`") == (counts[f"nv {model}"], 0)
    assert told("a twin: `diffusion_*`") == (counts["diffusion emoji_unary"], 0)
    assert told("a server: memory, processor (a GPU adds about 10)") == (counts["nv"], 0)
    limit = one("cpu", "PodMonitor", "diffusion-triton")["spec"]["sampleLimit"]
    assert sum(counts.values()) * 3 < limit, "the limit is for mistakes"
