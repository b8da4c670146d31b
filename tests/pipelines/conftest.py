"""Tiny pipelines, each built twice with the same weights: one bare, for the reference, and one that is served."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from diffusion_backend.engine import DiffusionEngine, EngineConfig, RequestHandle
from diffusion_backend.engine.executor import Capabilities
from diffusion_backend.pipelines.executor import PipelineExecutor
from diffusion_backend.pipelines.meeting_point import MeetingPoint
from diffusion_backend.pipelines.probe import prepare
from diffusion_backend.pipelines.reference import run_alone
from diffusion_backend.request import DiffusionRequest, DiffusionResult
from diffusion_backend.telemetry import MemorySink, Telemetry
from tests.support import tiny

DEADLINE_S = 120.0
"""For what should take a second; generous, as other work may share the machine."""


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Let the networks, which are too small for more, keep to one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Running:
    """An engine over a tiny pipeline, and where its metrics go."""

    engine: DiffusionEngine
    executor: PipelineExecutor
    sink: MemorySink

    def together(
        self, requests: Sequence[DiffusionRequest], on_event: Callable[[Any], None] | None = None
    ) -> list[RequestHandle]:
        """Submit requests such that all of them wait before the first one starts."""
        held, go = threading.Event(), threading.Event()

        def hold(_executor: object) -> None:
            held.set()
            assert go.wait(DEADLINE_S)

        holder = threading.Thread(target=self.engine.collective_rpc, args=(hold,))
        holder.start()
        assert held.wait(DEADLINE_S)
        try:
            return [self.engine.submit(request, on_event=on_event) for request in requests]
        finally:
            go.set()
            holder.join(DEADLINE_S)

    def results(self, requests: Sequence[DiffusionRequest]) -> list[DiffusionResult]:
        """Run requests together; return their results."""
        return [handle.result(DEADLINE_S) for handle in self.together(requests)]

    @property
    def rows(self) -> list[float]:
        """The rows of each forward so far; exact once the engine is stopped."""
        return self.sink.samples["diffusion_batch_rows", ()]

    def solo_calls(self) -> dict[str, float]:
        """Solo calls by reason; exact once the engine is stopped."""
        name = "diffusion_solo_calls_total"
        return {labels[0]: value for (metric, labels), value in self.sink.values.items() if metric == name}


@dataclass
class Served:
    """A pipeline with its meeting points, and a bare twin of equal weights."""

    bare: Any
    pipeline: Any
    capabilities: Capabilities
    points: list[MeetingPoint]
    output_type: str

    @classmethod
    def build(cls, build: Callable[[], Any], **options: Any) -> Served:
        pipeline = build()
        capabilities, points, output_type = prepare(pipeline, **options)
        return cls(build(), pipeline, capabilities, points, output_type)

    def alone(self, request: DiffusionRequest) -> np.ndarray:
        """The pictures that the plain loop makes."""
        images = run_alone(self.bare, request, output_type=self.output_type).images
        assert images is not None
        return images

    @contextmanager
    def running(self, **limits: int) -> Iterator[Running]:
        """An engine that is stopped at the end; whatever still runs then is a fault of the test."""
        executor = PipelineExecutor(self.pipeline, self.capabilities, output_type=self.output_type)
        sink = MemorySink()
        engine = DiffusionEngine(executor, EngineConfig(**limits), Telemetry(sink))
        engine.start()
        try:
            yield Running(engine, executor, sink)
            held = engine.collective_rpc(lambda _: list(executor._active))
            assert held == [], "the executor still holds requests, though the test has seen all of them end"
        finally:
            engine.shutdown()


def assert_alike(images: np.ndarray | None, expected: np.ndarray) -> None:
    """Equal but for the rounding of a float that differs in its last digits."""
    assert images is not None
    assert images.shape == expected.shape
    assert images.dtype == np.uint8
    worst = int(np.abs(images.astype(int) - expected.astype(int)).max())
    assert worst <= 1, f"differs from alone by {worst} of 255"


def assert_unlike(one: np.ndarray, two: np.ndarray) -> None:
    """Different pictures: else `assert_alike` would prove nothing."""
    assert np.abs(one.astype(int) - two.astype(int)).max() > 8


@pytest.fixture(scope="session")
def sd() -> Served:
    return Served.build(tiny.stable_diffusion)


@pytest.fixture(scope="session")
def sd3() -> Served:
    return Served.build(tiny.stable_diffusion_3)


@pytest.fixture(scope="session")
def flux() -> Served:
    return Served.build(tiny.flux, params={"height": 16, "width": 16, "max_sequence_length": 32})


@pytest.fixture(scope="session")
def mixing() -> Served:
    return Served.build(tiny.mixed_rows)


@pytest.fixture(scope="session")
def pag() -> Served:
    return Served.build(tiny.perturbed_attention)
