"""One real server for the fuzz: the model that ships, the same as image-to-image, and their twins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diffusion_backend.serve import TritonServer
from tests.support.client import Served
from tools.soak.run import serving


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The server; it must still run when all tests are done."""
    with serving(tmp_path_factory.mktemp("fuzz-log") / "log") as server:
        yield server
        assert server.is_running, server.describe_exit()


@pytest.fixture(scope="session")
def served(triton: TritonServer) -> Iterator[Served]:
    """The client of the server."""
    client = Served.of(triton)
    yield client
    client.close()
