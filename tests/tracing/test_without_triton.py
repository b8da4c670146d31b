"""Where the server itself does not trace: the context comes as request parameters, or as headers handed on as such."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.server.conftest import READY_S, SMALL
from tests.support.client import Served, grpc_inputs, tensors
from tests.tracing.collector import Collector
from tests.tracing.conftest import HAND_ON, Client, make_server


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Client]:
    path = tmp_path_factory.mktemp("plain")
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with make_server(path, {"emoji": {}}, env=env, extra=HAND_ON) as server:
        server.wait_ready(READY_S, strict=True)
        served = Served.of(server)
        yield Client(served, path / "log")
        served.close()


def context(flags: str = "01") -> tuple[str, str, str]:
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace_id}-{span_id}-{flags}", trace_id, span_id


def ours(collector: Collector, trace_id: str):
    spans = collector.wait(trace_id, lambda spans: any("generate" in s.name for s in spans), "our span")
    (span,) = [span for span in spans if "generate" in span.name]
    return span


def test_a_header_that_the_server_hands_on(plain: Client, collector: Collector):
    call, trace_id, span_id = plain.stream(**SMALL, prompt="a")
    call.result()
    assert ours(collector, trace_id).parent_id == span_id
    assert {span.service for span in collector.trace(trace_id)} == {"diffusion-backend"}


@pytest.mark.parametrize("model", ["emoji_unary", "emoji"])
def test_a_parameter_of_the_request(plain: Client, collector: Collector, model: str):
    traceparent, trace_id, span_id = context()
    if model == "emoji":
        inputs = {**SMALL, "prompt": "a", "traceparent": traceparent, "output_format": "png;base64"}
        assert list(plain.served.generate_stream(**inputs))[-1]["event"] == "finished"
    else:
        parameters = {"traceparent": traceparent}
        plain.served.grpc.infer(model, grpc_inputs(tensors(**SMALL, prompt="a")), parameters=parameters)
    assert ours(collector, trace_id).parent_id == span_id


def test_what_the_caller_did_not_sample_is_only_in_the_log(plain: Client, collector: Collector):
    request_id, after = plain.new_id(), context()
    traceparent, trace_id, _ = context("00")
    plain.stream(**SMALL, prompt="a", request_id=request_id, traceparent=traceparent)[0].result()
    plain.stream(**SMALL, prompt="a", traceparent=after[0])[0].result()
    ours(collector, after[1])
    assert collector.trace(trace_id) == []
    assert plain.line(request_id)["trace_id"] == trace_id


@pytest.mark.parametrize("traceparent", ["nonsense", "00-0-0-01"])
def test_a_malformed_context_is_no_error(plain: Client, collector: Collector, traceparent: str):
    request_id = plain.new_id()
    plain.stream(**SMALL, prompt="a", request_id=request_id, traceparent=traceparent)[0].result()
    trace_id = plain.line(request_id)["trace_id"]
    assert ours(collector, trace_id).parent_id == ""
