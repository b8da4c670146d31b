"""A request's trace, from the client's span through Triton's to ours, through the real server and a real collector."""

from __future__ import annotations

import json
import secrets
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from tests.server.conftest import LONG, SMALL
from tests.server.test_replies import POISON
from tests.support.client import DEADLINE_S, grpc_inputs, tensors
from tests.tracing.collector import ERROR, Collector, SpanData
from tests.tracing.conftest import Client

PHASES = ("queue", "preprocess", "execute", "postprocess")
OURS, TRITONS = "diffusion-backend", "triton"
CLOCK_NS = 1_000
"""Rounding of the times: they are told in milliseconds with more digits than a microsecond has."""


def request_span(spans: list[SpanData]) -> SpanData:
    (span,) = [span for span in spans if span.name.startswith("generate_content ")]
    return span


def has_ours(spans: list[SpanData]) -> bool:
    """Whether our request's span has come; those under it come with it."""
    return any(span.name.startswith("generate_content ") for span in spans)


def under(spans: list[SpanData], parent: SpanData) -> list[SpanData]:
    """Return the spans under one, in the order of their beginnings."""
    return sorted((span for span in spans if span.parent_id == parent.span_id), key=lambda s: (s.start, s.end))


def ancestors(spans: list[SpanData], span: SpanData) -> list[SpanData]:
    """Return the spans above one, the nearest first, as far as they came."""
    by_id = {span.span_id: span for span in spans}
    found = []
    while span.parent_id in by_id:
        span = by_id[span.parent_id]
        found.append(span)
    return found


TRIES = 10
"""Triton loses the header of some gRPC streams; what is to be shown is the tree of one where it did not."""


def find_tree(
    collector: Collector, send: Callable[[], tuple[str, str, Any]], *above: str
) -> tuple[list[SpanData], Any]:
    """Send requests until Triton traced one in its client's trace, as it should.

    Args:
        send: sends one and waits for its end; returns the ids of its trace and of the client's span, and the answer.
        above: names of the spans that are then between ours and the client's, from ours upwards.

    Returns:
        The whole trace, and the answer.
    """
    names: list[str] = []
    for _ in range(TRIES):
        trace_id, client_span, answer = send()

        def has_parent(spans: list[SpanData], top: str = client_span) -> bool:
            known = {top, *(span.span_id for span in spans)}
            return has_ours(spans) and request_span(spans).parent_id in known

        def is_whole(spans: list[SpanData], top: str = client_span) -> bool:
            return ancestors(spans, request_span(spans))[-1].parent_id == top

        spans = collector.wait(trace_id, has_parent, "our span with the one above")
        if request_span(spans).parent_id != client_span:
            spans = collector.wait(trace_id, is_whole, "the spans up to the client's")
        names = [span.name for span in ancestors(spans, request_span(spans))]
        if names == list(above):
            return spans, answer
    pytest.fail(f"Triton's spans are not as they should be, {TRIES} times; last there were {names}")


def test_the_spans_are_one_tree_and_last_as_long_as_the_request_says(client: Client, collector):
    def send() -> tuple[str, str, Any]:
        call, trace_id, client_span = client.stream(prompt="red apple", num_inference_steps=7, seed=5)
        return trace_id, client_span, call.result().metrics

    spans, told = find_tree(collector, send, "emoji", "InferRequest")
    request = request_span(spans)
    assert (request.service, request.scope, request.status) == (OURS, "diffusion_backend", 0)

    above = ancestors(spans, request)
    assert {span.service for span in above} == {TRITONS}
    assert above[0].start <= request.start, "ours begins while Triton's is open"

    phases = under(spans, request)
    assert [span.name for span in phases] == list(PHASES)
    for span in phases:
        assert span.end - span.start == pytest.approx(told[f"time_{span.name}_ms"] * 1e6, abs=CLOCK_NS)
    assert phases[-1].end - phases[0].start == pytest.approx(told["time_total_ms"] * 1e6, abs=CLOCK_NS)
    assert [span.start for span in phases[1:]] == [span.end for span in phases[:-1]]
    assert request.start <= phases[0].start, "before it is queued, its inputs are read"
    assert request.end == phases[-1].end

    (steps,) = under(spans, phases[2])
    assert (steps.name, steps.start, steps.end) == ("steps", phases[2].start, phases[2].end)
    assert steps.attributes == {
        "diffusion.step.first": 1,
        "diffusion.step.last": 7,
        "diffusion.steps": 7,
        "diffusion.batch.rows": 2,
        "diffusion.batch.requests": 1,
        "diffusion.executor.mode": "alone",
    }
    assert sorted(span.name for span in spans if span.service == OURS) == sorted([request.name, *PHASES, "steps"])


