"""One real server with the models that ship, for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusion_backend.serve import TritonServer
from diffusion_backend.serve.ports import free_ports

ROOT = Path(__file__).parents[2]
READY_S = 300.0
"""Generous: other work may share the machine."""


@pytest.fixture(scope="session")
def server() -> Iterator[TritonServer]:
    http_port, grpc_port, metrics_port = free_ports("127.0.0.1", 3)
    env = os.environ | {"DIFFUSION_GRPC_ENDPOINT": f"127.0.0.1:{grpc_port}", "OMP_WAIT_POLICY": "PASSIVE"}
    with TritonServer(
        ROOT / "model_repository", http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port, env=env
    ) as running:
        running.wait_ready(READY_S, strict=True)
        yield running
