"""What is told of each request of the streaming model when it has ended: a line of the log, and a trace."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ..engine.executor import Report
from ..engine.scheduler import Group
from ..errors import DiffusionError, InvalidArgumentError
from ..request import DiffusionRequest, Event, EventKind
from ..request_log import RequestLog, tellable
from ..timing import RequestRecord, now
from ..tracing import Ending, RequestTrace, Tracing
from .errors import code_of

_OUTCOMES = {EventKind.FINISHED: "completed", EventKind.FAILED: "failed", EventKind.CANCELLED: "cancelled"}
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class Accounts:
    """Opens an account for each request of a model.

    Args:
        log: where a request's line goes, or None for none.
        tracing: makes its trace, or None for none.
        texts: whether what may quote a prompt is told.
        fields: names of the model's inputs; only those are told of an error's field.
    """

    def __init__(
        self, log: RequestLog | None, tracing: Tracing | None, *, texts: bool, fields: tuple[str, ...]
    ) -> None:
        self.log = log
        self.tracing = tracing
        self.texts = texts
        self.fields = fields

    def open(self, request_id: str, carrier: Mapping[str, str]) -> Account:
        """Open the account of a request that has just come.

        Args:
            carrier: the W3C trace context that it came with.
        """
        trace = None if self.tracing is None else self.tracing.begin(carrier, now())
        return Account(self, request_id, carrier, trace)

    def close(self) -> None:
        """Send what is left of the traces."""
        if self.tracing is not None:
            self.tracing.close()


class Account:
    """Of one request; exactly one of `ended` and `refused` closes it."""

    def __init__(
        self, accounts: Accounts, request_id: str, carrier: Mapping[str, str], trace: RequestTrace | None
    ) -> None:
        self.request: DiffusionRequest | None = None  # once it is read
        self._accounts = accounts
        self._request_id = request_id
        self._carrier = carrier
        self._trace = trace

    @property
    def on_work(self) -> Callable[[Group, Report], None] | None:
        """What the engine is to call after each unit of work, or None where nobody wants to know."""
        return self._trace.on_work if self._trace is not None and self._trace.is_sampled else None

    def ended(self, event: Event) -> None:
        """Close it with the final event of a request that was submitted; called by the thread that delivers it."""
        assert event.record is not None
        self._close(_OUTCOMES[event.kind], event.error, event.record)

    def refused(self, error: Exception) -> None:
        """Close the account of a request that was never submitted."""
        self._close("rejected", error, None)

    def _close(self, outcome: str, error: Exception | None, record: RequestRecord | None) -> None:
        if self._trace is not None:
            message = str(error) if error is not None and self._accounts.texts else ""
            code = "" if error is None else code_of(error)
            attributes = self._attributes(record)
            ending = Ending(outcome, reason=_reason(error), error_code=code, message=message, attributes=attributes)
            self._trace.end(ending, record)
        if self._accounts.log is not None:
            self._accounts.log.write(
                request_id=self._request_id,
                outcome=outcome,
                identity={**self._trace_ids(), **self._error(error), **self._counts(record)},
                seeds=() if self.request is None else self.request.seeds,
                record={} if record is None else record.as_dict(),
                texts=self._texts(error),
            )

    def _trace_ids(self) -> dict[str, object]:
        """Return the ids by which the line is found from the trace: ours, or those that the request came with."""
        if self._trace is not None:
            return {"trace_id": self._trace.trace_id, "span_id": self._trace.span_id}
        match = _TRACEPARENT.fullmatch(self._carrier.get("traceparent", ""))
        return {"trace_id": match[1]} if match is not None else {}

    def _error(self, error: Exception | None) -> dict[str, object]:
        if error is None:
            return {}
        told: dict[str, object] = {"error_code": code_of(error), "reason": _reason(error)}
        # A field that is no input was named by the client, and might be anything.
        if isinstance(error, InvalidArgumentError) and error.field in self._accounts.fields:
            told["field"] = error.field
        return told

    def _counts(self, record: RequestRecord | None) -> dict[str, object]:
        counts: dict[str, object] = {}
        if self.request is not None:
            counts.update(num_prompts=len(self.request.prompt), num_outputs=self.request.num_outputs)
        if record is not None and record.num_steps:
            counts.update(step=record.step, num_steps=record.num_steps)
        return counts

    def _texts(self, error: Exception | None) -> dict[str, object]:
        texts: dict[str, object] = {} if error is None else {"error": str(error)}
        if self.request is not None:
            texts["prompt"] = self.request.prompt
            if self.request.negative_prompt is not None:
                texts["negative_prompt"] = self.request.negative_prompt
        return texts

    def _attributes(self, record: RequestRecord | None) -> dict[str, Any]:
        """Return the attributes of the request's span, by the conventions for generative AI where there are any."""
        attributes: dict[str, Any] = {"gen_ai.response.id": self._request_id[:128]}
        if self.request is not None:
            attributes["gen_ai.request.seed"] = self.request.seeds[0]
            attributes["gen_ai.request.choice.count"] = self.request.num_outputs
        if record is not None:
            params = {name: value for name, value in record.as_dict().items() if name.startswith("param_")}
            for name, value in tellable(params).items():
                if isinstance(value, bool | int | float | str):
                    attributes[f"diffusion.param.{name.removeprefix('param_')}"] = value
        return attributes


def _reason(error: Exception | None) -> str:
    if error is None:
        return ""
    return "cancelled" if code_of(error) == "CANCELLED" else getattr(error, "reason", DiffusionError.reason)
