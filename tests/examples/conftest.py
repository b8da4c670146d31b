"""One real server with the models that ship, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusion_backend.serve import TritonServer

ROOT = Path(__file__).parents[2]
READY_S = 300.0
"""Generous: other work may share the machine."""


@pytest.fixture(scope="session")
def server() -> Iterator[TritonServer]:
    with TritonServer(ROOT / "model_repository") as running:
        running.wait_ready(READY_S, strict=True)
        yield running
