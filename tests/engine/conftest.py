"""Engines over the null executor; each is stopped when its test ends, and every thread of it is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from diffusion_backend.engine import DiffusionEngine, EngineConfig, Scheduler
from diffusion_backend.telemetry import MemorySink, Telemetry
from tests.support.fakes import DEADLINE_S, FakeExecutor


class Rig(NamedTuple):
    """An engine, what it drives, and where its metrics go."""

    engine: DiffusionEngine
    executor: FakeExecutor
    sink: MemorySink

    def stop(self, drain_s: float = 0.0) -> None:
        """Let what is held go, and stop the engine within the deadline."""
        self.executor.gate.open()
        within_deadline(lambda: self.engine.shutdown(drain_s=drain_s))


def within_deadline(function: Callable[[], Any]) -> Any:
    """Run a function that might block for ever on a thread of its own; return what it returned."""
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(function()), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), f"it still blocks after {DEADLINE_S} s"
    assert outcome, "it raised, see the thread's traceback"
    return outcome[0]


def engine_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("diffusion-")]


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    """A function that makes a started engine with the given limits."""
    rigs: list[Rig] = []

    def build(
        *,
        executor: FakeExecutor | None = None,
        sink: Any = None,
        scheduler: type[Scheduler] = Scheduler,
        **limits: int,
    ) -> Rig:
        executor, sink = executor or FakeExecutor(), sink or MemorySink()
        config = EngineConfig(**limits)
        engine = DiffusionEngine(executor, config, Telemetry(sink), scheduler=scheduler)
        made = Rig(engine, executor, sink)
        made.engine.start()
        rigs.append(made)
        return made

    yield build
    for made in rigs:
        made.stop()
        assert not made.executor.overlapped, "two executor calls at once"
        assert len(made.executor.threads) <= 1, "the executor was called by several threads"
    assert engine_threads() == [], "an engine's threads outlive its shutdown"
