"""One real server that is traced, by Triton and by us, into a collector in this process."""

from __future__ import annotations

import itertools
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diffusion_backend.serve.ports import free_ports
from diffusion_backend.serve.server import TritonServer
from tests.server.conftest import QUEUE, READY_S, Repository
from tests.support.client import Served, StreamCall, eventually
from tests.tracing.collector import Collector

QUOTING = """
from diffusers import StableDiffusionPipeline

from diffusion_backend.triton import StreamingModel as TritonPythonModel

encode_prompt = StableDiffusionPipeline.encode_prompt


def quoting(self, prompt, *args, **kwargs):
    if "POISON" in str(prompt):
        try:
            raise KeyError(prompt)
        except KeyError as error:
            raise RuntimeError(f"no idea what {prompt!r} is") from error
    return encode_prompt(self, prompt, *args, **kwargs)


StableDiffusionPipeline.encode_prompt = quoting
"""
"""A model whose text encoder quotes what it refuses: a prompt with POISON in it."""


HAND_ON = ("--http-header-forward-pattern=traceparent", "--grpc-header-forward-pattern=traceparent")
"""Options by which the server hands the header on to the models, as a parameter."""


def make_server(
    path: Path, models: dict[str, dict[str, str]], *, env: dict[str, str], extra: tuple[str, ...]
) -> TritonServer:
    """Return a server of variants of the model that ships, and of `emoji_unary`."""
    repository = Repository(path / "repository")
    for name, parameters in models.items():
        repository.add_streaming(name, parameters, QUEUE % 1024)
        (repository.path / name / "1" / "model.py").write_text(QUOTING)
    repository.add_shipped("emoji_unary")
    http_port, grpc_port, metrics_port = free_ports("127.0.0.1", 3)
    return TritonServer(
        repository.path,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        log_file=path / "log",
        env=os.environ | {"HF_HUB_OFFLINE": "1", **env},
        # One after the other: on a busy machine the server gives up stubs that take too long to come up.
        extra_args=("--model-load-thread-count=1", *extra),
    )


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="session")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traced")


@pytest.fixture(scope="session")
def triton(log_path: Path, collector: Collector) -> Iterator[TritonServer]:
    """A server with `--trace-config mode=opentelemetry`: `emoji`, one that may quote prompts, and one without a log."""
    models = {
        "emoji": {"max_num_seqs": "4"},
        "loud": {"log_prompts": "true", "step_batching": "off"},
        "quiet": {"log_requests": "false"},
    }
    settings = ("mode=opentelemetry", "rate=1", "level=TIMESTAMPS", "count=-1")
    own = (f"url={collector.url}/v1/traces", "resource=service.name=triton", "bsp_schedule_delay=200")
    extra = [f"--trace-config={setting}" for setting in (*settings, *(f"opentelemetry,{setting}" for setting in own))]
    extra += HAND_ON
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with make_server(log_path, models, env=env, extra=tuple(extra)) as server:
        server.wait_ready(len(models) * READY_S, strict=True)
        yield server
        assert server.is_running, server.describe_exit()


@pytest.fixture(scope="session")
def served(triton: TritonServer) -> Iterator[Served]:
    served = Served.of(triton)
    yield served
    served.close()


class Client:
    """Sends requests with a trace context of their own, and reads the lines of the log.

    Args:
        log: the server's log.
    """

    def __init__(self, served: Served, log: Path) -> None:
        self.served = served
        self._log = log
        self._ids = itertools.count()

    def stream(self, model: str = "emoji", *, traceparent: str = "", **values: Any) -> tuple[StreamCall, str, str]:
        """Start a call; return it, its trace's id and the span's that it names as parent."""
        trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
        header = {"traceparent": traceparent or f"00-{trace_id}-{span_id}-01"}
        return self.served.stream(model, headers=header, **values), trace_id, span_id

    def new_id(self) -> str:
        return f"request-{next(self._ids)}-{secrets.token_hex(4)}"

    def lines(self) -> list[dict[str, Any]]:
        """Return every line of the log that a request wrote; each must be JSON, and whole."""
        text = self._log.read_bytes().decode()
        return [json.loads(line) for line in text.split("\n") if line.startswith("{")]

    def line(self, request_id: str) -> dict[str, Any]:
        """Wait for the line of a request, and return it: there is one."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.lines() if line["request_id"].split("#")[0] == request_id]

        eventually(found, f"a line of {request_id}")
        (line,) = found()
        return line


@pytest.fixture(scope="session")
def client(served: Served, log_path: Path) -> Client:
    return Client(served, log_path / "log")