def test_the_attributes_of_a_request(client: Client, collector):
    request_id = client.new_id()
    values = {"prompt": ["red apple", "pizza"], "num_inference_steps": 2, "seed": 2**63 - 2, "guidance_scale": 3.5}
    call, trace_id, _ = client.stream(request_id=request_id, **values, output_format="png")
    call.result()
    attributes = request_span(collector.wait(trace_id, has_ours, "the trace")).attributes
    assert attributes.pop("gen_ai.response.id").startswith(f"{request_id}#")
    assert attributes == {
        "gen_ai.operation.name": "generate_content",
        "gen_ai.provider.name": "diffusers",
        "gen_ai.request.model": "emoji",
        "gen_ai.request.seed": 2**63 - 2,
        "gen_ai.request.choice.count": 2,
        "diffusion.outcome": "completed",
        "diffusion.param.num_inference_steps": 2,
        "diffusion.param.guidance_scale": 3.5,
        "diffusion.param.height": 64,
        "diffusion.param.width": 64,
        "diffusion.param.num_outputs_per_prompt": 1,
        "diffusion.param.scheduler": "DDIMScheduler",
    }


def test_a_group_of_steps_is_what_was_made_with_the_same_neighbours(client: Client, collector):
    long, long_id, _ = client.stream(**LONG, prompt="a")
    long.wait_step(3)
    short, short_id, _ = client.stream(**{**LONG, "num_inference_steps": 5}, prompt="b")
    short.result()
    long.wait_step(long.events("step")[-1].step + 3)
    long.cancel()

    spans = collector.wait(short_id, has_ours, "the short one's trace")
    (execute,) = [span for span in spans if span.name == "execute"]
    (together,) = under(spans, execute)
    assert together.attributes["diffusion.executor.mode"] == "joint"
    assert together.attributes["diffusion.batch.requests"] == 2
    assert together.attributes["diffusion.batch.rows"] == 4
    assert together.attributes["diffusion.steps"] == 5

    spans = collector.wait(long_id, has_ours, "the long one's trace")
    (execute,) = [span for span in spans if span.name == "execute"]
    groups = under(spans, execute)
    assert [group.attributes["diffusion.executor.mode"] for group in groups] == ["alone", "joint", "alone"]
    assert [group.attributes["diffusion.batch.rows"] for group in groups] == [2, 4, 2]
    assert groups[1].attributes["diffusion.steps"] == 5
    assert groups[0].start == execute.start
    for before, after in pairwise(groups):
        assert after.start == before.end
        assert after.attributes["diffusion.step.first"] == before.attributes["diffusion.step.last"] + 1


def test_what_cannot_be_batched_says_why(client: Client, collector):
    call, trace_id, _ = client.stream("loud", prompt="a", num_inference_steps=2)
    call.result()
    (steps,) = [span for span in collector.wait(trace_id, has_ours, "the trace") if span.name == "steps"]
    assert steps.attributes["diffusion.executor.mode"] == "solo"
    assert steps.attributes["diffusion.solo.reason"] == "disabled"


@pytest.mark.parametrize("path", ["infer", "generate"])
def test_the_trace_goes_through_the_twin(client: Client, collector, path: str):
    """Over HTTP, with the header in capitals, as some clients write it."""
    inputs = [{"name": "prompt", "datatype": "BYTES", "shape": [1, 1], "data": ["red apple"]}]
    body = {"inputs": inputs} if path == "infer" else {"prompt": "red apple"}
    url = f"http://{client.served.http_url}/v2/models/emoji_unary/{path}"

    def send() -> tuple[str, str, Any]:
        trace_id, client_span = secrets.token_hex(16), secrets.token_hex(8)
        headers = {"Traceparent": f"00-{trace_id}-{client_span}-01", "Content-Type": "application/json"}
        message = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(message, timeout=DEADLINE_S) as response:
            return trace_id, client_span, response.status

    spans, status = find_tree(collector, send, "emoji", "InferRequest", "emoji_unary", "InferRequest")
    assert status == 200
    request = request_span(spans)
    assert request.attributes["gen_ai.request.model"] == "emoji"
    assert {span.service for span in ancestors(spans, request)} == {TRITONS}


