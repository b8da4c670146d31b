"""The stack as `docker compose up` starts it, used from outside of its containers."""

from __future__ import annotations

import http.client
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.deploy.stack import Stack, docker, metrics_of, wait_until
from tests.support.client import Answer, Metrics, Served


@pytest.fixture(scope="module")
def running(stack: Stack) -> Stack:
    """The server and Prometheus. (There is no stand-in for Grafana's image.)"""
    stack.up("triton", "prometheus")
    return stack


@pytest.fixture(scope="module")
def served(running: Stack) -> Iterator[Served]:
    """The client of the server, through the ports on this machine."""
    settings = running.settings
    client = Served(f"127.0.0.1:{settings['HTTP_PORT']}", f"127.0.0.1:{settings['GRPC_PORT']}", "")
    yield client
    client.close()


def test_a_picture_by_http_grpc_and_stream_is_the_same(served):
    by_http = served.infer_http(prompt="red apple", seed=7).image
    by_grpc = served.infer(prompt="red apple", seed=7).image
    by_stream = served.stream(prompt="red apple", seed=7)
    assert np.array_equal(by_http, by_grpc)
    assert np.array_equal(by_http, by_stream.result().image)
    assert len(by_stream.events("step")) == 20
    assert by_http.shape == (64, 64, 3)
    red, green, blue = by_http.reshape(-1, 3).astype(float)[by_http.reshape(-1, 3).min(axis=1) < 200].mean(axis=0)
    assert red > green + 40
    assert red > blue + 40


def test_prometheus_scrapes_the_server_and_its_rules_are_loaded(running, served):
    served.infer(prompt="red apple")

    url = f"http://127.0.0.1:{running.settings['PROMETHEUS_PORT']}/api/v1"

    def ask(path: str) -> dict:
        with urllib.request.urlopen(f"{url}/{path}") as response:
            return json.load(response)["data"]

    query = "query?query=sum(diffusion_requests_total{outcome='completed',model='emoji'})".replace("'", "%22")
    wait_until(lambda: ask(query)["result"] and float(ask(query)["result"][0]["value"][1]) >= 1, "requests counted")
    targets = [target for target in ask("targets")["activeTargets"] if target["labels"]["job"] == "triton"]
    assert [target["health"] for target in targets] == ["up"] * len(targets)
    assert len(targets) == len(running.containers("triton") + running.containers("replica"))
    assert ask("rules")["groups"]


def test_metrics_and_the_restricted_endpoints_are_not_to_be_had_from_outside(running, served):
    ports = running.inspect(running.container("triton"))["NetworkSettings"]["Ports"]
    assert {port for port, bindings in ports.items() if bindings} == {"8000/tcp", "8001/tcp"}
    assert {binding["HostIp"] for bindings in ports.values() for binding in bindings or ()} == {"127.0.0.1"}
    connection = http.client.HTTPConnection(served.http_url, timeout=30)
    connection.request("GET", "/v2/models/emoji/stats")
    assert connection.getresponse().status == 403
    connection.close()


def test_the_container_is_locked_down(running):
    container = running.container("triton")
    status = docker("exec", container, "cat", "/proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    assert fields["Uid"].split() == ["1000"] * 4
    assert "Read-only file system" in docker("exec", container, "sh", "-c", "touch /opt/x 2>&1 || true")
    size = docker("exec", container, "df", "--block-size=1", "--output=size", "/dev/shm").split()[-1]
    assert int(size) == 1 << 30


def test_nothing_that_was_asked_for_is_in_the_logs(running, served):
    served.infer(prompt="a word that is nowhere else: xylophonist")
    assert "xylophonist" not in running.logs("triton")


def test_stop_answers_what_runs_and_ends_with_0(running, served):
    def unary() -> Answer:
        return served.infer(prompt="red apple", num_inference_steps=60)

    def streaming() -> Answer:
        return served.stream(prompt="red apple", num_inference_steps=60).result()

    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(call) for call in (unary, unary, streaming, streaming)]
        wait_until(lambda: num_running(running) == 4, "all four run")
        running.compose("stop", "triton")
        assert [call.result().image.shape for call in calls] == [(64, 64, 3)] * 4
    assert running.inspect(running.container("triton"))["State"]["ExitCode"] == 0


def num_running(running: Stack) -> float:
    return Metrics.parse(metrics_of(running.container("triton"))).get("diffusion_requests_running")
