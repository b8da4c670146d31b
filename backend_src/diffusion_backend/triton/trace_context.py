"""The W3C trace context that a request came with."""

from __future__ import annotations

import json
from typing import Any

TRACE_CONTEXT = ("traceparent", "tracestate")
"""Parameters of a request that are no inputs, in lower case: the W3C's names."""


def carrier_of(request: Any) -> dict[str, str]:
    """Return the context that the spans of a Triton request continue; empty where it came with none.

    It is that of Triton's own span, where the server traces this request (`--trace-config=mode=opentelemetry`); else
    what the client sent as parameters, or as headers that the server was told to hand on as parameters. Those win also
    if they name another trace than Triton's context: Triton 24.10 loses the headers of some streams on a busy machine,
    and begins a trace of its own then.
    """
    tritons = _read(request.trace().get_context())
    try:
        clients = _read(request.parameters())
    except UnicodeDecodeError:
        return tritons  # the request is refused for it, see `inputs.parameters_of`
    return clients if "traceparent" in clients and _trace_id(clients) != _trace_id(tritons) else tritons


def _read(text: str | None) -> dict[str, str]:
    """Return the context in a JSON object; what is no text is ignored, as the W3C recommends.

    Names are as they were written, and some HTTP clients write headers in capitals.
    """
    given: dict[str, Any] = json.loads(text or "{}")
    return {
        name.lower(): value for name, value in given.items() if name.lower() in TRACE_CONTEXT and isinstance(value, str)
    }


def _trace_id(context: dict[str, str]) -> str:
    return context.get("traceparent", "")[3:35]
