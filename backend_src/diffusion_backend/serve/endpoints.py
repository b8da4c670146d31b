"""Ask a running server about itself over HTTP: models, readiness, and how much work it has."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TIMEOUT_S = 5.0
_SAMPLE = re.compile(r"^(?P<name>[a-z_]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")
_MODEL = re.compile(r'\bmodel="(?P<model>[^"]*)"')

_STREAM_MODEL = re.compile(r'\bstream_model="(?P<model>[^"]*)"')


@dataclass(frozen=True)
class ModelState:
    """One model as the server lists it.

    Attributes:
        name: the model's name.
        version: its version, "" where the server lists none.
        state: "READY", "LOADING", "UNLOADING", "UNAVAILABLE", or "" for a model that was never loaded.
        reason: why it is not ready, in the server's words.
    """

    name: str
    version: str
    state: str
    reason: str

    @property
    def is_ready(self) -> bool:
        """Whether the model takes requests."""
        return self.state == "READY"


@dataclass(frozen=True)
class Work:
    """How many requests a server holds.

    Attributes:
        running: requests that an engine works on.
        waiting: requests that wait, in the server's queue or in an engine's.
        models: the models whose running requests are known: those of this package, by their own gauges, and the twins
            of those, whose requests theirs are. Of any other model Triton tells only which requests wait; a twin of a
            model on another server is one of these.
    """

    running: int
    waiting: int
    models: frozenset[str]

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits, as far as is known."""
        return self.running == 0 and self.waiting == 0

    def __str__(self) -> str:
        return f"{self.running} running, {self.waiting} waiting"


def is_live(host: str, port: int) -> bool:
    """Return whether the server answers at ``host:port``."""
    try:
        return _request("GET", host, port, "/v2/health/live")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def is_model_ready(host: str, port: int, model: str) -> bool:
    """Return whether the model takes requests."""
    try:
        return _request("GET", host, port, f"/v2/models/{model}/ready")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def list_models(host: str, port: int, headers: Mapping[str, str]) -> list[ModelState]:
    """Return what the server knows of each model in its repository, by name.

    Args:
        host, port: of the HTTP endpoint.
        headers: with the key that this endpoint may ask for.

    Raises:
        OSError, http.client.HTTPException: if the server does not answer.
    """
    status, body = _request("POST", host, port, "/v2/repository/index", headers)
    if status != 200:
        raise http.client.HTTPException(f"the server's list of models was refused with {status}: {body[:200]}")
    entries: list[dict[str, Any]] = json.loads(body)
    states = (
        ModelState(entry["name"], entry.get("version", ""), entry.get("state", ""), entry.get("reason", ""))
        for entry in entries
    )
    return sorted(states, key=lambda state: (state.name, state.version))


def read_work(host: str, port: int) -> Work | None:
    """Return how much work the server has, read from its metrics; ``None`` if they do not answer."""
    try:
        status, body = _request("GET", host, port, "/metrics")
    except (OSError, http.client.HTTPException):
        return None
    return parse_work(body) if status == 200 else None


def parse_work(metrics: str) -> Work:
    """Add up the gauges of running and waiting requests in a page of metrics."""
    totals: dict[str, float] = {}
    models = set()
    twins = {}
    for line in metrics.splitlines():
        if match := _SAMPLE.match(line):
            totals[match["name"]] = totals.get(match["name"], 0.0) + float(match["value"])
            labels = match["labels"] or ""
            if not (model := _MODEL.search(labels)):
                continue
            if match["name"] == "diffusion_requests_running":
                models.add(model["model"])
            elif match["name"] == "diffusion_unary_twin" and (stream_model := _STREAM_MODEL.search(labels)):
                twins[model["model"]] = stream_model["model"]
    models.update([twin for twin, stream_model in twins.items() if stream_model in models])
    return Work(
        running=round(totals.get("diffusion_requests_running", 0)),
        waiting=round(
            totals.get("nv_inference_pending_request_count", 0) + totals.get("diffusion_requests_waiting", 0)
        ),
        models=frozenset(models),
    )


def _request(method: str, host: str, port: int, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
    # One connection a call: the server waits for connections that are kept open when it stops.
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    try:
        connection.request(method, path, headers={"Connection": "close", **(headers or {})})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()
