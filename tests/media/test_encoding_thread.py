"""Encoding takes longer than a step, and must not hold up the steps of others: never on the engine's thread."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest

from diffusion_backend.engine import DiffusionEngine, Report, WorkKind
from diffusion_backend.media import OutputFormat, formats
from diffusion_backend.request import DeferredOutput, DiffusionOutput, Event, EventKind
from diffusion_backend.timing import now
from tests.support.fakes import DEADLINE_S, FakeExecutor, make

FRAMES = np.random.default_rng(7).integers(0, 256, (1, 9, 32, 32, 3), dtype=np.uint8)
SOUND = np.zeros((1, 2, 8000), np.float32)
OUTPUTS = {
    "png": DiffusionOutput(images=FRAMES[:, 0]),
    "jpeg": DiffusionOutput(images=FRAMES[:, 0]),
    "webp": DiffusionOutput(images=FRAMES[:, 0]),
    "mp4": DiffusionOutput(video=FRAMES, frame_rate=8.0, audio=SOUND, sample_rate=8000),
    "wav": DiffusionOutput(audio=SOUND, sample_rate=8000),
    "flac": DiffusionOutput(audio=SOUND, sample_rate=8000),
}


class Painter(FakeExecutor):
    """Shows a preview at each step, and hands out an output that is still on its way to the host."""

    output: DiffusionOutput
    fetched: list[int]

    def execute(self, kind: WorkKind, request_ids: Any) -> list[Report]:
        reports = super().execute(kind, request_ids)
        for report in reports:
            if kind is WorkKind.FORWARD:
                preview = FRAMES[:, 0]
                report.events.append(Event(EventKind.PREVIEW, report.request_id, now(), 1, 2, preview=preview))
            if report.output is not None:
                report.output = DeferredOutput(self.get)
        return reports

    def get(self) -> DiffusionOutput:
        self.fetched.append(threading.get_ident())
        return self.output


@pytest.fixture
def responses(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The Triton layer's answers; `triton_python_backend_utils` is a stand-in, as only the server's stub has it."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", mock.MagicMock())
    yield importlib.import_module("diffusion_backend.triton.responses")
    for name in [name for name in sys.modules if name.startswith("diffusion_backend.triton")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", OUTPUTS)
def test_results_and_previews_are_encoded_elsewhere(
    name: str, responses: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, list[int]] = {}

    def noted(encoder: str, original: Any, *args: Any) -> Any:
        threads.setdefault(encoder, []).append(threading.get_ident())
        return original(*args)

    for encoder in ("encode_image", "encode_audio", "encode_video"):
        monkeypatch.setattr(formats, encoder, partial(noted, encoder, getattr(formats, encoder)))
    executor = Painter()
    executor.output, executor.fetched = OUTPUTS[name], []
    engine = DiffusionEngine(executor)
    engine.start()
    sender = mock.MagicMock()
    sender.is_cancelled.return_value = False
    stream = responses.ResponseStream(
        sender,
        output_format=OutputFormat.parse(name),
        progress=True,
        requested=frozenset(),
        abort=lambda: None,
        name_code=False,
    )
    try:
        result = engine.submit(make("a"), on_event=stream.on_event, finalize=stream.finalize).result(DEADLINE_S)
    finally:
        engine.shutdown()
    assert len(result.payload[0]) > 100
    result_encoder = {"mp4": "encode_video", "wav": "encode_audio", "flac": "encode_audio"}.get(name, "encode_image")
    assert {"encode_image", result_encoder} == set(threads), "a preview or the result was not encoded"
    assert sender.send.call_count == 2 + 2 + 1  # steps, previews, result
    assert not executor.threads & {ident for idents in threads.values() for ident in idents}
    assert not executor.threads & set(executor.fetched), "the engine's thread waited for the copy off the device"
