"""Traces of requests, by OpenTelemetry: what each spent its time on, and with whom it shared the denoiser.

Off unless the environment names a collector (`OTEL_EXPORTER_OTLP_ENDPOINT`); while off, it imports no OpenTelemetry.
The engine thread only notes groups of steps; spans are made from the request's record when it has ended, so that they
last exactly as long as its `time_*` say. What is sampled, and how spans are sent, the standard `OTEL_*` variables say.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from . import __version__
from .engine.executor import WorkKind
from .errors import ConfigurationError
from .request import EventKind
from .timing import PHASES, RequestRecord, now

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

    from .engine.executor import Report
    from .engine.scheduler import Group

log = logging.getLogger(__name__)

MAX_STEP_GROUPS = 64
"""Spans of steps of one request; the last takes what comes after, so that a trace stays readable and bounded."""

FLUSH_S = 5.0
"""How long the end waits for a collector that does not answer."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@dataclass(slots=True)
class StepGroup:
    """Steps that a request made in a row with the same neighbours.

    Attributes:
        first, last: the steps, counted from 1.
        ended: when the last was done, in seconds of `timing.now()`; the group begins where the one before ended.
        members: ids of the requests in the forward, this one among them.
        rows: of the forward; the most, where `mixed`.
        mode: `joint` with neighbours, `alone` with none there, `solo` where its calls cannot be shared, and `step`
            where the pipeline's denoiser is no meeting point.
        solo_reason: why, with `solo`.
        mixed: whether neighbours changed within it, since there were too many groups.
    """

    first: int
    last: int
    ended: float
    members: frozenset[str]
    rows: int
    mode: str
    solo_reason: str | None = None
    mixed: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """What is equal for all steps of a group."""
        return self.members, self.rows, self.mode, self.solo_reason


