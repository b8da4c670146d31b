"""One real server of pipelines of sound, video, video with sound and pictures in, for all tests of this folder."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from diffusion_backend.pipelines.adapters import Adapters
from diffusion_backend.pipelines.loader import load_pipeline
from diffusion_backend.pipelines.reference import run_alone
from diffusion_backend.request import PICTURES, DiffusionOutput, DiffusionRequest
from diffusion_backend.serve.ports import free_ports
from diffusion_backend.serve.server import TritonServer
from tests.support.client import Served, eventually
from tests.support.media_models import save_adapter, save_all

ROOT = Path(__file__).parents[2]
EMOJI = ROOT / "models" / "emoji"
READY_S = 600.0
"""Generous: nine models are loaded, and other work may share the machine."""

TEXT = "emoji"
"""The text-to-image neighbour of the models under test."""

REDRAW = {"pipeline_class": "StableDiffusionImg2ImgPipeline", "warmup_sizes": "64x64", "default_guidance_scale": "3"}
SMALL = {"warmup_sizes": "32x32", "default_height": "32", "default_width": "32"}
PARAMETERS: dict[str, Mapping[str, str]] = {
    "sound": {"max_duration_s": "3"},
    "clip": {**SMALL, "max_frames": "40"},
    "talkie": {**SMALL, "max_duration_s": "4"},
    "animate": SMALL,
    "inpaint": {**SMALL, "max_side": "256"},
    "control": SMALL,
    "redraw": {**REDRAW, "max_side": "256"},
    TEXT: {"warmup_sizes": "64x64"},
    "styled": {"warmup_sizes": "64x64", "step_batching": "require"},
}
"""The parameters of each model, besides `model`."""


def add_model(repository: Path, name: str, kind: str, parameters: Mapping[str, str]) -> None:
    """Write a model's folder with as little as `docs/configuration.md` asks for."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(f"from diffusion_backend.triton import {kind} as TritonPythonModel\n")
    entries = "".join(
        f'parameters: {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n' for key, value in parameters.items()
    )
    (repository / name / "config.pbtxt").write_text(f'backend: "python"\n{entries}')


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Let the networks, which are too small for more, keep to one core; the server has the other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each model's weights: all but the emoji's are tiny and random."""
    return {**save_all(tmp_path_factory.mktemp("weights")), "redraw": EMOJI, "styled": EMOJI, TEXT: EMOJI}


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of the model `styled`: two LoRA adapters of random weights."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(EMOJI, folder / f"{name}.safetensors", seed) for seed, name in enumerate(("ink", "chalk"))
    }


@pytest.fixture(scope="session")
def triton(
    tmp_path_factory: pytest.TempPathFactory, weights: Mapping[str, Path], adapters: Mapping[str, Path]
) -> Iterator[TritonServer]:
    """The server; each model has its unary twin."""
    repository = tmp_path_factory.mktemp("media") / "repository"
    loras = {"styled": {"loras": ", ".join(f"{name}={path}" for name, path in adapters.items())}}
    for name, parameters in PARAMETERS.items():
        own = {"model": str(weights[name]), **parameters, **loras.get(name, {})}
        add_model(repository, name, "StreamingModel", own)
        add_model(repository, f"{name}_unary", "UnaryModel", {})
    http_port, grpc_port, metrics_port = free_ports("127.0.0.1", 3)
    server = TritonServer(
        repository,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        log_file=tmp_path_factory.mktemp("media-log") / "log",
        env=os.environ
        | {"DIFFUSION_GRPC_ENDPOINT": f"127.0.0.1:{grpc_port}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    with server:
        server.wait_ready(READY_S, strict=True)
        yield server
        assert server.is_running, server.describe_exit()
    shutil.rmtree(repository)


@pytest.fixture(scope="session")
def served(triton: TritonServer) -> Iterator[Served]:
    """The client of the server."""
    client = Served.of(triton)
    yield client
    client.close()


@pytest.fixture(autouse=True)
def _settled(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test nothing runs or waits any more, in any model: nothing was leaked."""
    yield
    if "served" in request.fixturenames:
        served: Served = request.getfixturevalue("served")
        eventually(lambda: pending(served) == {}, f"idle; there is {pending(served)}")


def pending(served: Served) -> dict[str, float]:
    """Return what runs or waits, by model and gauge, without what is 0."""
    gauges = ("diffusion_requests_running", "diffusion_requests_waiting", "nv_inference_pending_request_count")
    metrics = served.metrics()
    found = {f"{m} {g}": metrics.get(g, m) for m in PARAMETERS for g in gauges}
    return {name: value for name, value in found.items() if value}


Alone = Callable[..., DiffusionOutput]


@pytest.fixture(scope="session")
def alone(weights: Mapping[str, Path], adapters: Mapping[str, Path]) -> Alone:
    """The bare pipeline in this process, with the weights that are served: `alone(model, prompt, seed=…, …)`.

    The arguments are those of `DiffusionRequest.make`; a picture may be given by itself.
    """
    pipelines: dict[str, Any] = {}
    styles: dict[str, Adapters] = {}
    known: dict[str, DiffusionOutput] = {}

    def run(model: str, prompt: str | tuple[str, ...] = "a red apple", **values: Any) -> DiffusionOutput:
        for name in PICTURES:
            if name in values and not isinstance(values[name], tuple):
                values[name] = (values[name],)
        pixels = {name: [p.tobytes() for p in value] for name, value in values.items() if name in PICTURES}
        key = repr((model, prompt, sorted({**values, **pixels}.items())))
        if key in known:
            return known[key]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what the pipelines are made of
            if model not in pipelines:
                name = REDRAW["pipeline_class"] if model == "redraw" else None
                pipelines[model] = load_pipeline(str(weights[model]), pipeline_class=name)
                if model == "styled":
                    styles[model] = Adapters(pipelines[model], {name: str(path) for name, path in adapters.items()})
                    styles[model].load_registered()
            request = DiffusionRequest.make(prompt, **values)
            known[key] = run_alone(pipelines[model], request, adapters=styles.get(model))
        return known[key]

    return run


@pytest.fixture
def rng() -> random.Random:
    """A generator whose seed is printed; `TEST_SEED` in the environment repeats a run."""
    seed = int(os.environ.get("TEST_SEED") or random.SystemRandom().getrandbits(32))
    print(f"TEST_SEED={seed}")
    return random.Random(seed)


def difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return the largest difference of two arrays of one shape."""
    assert a.shape == b.shape
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())


def assert_same(found: NDArray[Any], expected: NDArray[Any] | None) -> None:
    """Pictures and videos are equal within 1 of 255, sounds within 1e-4."""
    assert expected is not None
    assert found.dtype == expected.dtype
    limit = 1 if found.dtype == np.uint8 else 1e-4
    assert difference(found, expected) <= limit


def assert_differ(a: NDArray[Any], b: NDArray[Any]) -> None:
    """Arrays of one shape differ by far more than `assert_same` allows: else that would prove nothing."""
    assert difference(a, b) > (8 if a.dtype == np.uint8 else 0.01)
