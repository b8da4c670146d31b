"""Two servers behind the balancer and behind TLS: shared work, one killed under load, and what neither lets through."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import psutil
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.deploy.stack import Stack, docker, metrics_of, wait_until
from tests.support.client import Metrics, Served, grpc_inputs, tensors

NUM_CALLERS = 12


@pytest.fixture(scope="module")
def scaled(stack: Stack) -> Stack:
    """Two servers, balancer, TLS and Prometheus."""
    stack.up("triton", "replica", "balancer", "tls", "prometheus", profiles=["scale", "tls"])
    return stack


@pytest.fixture(scope="module")
def balanced(scaled: Stack) -> Iterator[Served]:
    """The client of the balancer, once that knows both servers."""
    settings = scaled.settings
    client = Served(f"127.0.0.1:{settings['BALANCER_HTTP_PORT']}", f"127.0.0.1:{settings['BALANCER_GRPC_PORT']}", "")
    wait_until(lambda: num_up(scaled) == 2, "both servers in the pool")
    yield client
    client.close()


def num_up(scaled: Stack) -> int:
    """Return for how many servers the balancer's health checks pass, for HTTP and for gRPC."""
    page = docker("exec", scaled.container("balancer"), "wget", "-q", "-O", "-", "http://127.0.0.1:8404/metrics")
    lines = [line for line in page.splitlines() if line.startswith("haproxy_backend_active_servers")]
    return min(int(float(line.split()[-1])) for line in lines if "_pool" in line)


def completed(container: str) -> float:
    return Metrics.parse(metrics_of(container)).get("diffusion_requests_total", outcome="completed")


def test_both_servers_work(scaled, balanced):
    servers = [scaled.container("triton"), scaled.container("replica")]
    before = [completed(server) for server in servers]
    for number in range(4):
        assert balanced.infer_http(prompt="red apple", seed=number).image.shape == (64, 64, 3)
        assert balanced.infer(prompt="red apple", seed=number).image.shape == (64, 64, 3)
    # One gRPC channel, whose calls are spread all the same.
    calls = [threading.Thread(target=balanced.infer, kwargs={"prompt": "tree"}) for _ in range(8)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    done = [completed(server) - count for server, count in zip(servers, before, strict=True)]
    assert sum(done) == 16
    assert min(done) >= 4, done


def test_steps_are_streamed_through_the_balancer(balanced):
    call = balanced.stream(prompt="red apple", num_inference_steps=100)
    call.wait_step(1)
    assert len(call.answers) < 100, "the steps came in one piece at the end"
    assert call.result().image.shape == (64, 64, 3)
    texts = list(balanced.generate_stream(prompt="red apple", num_inference_steps=5, output_format="png;base64"))
    assert [text["event"] for text in texts].count("step") == 5


@pytest.mark.parametrize("job", ["triton", "balancer"])
def test_prometheus_finds_both_servers_and_both_proxies(scaled, job):
    def health() -> list[str]:
        connection = http.client.HTTPConnection(f"127.0.0.1:{scaled.settings['PROMETHEUS_PORT']}", timeout=30)
        connection.request("GET", "/api/v1/targets?state=active")
        targets = json.load(connection.getresponse())["data"]["activeTargets"]
        connection.close()
        return [target["health"] for target in targets if target["labels"]["job"] == job]

    wait_until(lambda: health() == ["up", "up"], "two targets that are up")


@dataclass
class Call:
    """One call of the load: when it was sent and ended, by `time.monotonic()`, and the error it ended with."""

    sent_at: float
    ended_at: float = 0.0
    error: Exception | None = None


class Load:
    """Callers that send one request after another through the balancer, half by HTTP and half by gRPC."""

    def __init__(self, balanced: Served) -> None:
        self.calls: list[Call] = []
        self._balanced = balanced
        self._stop = threading.Event()
        self._callers = [threading.Thread(target=self._run, args=(number,)) for number in range(NUM_CALLERS)]
        for caller in self._callers:
            caller.start()

    def _run(self, number: int) -> None:
        infer = self._balanced.infer if number % 2 else self._balanced.infer_http
        while not self._stop.is_set():
            call = Call(time.monotonic())
            self.calls.append(call)
            try:
                infer(prompt="red apple", num_inference_steps=8)
            except Exception as error:
                call.error = error
            call.ended_at = time.monotonic()

    def finish(self) -> None:
        """Let every caller end its call."""
        self._stop.set()
        for caller in self._callers:
            caller.join(120)
            assert not caller.is_alive(), "a call was not answered"


def test_one_is_killed_under_load_and_comes_back(scaled, balanced):
    victim, survivor = scaled.container("replica"), scaled.container("triton")
    failed = _failed(survivor)
    load = Load(balanced)
    try:
        wait_until(lambda: sum(call.ended_at > 0 for call in load.calls) >= NUM_CALLERS, "load")
        first_process = scaled.inspect(victim)["State"]["Pid"]
        killed_at = time.monotonic()
        os.kill(first_process, signal.SIGKILL)
        # It goes last: before it, the kernel ends all others of the container.
        wait_until(lambda: not psutil.pid_exists(first_process), "the killed one is gone")
        gone_at = time.monotonic()
        survived = completed(survivor)
        wait_until(lambda: completed(survivor) > survived + 2 * NUM_CALLERS, "the other one goes on")
    finally:
        load.finish()
    # Lost is some of what was under way while the server died, and nothing that was sent when it was gone: neither what
    # the other one was working on, nor what went to the dead one first.
    errors = [call for call in load.calls if call.error is not None]
    under_way = [call for call in load.calls if call.sent_at < gone_at and call.ended_at > killed_at]
    assert all(call in under_way for call in errors), errors
    assert len(errors) < len(under_way)
    for call in errors:
        assert isinstance(call.error, InferenceServerException), call.error
        assert call.error.status() in ("StatusCode.UNAVAILABLE", "502", "503"), call.error
    assert _failed(survivor) == failed
    # It is started again, and takes part again.
    wait_until(lambda: scaled.inspect(victim)["RestartCount"] >= 1, "started again")
    scaled.wait_healthy("replica")
    wait_until(lambda: num_up(scaled) == 2, "both servers in the pool again")


def _failed(container: str) -> float:
    metrics = Metrics.parse(metrics_of(container))
    return sum(metrics.get("diffusion_requests_total", outcome=name) for name in ("failed", "cancelled", "rejected"))


# ---- What is not let through ----


def status(address: str, method: str, path: str, headers: Mapping[str, str] = {}, body: bytes | None = None) -> int:
    """Return the status of one HTTP call."""
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request(method, path, body, dict(headers))
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v2/repository/index"),
        ("POST", "/v2/repository/models/emoji/unload"),
        ("GET", "/v2/systemsharedmemory/status"),
        ("GET", "/v2/models/emoji/config"),
        ("GET", "/v2/models/emoji/stats"),
        ("GET", "/v2/trace/setting"),
        ("GET", "/v2/logging"),
        ("GET", "/metrics"),
        ("GET", "/v2/models/emoji/../../repository/index"),
    ],
)
def test_the_balancer_lets_only_inference_through(balanced, method, path):
    assert status(balanced.http_url, method, path, body=b"{}" if method == "POST" else None) == 403


