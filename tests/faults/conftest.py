"""A real server with faults on purpose: requests that ask for it fail, hang, give NaN or run out of memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from diffusion_backend.faults import ALLOW_VARIABLE
from diffusion_backend.serve.ports import free_ports
from diffusion_backend.serve.server import TritonServer
from tests.server.conftest import QUEUE, READY_S, Repository
from tests.support.client import Answer, Served, eventually

SMALL = {"num_inference_steps": 6, "height": 32, "width": 32}
FAULTS: list[dict[str, Any]] = [
    {"fault": "raise", "phase": "preprocess"},
    {"fault": "raise", "phase": "step", "step": 3},
    {"fault": "raise", "phase": "decode"},
    {"fault": "nan", "phase": "step", "step": 2},
    {"fault": "nan", "phase": "decode"},
    {"fault": "out_of_memory", "phase": "preprocess"},
    {"fault": "out_of_memory", "phase": "step", "step": 4},
    {"fault": "out_of_memory", "phase": "decode"},
    {"fault": "hang", "phase": "preprocess", "seconds": 1},
    {"fault": "hang", "phase": "step", "step": 2, "seconds": 1},
    {"fault": "hang", "phase": "decode", "seconds": 1},
]
MOST_ROWS = 4
"""Rows of a forward that fit the model `narrow`."""

LOAD_FAULTS: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    # name: the fault, further parameters, and what the reason must match
    "raising": ({"fault": "raise", "phase": "load"}, {}, "injected fault: raise in load"),
    "tight": ({"fault": "out_of_memory", "phase": "load"}, {}, "injected fault: out_of_memory in load"),
    "hanging": ({"fault": "hang", "phase": "load"}, {"warmup_timeout_s": "2"}, "within warmup_timeout_s|2 s"),
}  # fmt: skip


def marker(fault: dict[str, Any]) -> str:
    """Return what the prompt of a request begins with that is to suffer a fault."""
    return f"suffer {fault['fault']} in {fault['phase']}"


def as_parameter(faults: Sequence[dict[str, Any]]) -> str:
    """Return faults as the parameter's text, for a double-quoted string of config.pbtxt."""
    return json.dumps(faults).replace('"', '\\"')


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The server; it must still run when all tests are done."""
    repository = Repository(tmp_path_factory.mktemp("faults") / "repository")
    marked = [{**fault, "prompt": marker(fault)} for fault in FAULTS]
    repository.add_streaming("faulty", {"faults": as_parameter(marked)})
    repository.add_twin("faulty_unary")
    repository.add_streaming("narrow", {"faults": as_parameter([{"fault": "out_of_memory", "rows": MOST_ROWS}])})
    repository.add_twin("narrow_unary")
    for name, (fault, parameters, _) in LOAD_FAULTS.items():
        repository.add_streaming(f"broken_{name}", {"faults": as_parameter([fault]), **parameters}, QUEUE % 8)
    repository.add_twin("broken_raising_unary")
    repository.add_twin("orphan_unary", {"stream_model": "nowhere"})
    http_port, grpc_port, metrics_port = free_ports("127.0.0.1", 3)
    server = TritonServer(
        repository.path,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        log_file=tmp_path_factory.mktemp("faults-log") / "log",
        env=os.environ | {ALLOW_VARIABLE: "1", "HF_HUB_OFFLINE": "1"},
    )
    with server:
        server.wait_ready(READY_S)
        yield server
        assert server.is_running, server.describe_exit()


@pytest.fixture(scope="session")
def served(triton: TritonServer) -> Iterator[Served]:
    """The client of the server."""
    client = Served.of(triton, triton.access)
    yield client
    client.close()


@pytest.fixture(scope="session")
def alone(served: Served) -> Callable[..., Answer]:
    """What a seeded request gives on an idle server."""
    known: dict[str, Answer] = {}

    def call(**values: Any) -> Answer:
        key = repr(sorted(values.items()))
        if key not in known:
            assert settled(served)
            known[key] = served.infer(**values)
        return known[key]

    return call


def settled(served: Served) -> bool:
    """Wait until nothing runs or waits any more in any model."""
    gauges = ("diffusion_requests_running", "diffusion_requests_waiting", "nv_inference_pending_request_count")

    def left() -> dict[str, float]:
        metrics = served.metrics()
        found = {f"{m} {g}": metrics.get(g, m) for m in ("faulty", "narrow") for g in gauges}
        return {name: value for name, value in found.items() if value}

    return bool(eventually(lambda: left() == {}, "nothing runs or waits"))


def repository_of(path: Path, faults: Sequence[dict[str, Any]], **parameters: str) -> Path:
    """Write a repository of one model `faulty` and its twin; return its path."""
    repository = Repository(path)
    repository.add_streaming("faulty", {"faults": as_parameter(faults), **parameters})
    repository.add_twin("faulty_unary")
    return repository.path
