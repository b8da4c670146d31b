"""An OpenTelemetry collector for tests: takes OTLP over HTTP, from our SDK as protobuf and from Triton's as JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.client import DEADLINE_S

MAX_SPANS = 50_000
"""More than any test makes; whoever sends more is broken, and does not fill the memory."""

ERROR = 2
"""The status code of a span that failed."""


@dataclass(frozen=True)
class SpanData:
    """A span as it came; ids in hexadecimal digits, times in nanoseconds since 1970."""

    service: str
    scope: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, Any] = field(default_factory=dict)
    status: int = 0
    message: str = ""

    @property
    def ms(self) -> float:
        return (self.end - self.start) / 1e6


class Collector:
    """Listens on a port that the system chooses; `spans` may be read at any time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spans: list[SpanData] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                is_json = "json" in self.headers["Content-Type"]
                collector._take(from_json(body) if is_json else from_protobuf(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def _take(self, spans: list[SpanData]) -> None:
        with self._changed:
            self._spans += spans
            assert len(self._spans) <= MAX_SPANS
            self._changed.notify_all()

    @property
    def spans(self) -> list[SpanData]:
        with self._changed:
            return list(self._spans)

    def trace(self, trace_id: str) -> list[SpanData]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def wait(self, trace_id: str, done: Callable[[list[SpanData]], bool], what: str) -> list[SpanData]:
        """Wait until the spans of a trace that have come satisfy `done`; return them."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: done([span for span in self._spans if span.trace_id == trace_id]), DEADLINE_S
            )
        found = self.trace(trace_id)
        assert came, f"{what} did not come; of this trace there are {[(s.service, s.name) for s in found]}"
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def from_protobuf(body: bytes) -> list[SpanData]:
    message = ExportTraceServiceRequest.FromString(body)
    return [
        SpanData(
            _values(resource.resource.attributes).get("service.name", ""),
            scope.scope.name,
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _values(span.attributes),
            span.status.code,
            span.status.message,
        )
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _values(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


def from_json(body: bytes) -> list[SpanData]:
    """Ids are in hexadecimal digits, other than in the JSON form of protobuf."""
    return [
        SpanData(
            _json_values(resource["resource"]["attributes"])["service.name"],
            scope["scope"]["name"],
            span["name"],
            span["traceId"].lower(),
            span["spanId"].lower(),
            span.get("parentSpanId", "").lower(),
            int(span["startTimeUnixNano"]),
            int(span["endTimeUnixNano"]),
            _json_values(span.get("attributes", [])),
            int(span.get("status", {}).get("code", 0)),
        )
        for resource in json.loads(body)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def _json_values(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    return {a["key"]: next(iter(a["value"].values())) for a in attributes}