def test_administration_by_grpc_is_not_let_through(balanced):
    for call in (balanced.grpc.get_model_repository_index, balanced.grpc.get_log_settings):
        with pytest.raises(InferenceServerException, match="403"):
            call()
    assert balanced.grpc.is_model_ready("emoji")


def test_the_header_that_ends_a_server_is_not_let_through(balanced):
    """With `triton_grpc_error` the first error would end the stream; without it, the next request is answered on it."""
    results: queue.SimpleQueue[tuple[object, Exception | None]] = queue.SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(balanced.grpc_url) as client:
        client.start_stream(lambda result, error: results.put((result, error)), headers={"triton_grpc_error": "true"})
        client.async_stream_infer("emoji", grpc_inputs(tensors(prompt="red apple", width=7)))
        _, error = results.get(timeout=60)
        assert "width" in str(error)
        client.async_stream_infer("emoji", grpc_inputs(tensors(prompt="red apple", num_inference_steps=1)))
        result, error = results.get(timeout=60)
        assert error is None
        assert result is not None
        client.stop_stream(cancel_requests=True)


def test_a_request_that_is_too_large_is_refused_before_it_is_sent(balanced):
    path = "/v2/models/emoji_unary/generate"
    assert status(balanced.http_url, "POST", path, {"Content-Length": str(64 << 20 | 1)}) == 413
    chunked = {"Transfer-Encoding": "chunked"}
    assert status(balanced.http_url, "POST", path, chunked, b"2\r\n{}\r\n0\r\n\r\n") == 411


# ---- TLS ----


def test_pictures_through_tls(scaled, balanced, certificates):
    ca = str(certificates / "ca.pem")
    address = f"localhost:{scaled.settings['TLS_GRPC_PORT']}"
    with tritonclient.grpc.InferenceServerClient(address, ssl=True, root_certificates=ca) as client:
        by_grpc = client.infer("emoji_unary", grpc_inputs(tensors(prompt="red apple", seed=7))).as_numpy("images")
    connection = http.client.HTTPSConnection(
        f"localhost:{scaled.settings['TLS_HTTP_PORT']}", context=ssl.create_default_context(cafile=ca), timeout=60
    )
    body = json.dumps({"prompt": "red apple", "seed": 7, "output_format": "raw"})
    connection.request("POST", "/v2/models/emoji_unary/generate", body)
    answer = json.load(connection.getresponse())
    connection.close()
    assert np.array_equal(np.array(answer["images"], dtype=np.uint8).reshape(by_grpc.shape), by_grpc)


def test_tls_with_a_certificate_that_is_not_trusted_fails(scaled):
    for port in (scaled.settings["TLS_HTTP_PORT"], scaled.settings["TLS_GRPC_PORT"]):
        with socket.create_connection(("localhost", int(port)), timeout=30) as plain, pytest.raises(ssl.SSLError):
            ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_tls_before_1_2_fails(scaled, certificates):
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    context.set_ciphers("DEFAULT@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    address = ("localhost", int(scaled.settings["TLS_HTTP_PORT"]))
    with socket.create_connection(address, timeout=30) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain, server_hostname="localhost")


def test_plain_text_to_the_tls_ports_fails(scaled):
    with pytest.raises((http.client.HTTPException, OSError)):
        status(f"localhost:{scaled.settings['TLS_HTTP_PORT']}", "GET", "/v2/health/ready")
    address = f"localhost:{scaled.settings['TLS_GRPC_PORT']}"
    with (
        tritonclient.grpc.InferenceServerClient(address) as client,
        pytest.raises(InferenceServerException) as caught,
    ):
        client.is_server_live(client_timeout=30)
    assert caught.value.status() in ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED")