def test_a_failure_is_an_error_of_the_request_and_of_its_last_phase(client: Client, collector):
    call, trace_id, _ = client.stream(prompt="a secret", num_inference_steps=3, extra_args=POISON)
    with pytest.raises(InferenceServerException, match="the pipeline failed"):
        call.result()
    spans = collector.wait(trace_id, has_ours, "the trace")
    request = request_span(spans)
    phases = under(spans, request)
    assert [span.name for span in phases] == list(PHASES[: len(phases)])
    assert "postprocess" not in {span.name for span in phases}
    for span in (request, phases[-1]):
        assert (span.status, span.attributes["error.type"]) == (ERROR, "pipeline")
        assert span.attributes["diffusion.error.code"] == "INTERNAL"
        assert span.message == "", "the text of an error may quote a prompt"
    assert all(span.status == 0 for span in phases[:-1])
    assert request.attributes["diffusion.outcome"] == "failed"
    assert "a secret" not in repr(spans)


def test_the_text_of_an_error_is_there_where_prompts_are_asked_for(client: Client, collector):
    call, trace_id, _ = client.stream("loud", prompt="a POISON")
    with pytest.raises(InferenceServerException):
        call.result()
    assert "no idea what" in request_span(collector.wait(trace_id, has_ours, "the trace")).message


def test_a_refused_request_has_one_span(client: Client, collector):
    call, trace_id, _ = client.stream(prompt="a", num_inference_steps=0)
    with pytest.raises(InferenceServerException, match="num_inference_steps"):
        call.result()
    spans = collector.wait(trace_id, has_ours, "the trace")
    request = request_span(spans)
    assert under(spans, request) == []
    assert request.status == ERROR
    assert request.attributes["diffusion.outcome"] == "rejected"
    assert request.attributes["error.type"] == "argument"
    assert request.attributes["diffusion.error.code"] == "INVALID_ARG"


def test_a_cancelled_request_is_marked_and_no_error(client: Client, collector):
    call, trace_id, _ = client.stream(**LONG, prompt="a")
    call.wait_step(2)
    call.cancel()
    spans = collector.wait(trace_id, has_ours, "the trace")
    request = request_span(spans)
    assert request.status == 0
    assert request.attributes["diffusion.outcome"] == "cancelled"
    assert request.attributes["error.type"] == "cancelled"
    phases = under(spans, request)
    assert [span.name for span in phases] == ["queue", "preprocess", "execute"]
    assert phases[-1].end == request.end
    assert phases[-1].attributes["diffusion.error.code"] == "CANCELLED"


def test_a_deadline_is_an_error(client: Client, collector):
    call, trace_id, _ = client.stream(**LONG, prompt="a", timeout_s=1.5)
    with pytest.raises(InferenceServerException, match="deadline"):
        call.result()
    request = request_span(collector.wait(trace_id, has_ours, "the trace"))
    assert (request.status, request.attributes["error.type"]) == (ERROR, "deadline")


def test_a_parameter_wins_over_another_trace_of_tritons(client: Client, collector):
    """Without a header, the server begins a trace of its own; the client said as a parameter which it wants."""
    trace_id = secrets.token_hex(16)
    parameters = {"traceparent": f"00-{trace_id}-00000000000000bb-01"}
    client.served.grpc.infer("emoji_unary", grpc_inputs(tensors(**SMALL, prompt="a")), parameters=parameters)
    request = request_span(collector.wait(trace_id, has_ours, "our span"))
    assert request.attributes["gen_ai.request.model"] == "emoji"


def test_traces_do_not_mix_under_load(client: Client, collector):
    """Twenty at once over four slots: each in its client's trace, though Triton loses some of the headers."""

    def one(k: int) -> tuple[str, int, dict]:
        call, trace_id, _ = client.stream(prompt="a", num_inference_steps=2 + k % 5, seed=k)
        return trace_id, k, call.result().metrics

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(one, range(20)))
    for trace_id, k, told in answers:
        spans = collector.wait(trace_id, has_ours, "our span")
        request = request_span(spans)
        assert request.attributes["gen_ai.request.seed"] == k
        phases = [span for span in under(spans, request) if span.name in PHASES]
        assert sum(span.end - span.start for span in phases) == pytest.approx(told["time_total_ms"] * 1e6, abs=CLOCK_NS)
        groups = [span for span in spans if span.name == "steps"]
        assert sum(group.attributes["diffusion.steps"] for group in groups) == 2 + k % 5
