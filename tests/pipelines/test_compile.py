"""The denoiser compiled for real: the same pictures in joint forwards of any rows, and an end to the compiling."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from diffusion_backend.engine import DiffusionEngine
from diffusion_backend.pipelines.executor import PipelineExecutor
from diffusion_backend.pipelines.probe import prepare
from diffusion_backend.pipelines.reference import run_alone
from diffusion_backend.request import DiffusionRequest
from tests.pipelines.conftest import assert_alike
from tests.support import tiny

# What torch says of itself while it compiles.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


COMPILED_S = 600.0
"""For what compiles; generous, as other work may share the machine."""


def compile_without_kernels(compile_: Any, function: Any, *, mode: str, dynamic: bool) -> Any:
    """The real tracing, guards and recompilation; only the kernels, which take minutes to build, are torch's usual."""
    return compile_(function, backend="eager", dynamic=dynamic)


def test_any_number_of_rows_runs_what_was_compiled_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(compile_without_kernels, torch.compile))
    torch._dynamo.reset()
    counters.clear()
    pipeline, bare = tiny.stable_diffusion(), tiny.stable_diffusion()
    capabilities, _, output_type = prepare(pipeline, compile_mode="default")
    assert capabilities.joint == {"unet": None}
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    requests = [DiffusionRequest.make(f"a dog {seed}", seed=seed, num_inference_steps=1) for seed in range(5)]
    expected = [run_alone(bare, request, output_type=output_type).images for request in requests]
    engine = DiffusionEngine(PipelineExecutor(pipeline, capabilities, output_type=output_type))
    engine.start()
    graphs: list[int] = []
    try:
        for count in (1, 2, 5, 3, 4):
            wave = [replace(request, request_id=f"{count}-{request.request_id}") for request in requests[:count]]
            results = [handle.result(COMPILED_S) for handle in [engine.submit(request) for request in wave]]
            for result, images in zip(results, expected, strict=False):
                assert_alike(result.output.images, images)
            graphs.append(counters["stats"]["unique_graphs"])
    finally:
        engine.shutdown()
        torch._dynamo.reset()
    # One row, two and several are graphs of their own, and so is a call with another step; then no more are made.
    assert graphs[-1] == graphs[2], f"new numbers of rows were compiled anew: {graphs}"
    assert graphs[-1] <= torch._dynamo.config.recompile_limit, "torch gave up compiling"