class StepTrail:
    """The groups of steps of one request; written by the engine thread until the request has ended."""

    def __init__(self) -> None:
        self.groups: list[StepGroup] = []

    def add(self, step: StepGroup) -> None:
        """Append one step, to the last group if it was made with the same neighbours."""
        last = self.groups[-1] if self.groups else None
        if last is None or (last.key != step.key and len(self.groups) < MAX_STEP_GROUPS):
            self.groups.append(step)
            return
        if last.key != step.key:
            last.mixed = True
            last.rows = max(last.rows, step.rows)
            last.members |= step.members
        last.last, last.ended = step.last, step.ended


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended.

    Attributes:
        outcome: `completed`, `failed`, `cancelled` or `rejected`, as in `diffusion_requests_total`.
        reason: the kind of error, as in `diffusion_errors_total`; "" where there is none.
        error_code: Triton's code of it.
        message: its text, or "" where it must not be told: it may quote a prompt.
        attributes: further attributes of the request's span.
    """

    outcome: str
    _: KW_ONLY
    reason: str = ""
    error_code: str = ""
    message: str = ""
    attributes: Mapping[str, Any]


class RequestTrace:
    """The span of one request, and those under it when it has ended."""

    def __init__(self, tracing: Tracing, span: Span, offset_ns: int) -> None:
        self._trail = StepTrail()
        self._tracing = tracing
        self._span = span
        self._offset_ns = offset_ns

    def on_work(self, group: Group, report: Report) -> None:
        """Note the steps that came of a unit of work; called by the engine thread."""
        for event in report.events:
            if event.kind is EventKind.STEP:
                mode = "step"
                if group.kind is WorkKind.FORWARD:
                    mode = "solo" if group.solo_reason else "joint" if len(group.request_ids) > 1 else "alone"
                members = frozenset(group.request_ids)
                step = StepGroup(event.step, event.step, event.at, members, group.rows, mode, group.solo_reason)
                self._trail.add(step)

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return format(self._span.get_span_context().trace_id, "032x")

    @property
    def span_id(self) -> str:
        """16 hexadecimal digits."""
        return format(self._span.get_span_context().span_id, "016x")

    @property
    def is_sampled(self) -> bool:
        """Whether the trace is sent to the collector."""
        return self._span.is_recording()

    def end(self, ending: Ending, record: RequestRecord | None) -> None:
        """Make the spans under the request's, and end it; called once, by the thread that delivers the end.

        Args:
            record: where the time went; None for a request that was never submitted.
        """
        finished = now() if record is None or record.finished is None else record.finished
        if self._span.is_recording():
            if record is not None:
                self._phases(ending, record, finished)
            self._span.set_attributes(dict(ending.attributes))
            self._span.set_attribute("diffusion.outcome", ending.outcome)
            self._mark(self._span, ending)
        self._span.end(self._ns(finished))

    def _phases(self, ending: Ending, record: RequestRecord, finished: float) -> None:
        """Make a span for each phase that the request reached."""
        begins = (record.submitted, record.started, record.first_forward, record.last_step)
        reached = [(name, begin) for name, begin in zip(PHASES, begins, strict=True) if begin is not None]
        ends = [*(begin for _, begin in reached[1:]), finished]
        for (name, begin), end in zip(reached, ends, strict=True):
            span = self._tracing.start_span(name, self._span, self._ns(begin), {})
            if name == "execute":
                self._steps(span, begin)
            if end == finished:
                self._mark(span, ending)
            span.end(self._ns(end))

    def _steps(self, parent: Span, begin: float) -> None:
        for group in self._trail.groups:
            attributes: dict[str, Any] = {
                "diffusion.step.first": group.first,
                "diffusion.step.last": group.last,
                "diffusion.steps": group.last - group.first + 1,
                "diffusion.batch.rows": group.rows,
                "diffusion.batch.requests": len(group.members),
                "diffusion.executor.mode": group.mode,
            }
            if group.solo_reason is not None:
                attributes["diffusion.solo.reason"] = group.solo_reason
            if group.mixed:
                attributes["diffusion.batch.mixed"] = True
            span = self._tracing.start_span("steps", parent, self._ns(begin), attributes)
            span.end(self._ns(group.ended))
            begin = group.ended

    def _mark(self, span: Span, ending: Ending) -> None:
        """Say on a span that it ended with an error; a cancelled request is marked, but is no error of anybody."""
        if not ending.reason:
            return
        from opentelemetry.trace import Status, StatusCode

        span.set_attribute("error.type", ending.reason)
        span.set_attribute("diffusion.error.code", ending.error_code)
        if ending.outcome != "cancelled":
            span.set_status(Status(StatusCode.ERROR, ending.message or None))

    def _ns(self, at: float) -> int:
        """Return an instant of the monotonic clock as nanoseconds since 1970."""
        return self._offset_ns + round(at * 1e9)


class Tracing:
    """Makes the traces of a model's requests, and sends them.

    Args:
        model: the model's name.
        exporter: sends spans; called from a thread of its own, in batches.
    """

    def __init__(self, model: str, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model = model
        self._exporter = exporter
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES of the environment win over what is given here.
        resource = Resource({SERVICE_VERSION: __version__}).merge(Resource.create())
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "diffusion-backend"}))
        # Not the process's global provider: each instance of a model is a process that makes and ends its own.
        self._provider: TracerProvider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("diffusion_backend", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def from_environment(cls, model: str, environment: Mapping[str, str]) -> Tracing | None:
        """Return what traces a model, or None where no collector is configured.

        Raises:
            ConfigurationError: the environment asks for a protocol that is not spoken.
        """
        if not any(environment.get(name) for name in _ENDPOINTS):
            return None
        off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        if off or environment.get("OTEL_TRACES_EXPORTER", "otlp").strip() == "none":
            return None
        for name in _PROTOCOLS:
            protocol = environment.get(name, "").strip()
            if protocol not in ("", "http/protobuf"):
                raise ConfigurationError(
                    name,
                    f"{protocol!r} is not spoken; set http/protobuf, and the endpoint of the collector's HTTP "
                    "receiver (port 4318)",
                )
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(model, OTLPSpanExporter())

    def begin(self, carrier: Mapping[str, str], begun: float) -> RequestTrace:
        """Begin the trace of a request.

        Args:
            carrier: the W3C trace context that it continues (`traceparent`, `tracestate`); a malformed one is ignored,
                as the W3C's recommendation says, and without one a trace begins here.
            begun: when the request began, in seconds of `timing.now()`.
        """
        from opentelemetry.trace import SpanKind

        offset_ns = time.time_ns() - round(now() * 1e9)
        span = self._tracer.start_span(
            f"generate_content {self._model}",
            context=self._propagator.extract(dict(carrier)),
            kind=SpanKind.INTERNAL,
            # Names by the semantic conventions for generative AI where there are any.
            attributes={
                "gen_ai.operation.name": "generate_content",
                "gen_ai.provider.name": "diffusers",
                "gen_ai.request.model": self._model,
            },
            start_time=offset_ns + round(begun * 1e9),
        )
        return RequestTrace(self, span, offset_ns)

    def start_span(self, name: str, parent: Span, start_ns: int, attributes: dict[str, Any]) -> Span:
        """Start a span under another one."""
        from opentelemetry.trace import set_span_in_context

        context: Context = set_span_in_context(parent)
        return self._tracer.start_span(name, context=context, attributes=attributes, start_time=start_ns)

    def close(self) -> None:
        """Send what is left, for at most some seconds; called once, when the model is unloaded."""
        # On a thread of its own: the exporter may be in the middle of a call to a collector that does not answer.
        closing = threading.Thread(target=self._provider.shutdown, name="diffusion-traces", daemon=True)
        closing.start()
        closing.join(FLUSH_S)
        if closing.is_alive():
            self._exporter.shutdown()  # so that it does not try again
            log.warning("not all traces were sent within %g s", FLUSH_S)
