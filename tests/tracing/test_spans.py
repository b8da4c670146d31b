"""How spans are made from what an engine did: with our engine, a null executor, and an exporter in memory."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from diffusion_backend.engine import DiffusionEngine, EngineConfig
from diffusion_backend.errors import ConfigurationError, RequestCancelledError
from diffusion_backend.request import DiffusionRequest, Event
from diffusion_backend.timing import now
from diffusion_backend.tracing import FLUSH_S, MAX_STEP_GROUPS, Ending, StepGroup, StepTrail, Tracing
from tests.support.fakes import FakeExecutor

PARENT = {"traceparent": f"00-{1:032x}-{2:016x}-01"}
UNSAMPLED = {"traceparent": f"00-{1:032x}-{2:016x}-00"}


def step(number: int, *members: str, rows: int = 2, mode: str = "joint") -> StepGroup:
    return StepGroup(number, number, float(number), frozenset(members), rows, mode)


def test_steps_with_the_same_neighbours_are_one_group():
    trail = StepTrail()
    for number in (1, 2):
        trail.add(step(number, "a"))
    for number in (3, 4, 5):
        trail.add(step(number, *("ab" if number % 2 else "ba")))  # whose turn it is does not matter
    trail.add(step(6, "a", "b", rows=3))
    trail.add(step(7, "a", "c", rows=3))
    assert [(g.first, g.last, g.ended) for g in trail.groups] == [(1, 2, 2.0), (3, 5, 5.0), (6, 6, 6.0), (7, 7, 7.0)]
    assert not any(group.mixed for group in trail.groups)


def test_the_number_of_groups_is_bounded_and_the_last_says_that_it_is_mixed():
    trail = StepTrail()
    for number in range(1, 1001):
        trail.add(step(number, "a", str(number), rows=2 + number % 7))
    assert len(trail.groups) == MAX_STEP_GROUPS
    last = trail.groups[-1]
    assert (last.first, last.last, last.mixed, last.rows) == (MAX_STEP_GROUPS, 1000, True, 8)
    assert len(last.members) == 1 + 1000 - MAX_STEP_GROUPS + 1
    assert not any(group.mixed for group in trail.groups[:-1])


class Rig:
    """An engine whose requests are traced into memory."""

    def __init__(self, executor: FakeExecutor, **config: int) -> None:
        self.gate = executor.gate
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing("m", self.exporter)
        self.engine = DiffusionEngine(executor, EngineConfig(**config))
        self.engine.start()

    def submit(self, carrier=PARENT, **params):
        trace = self.tracing.begin(carrier, now())
        ended = threading.Event()

        def on_event(event: Event) -> None:
            if event.kind.is_final:
                outcome = {"finished": "completed"}.get(event.kind.value, event.kind.value)
                reason = "" if event.error is None else "some"
                trace.end(Ending(outcome, reason=reason, attributes={}), event.record)
                ended.set()

        request = DiffusionRequest.make("a", seed=1, **params)
        handle = self.engine.submit(request, on_event=on_event, on_work=trace.on_work)
        return handle, ended, trace

    def spans(self):
        self.tracing.close()
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def rig():
    rigs = []

    def build(**config: int) -> Rig:
        rigs.append(Rig(FakeExecutor(), **config))
        return rigs[-1]

    yield build
    for made in rigs:
        made.engine.shutdown()


def test_spans_follow_the_record(rig):
    made = rig()
    handle, ended, trace = made.submit(num_inference_steps=4)
    assert ended.wait(60)
    spans = made.spans()
    assert set(spans) == {"generate_content m", "queue", "preprocess", "execute", "steps", "postprocess"}
    root = spans["generate_content m"]
    assert (root.context.trace_id, root.parent.span_id) == (1, 2)
    assert (trace.trace_id, trace.span_id) == (f"{1:032x}", f"{root.context.span_id:016x}")
    seconds = handle.record.seconds()
    for name in ("queue", "preprocess", "execute", "postprocess"):
        span = spans[name]
        assert span.parent.span_id == root.context.span_id
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(seconds[name], abs=1e-8)
    assert spans["steps"].parent.span_id == spans["execute"].context.span_id
    assert abs(root.end_time - time.time_ns()) < 60e9, "wall-clock times"


def test_a_request_that_never_ran_has_only_a_queue(rig):
    made = rig(max_num_seqs=1)
    made.gate.close()
    _, first_ended, _ = made.submit(num_inference_steps=1)
    waiting, ended, _ = made.submit({"traceparent": f"00-{7:032x}-{2:016x}-01"}, num_inference_steps=1)
    waiting.abort(RequestCancelledError())
    assert ended.wait(60)
    made.gate.open()
    assert first_ended.wait(60)
    made.tracing.close()
    spans = [s for s in made.exporter.get_finished_spans() if s.context.trace_id == 7]
    assert [span.name for span in spans] == ["queue", "generate_content m"]
    assert spans[1].attributes["diffusion.outcome"] == "cancelled"
    assert spans[1].status.status_code is StatusCode.UNSET


def test_what_the_caller_did_not_sample_is_not_traced(rig):
    made = rig()
    _, ended, trace = made.submit(UNSAMPLED, num_inference_steps=2)
    assert ended.wait(60)
    assert not trace.is_sampled
    assert made.spans() == {}


@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{0:032x}-{2:016x}-01", f"ff-{1:032x}-{2:016x}-01"])
def test_a_malformed_context_begins_a_trace(rig, traceparent):
    made = rig()
    _, ended, _ = made.submit({"traceparent": traceparent}, num_inference_steps=1)
    assert ended.wait(60)
    root = made.spans()["generate_content m"]
    assert root.parent is None
    assert root.context.trace_id not in (0, 1)


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "True"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_it_is_off_unless_a_collector_is_named(environment):
    assert Tracing.from_environment("m", environment) is None


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_a_protocol_that_is_not_spoken_fails_the_load(name):
    with pytest.raises(ConfigurationError, match=f"{name}.*'grpc' is not spoken; set http/protobuf"):
        Tracing.from_environment("m", {**ENDPOINT, name: "grpc"})


@pytest.mark.parametrize(
    ("environment", "service"),
    [
        ({}, "diffusion-backend"),
        ({"OTEL_SERVICE_NAME": "pictures"}, "pictures"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=art,service.version=9"}, "art"),
    ],
)
def test_the_environment_names_the_service(monkeypatch, environment, service):
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    exporter = InMemorySpanExporter()
    tracing = Tracing("m", exporter)
    tracing.begin({}, now()).end(Ending("completed", attributes={}), None)
    tracing.close()
    (span,) = exporter.get_finished_spans()
    assert span.resource.attributes["service.name"] == service
    assert span.resource.attributes["service.version"]


def test_off_it_imports_nothing_of_opentelemetry():
    code = (
        "import sys\n"
        "import diffusion_backend.engine, diffusion_backend.request_log\n"
        "from diffusion_backend.tracing import Tracing\n"
        "assert Tracing.from_environment('m', {}) is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_a_collector_that_does_not_answer_holds_the_end_up_for_seconds_only(monkeypatch):
    """It takes connections and never answers; by itself the exporter would wait ten seconds for each batch."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
        tracing = Tracing.from_environment("m", {"OTEL_EXPORTER_OTLP_ENDPOINT": "given"})
        assert tracing is not None
        begun = now()
        for _ in range(3000):
            tracing.begin({}, now()).end(Ending("completed", attributes={}), None)
        assert now() - begun < 60, "requests are not held up"
        begun = now()
        tracing.close()
        assert FLUSH_S <= now() - begun < FLUSH_S + 10
    # Its socket is closed now: what still tried to send gives up.
    for thread in threading.enumerate():
        if thread.name == "diffusion-traces":
            thread.join(60)
            assert not thread.is_alive()
