"""One real server for all tests in this folder: the models that ship, and variants of them, in a repository of its own.

`SOAK=1` in the environment raises the numbers of rounds to those of the list of cases.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffusion_backend.serve.ports import free_ports
from diffusion_backend.serve.server import TritonServer
from tests.support.client import Answer, Served, eventually

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "emoji"
READY_S = 300.0
SOAK = os.environ.get("SOAK", "") not in ("", "0")

LONG = {"num_inference_steps": 900, "height": 96, "width": 96}
"""A call that takes at least half a minute on any machine: what it is for is over before it ends."""

SMALL = {"num_inference_steps": 1, "height": 16, "width": 16, "guidance_scale": 1.0}
"""The quickest call there is: one row of 4 by 4 latents, once."""

QUEUE = """
dynamic_batching {
  max_queue_delay_microseconds: 1000
  priority_levels: 3
  default_priority_level: 2
  default_queue_policy {
    timeout_action: REJECT
    default_timeout_microseconds: 3600000000
    allow_timeout_override: true
    max_queue_size: %d
  }
}
"""

BROKEN: dict[str, tuple[dict[str, str], str]] = {
    # a parameter with a bad value: what the reason must say
    "model": ({"model": "nowhere/at/all"}, r"'nowhere/at/all' is neither a folder that exists nor a hub id"),
    "model_empty": ({"model": " "}, r"parameter 'model': it is empty"),
    "model_missing": ({"model": ""}, r"parameter 'model': it is (missing|empty)"),
    "dtype": ({"dtype": "float23"}, r"parameter 'dtype': 'float23' is not one of .*did you mean 'float32'\?"),
    "step_batching": ({"step_batching": "of"}, r"parameter 'step_batching': 'of' is not one of .*did you mean 'off'\?"),
    "self_check_tolerance": ({"self_check_tolerance": "2"}, r"parameter 'self_check_tolerance': 2.0 is not allowed"),
    "max_num_seqs": ({"max_num_seqs": "0"}, r"parameter 'max_num_seqs': 0 is not allowed; it must be at least 1"),
    "max_batch_rows": ({"max_batch_rows": "many"}, r"parameter 'max_batch_rows': 'many' is not an integer"),
    "max_waiting": ({"max_waiting": "-1"}, r"parameter 'max_waiting': -1 is not allowed; it must be at least 1"),
    "max_steps": ({"max_steps": "0"}, r"parameter 'max_steps': 0 is not allowed; it must be at least 1"),
    "max_side": ({"max_side": "1e3"}, r"parameter 'max_side': '1e3' is not an integer"),
    "max_outputs": ({"max_outputs": "0"}, r"parameter 'max_outputs': 0 is not allowed; it must be at least 1"),
    "max_frames": ({"max_frames": "0"}, r"parameter 'max_frames': 0 is not allowed; it must be at least 1"),
    "default_num_inference_steps": (
        {"default_num_inference_steps": "0"},
        r"parameter 'default_num_inference_steps': 0 is not allowed; it must be at least 1",
    ),
    "default_guidance_scale": (
        {"default_guidance_scale": "nan"},
        r"parameter 'default_guidance_scale': nan is not allowed; it must be finite",
    ),
    "default_num_frames": (
        {"default_num_frames": "0"},
        r"parameter 'default_num_frames': 0 is not allowed; it must be at least 1",
    ),
    "default_height": ({"default_height": "0"}, r"parameter 'default_height': 0 is not allowed; it must be at least 1"),
    "default_width": ({"default_width": "wide"}, r"parameter 'default_width': 'wide' is not an integer"),
    "max_prompt_bytes": ({"max_prompt_bytes": "0"}, r"parameter 'max_prompt_bytes': 0 is not allowed"),
    "max_extra_args_bytes": ({"max_extra_args_bytes": "0"}, r"parameter 'max_extra_args_bytes': 0 is not allowed"),
    "max_picture_bytes": ({"max_picture_bytes": "32M"}, r"parameter 'max_picture_bytes': '32M' is not an integer"),
    "allow_pickle": ({"allow_pickle": "yes"}, r"parameter 'allow_pickle': 'yes' is not true or false"),
    "trust_remote_code": ({"trust_remote_code": "1"}, r"parameter 'trust_remote_code': '1' is not true or false"),
    "warmup_sizes": ({"warmup_sizes": "64by64"}, r"parameter 'warmup_sizes': '64by64' is not a size; write .*'512x512"),
    "warmup": (
        {"warmup_sizes": "32x32, 33x32"},
        r"height: 33 is not allowed; it must be a multiple of|33",
    ),
    "max_duration_s": (
        {"max_duration_s": "0"},
        r"parameter 'max_duration_s': 0.0 is not allowed; it must be more than 0",
    ),
    "pipeline_class": (
        {"pipeline_class": "StableDifusionPipeline"},
        r"parameter 'pipeline_class': diffusers has no pipeline .*did you mean 'StableDiffusionPipeline'\?",
    ),
    "loras": ({"loras": "pixel"}, r"parameter 'loras': 'pixel' is not of the form name=path"),
    "lora_root": ({"lora_root": " "}, r"parameter 'lora_root': it is empty"),
    "enable_model_cpu_offload": (
        {"enable_model_cpu_offload": "yes"},
        r"parameter 'enable_model_cpu_offload': 'yes' is not",
    ),
    "vae_tiling": ({"vae_tiling": "on"}, r"parameter 'vae_tiling': 'on' is not true or false"),
    "vae_slicing": ({"vae_slicing": "0"}, r"parameter 'vae_slicing': '0' is not true or false"),
    "attention_backend": ({"attention_backend": " "}, r"parameter 'attention_backend': it is empty"),
    "quantization": ({"quantization": " "}, r"parameter 'quantization': it is empty"),
    "compile": ({"compile": "max"}, r"parameter 'compile': 'max' is not one of default, reduce-overhead"),
    "prompt_cache_bytes": (
        {"prompt_cache_bytes": "-1"},
        r"parameter 'prompt_cache_bytes': -1 is not allowed; it must be at least 0",
    ),
    "warmup_timeout_s": ({"warmup_timeout_s": "0"}, r"parameter 'warmup_timeout_s': 0.0 is not allowed"),
    "log_requests": ({"log_requests": "json"}, r"parameter 'log_requests': 'json' is not true or false"),
    "log_prompts": ({"log_prompts": "1"}, r"parameter 'log_prompts': '1' is not true or false"),
    "deterministic": ({"deterministic": "1"}, r"parameter 'deterministic': '1' is not true or false"),
    "watchdog_timeout_s": ({"watchdog_timeout_s": "0"}, r"parameter 'watchdog_timeout_s': 0.0 is not allowed"),
    "faults": ({"faults": "raise"}, r"parameter 'faults': it is not JSON"),
    "faults_not_allowed": ({"faults": r"[{\"fault\": \"die\"}]"}, r"faults are refused here.*DIFFUSION_ALLOW_FAULTS=1"),
    "misspelt": (
        {"max_num_seq": "4"},
        r"parameter 'max_num_seq': there is no such parameter; did you mean 'max_num_seqs'\?",
    ),
}
"""For each model `broken_NAME`: its parameters besides `model`, and what the reason why it is not loaded must match."""


class Repository:
    """A repository of models to serve."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def add_shipped(self, name: str) -> None:
        """Copy a model that ships; its pipeline is found by absolute path."""
        shutil.copytree(
            ROOT / "model_repository" / name, self.path / name, ignore=shutil.ignore_patterns("__pycache__")
        )
        config = self.path / name / "config.pbtxt"
        config.write_text(config.read_text().replace('"../../models/emoji"', f'"{MODEL}"'))

    def add_streaming(self, name: str, parameters: Mapping[str, str], queue: str = QUEUE % 1024) -> None:
        """Add a streaming model of the emoji pipeline; an empty `model` leaves that parameter out."""
        merged = {"model": str(MODEL), **parameters}
        self._add(name, "StreamingModel", {k: v for k, v in merged.items() if k != "model" or v}, queue)

    def add_twin(self, name: str, parameters: Mapping[str, str] | None = None) -> None:
        """Add a unary twin."""
        self._add(name, "UnaryModel", parameters or {}, "")

    def _add(self, name: str, kind: str, parameters: Mapping[str, str], queue: str) -> None:
        version = self.path / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(f"from diffusion_backend.triton import {kind} as TritonPythonModel\n")
        entries = "".join(
            f'parameters: {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'
            for key, value in parameters.items()
        )
        (self.path / name / "config.pbtxt").write_text(f'backend: "python"\nmax_batch_size: 16\n{entries}{queue}')


def make_repository(path: Path, grpc_url: str) -> Repository:
    """Write the repository that the tests share."""
    repository = Repository(path)
    repository.add_shipped("emoji")
    repository.add_shipped("emoji_unary")
    # One slot and four places in the queue.
    repository.add_streaming("tight", {"max_num_seqs": "1", "self_check_tolerance": "0.3"}, QUEUE % 4)
    repository.add_twin("tight_unary")
    # Every limit and default at a value of its own, and no queue policy.
    repository.add_streaming(
        "limits",
        {
            "dtype": "bfloat16",
            "step_batching": "off",
            "max_num_seqs": "2",
            "max_batch_rows": "6",
            "max_waiting": "1",
            "max_steps": "950",
            "max_side": "48",
            "max_outputs": "2",
            "max_frames": "5",
            "max_duration_s": "7",
            "max_prompt_bytes": "40",
            "default_num_inference_steps": "3",
            "default_guidance_scale": "2.5",
            "default_height": "32",
            "default_width": "48",
            "warmup_sizes": "32x32, 32x48",
        },
        "dynamic_batching { }\n",
    )
    repository.add_twin("other_name", {"stream_model": "limits", "grpc_endpoint": grpc_url})
    repository.add_twin("deaf_unary", {"stream_model": "emoji", "grpc_endpoint": "127.0.0.1:1"})
    repository.add_twin("nameless")
    repository.add_twin("misspelt_unary", {"stream_modle": "emoji"})
    for name, (parameters, _) in BROKEN.items():
        repository.add_streaming(f"broken_{name}", parameters)
    return repository


@pytest.fixture(scope="session")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's log."""
    return tmp_path_factory.mktemp("server-log") / "log"


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory, log_path: Path) -> Iterator[TritonServer]:
    """The server; it must still run when all tests are done."""
    http_port, grpc_port, metrics_port = free_ports("127.0.0.1", 3)
    grpc_url = f"127.0.0.1:{grpc_port}"
    repository = make_repository(tmp_path_factory.mktemp("server") / "repository", grpc_url)
    server = TritonServer(
        repository.path,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        log_file=log_path,
        env=os.environ | {"DIFFUSION_GRPC_ENDPOINT": grpc_url, "HF_HUB_OFFLINE": "1"},
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


@pytest.fixture(autouse=True)
def _settled(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test nothing runs or waits any more, in any model: nothing was leaked."""
    yield
    if "served" in request.fixturenames:
        served: Served = request.getfixturevalue("served")
        eventually(lambda: pending(served) == {}, f"idle; there is {pending(served)}")


def pending(served: Served, *models: str) -> dict[str, float]:
    """Return what runs or waits, by model and gauge, without what is 0."""
    gauges = ("diffusion_requests_running", "diffusion_requests_waiting", "nv_inference_pending_request_count")
    metrics = served.metrics()
    found = {f"{m} {g}": metrics.get(g, m) for m in models or ("emoji", "tight", "limits") for g in gauges}
    return {name: value for name, value in found.items() if value}


@pytest.fixture(scope="session")
def alone(served: Served) -> Callable[..., Answer]:
    """What a seeded request gives on an idle server; to be asked for before there is load."""
    known: dict[str, Answer] = {}

    def call(**values: Any) -> Answer:
        assert "seed" in values, "without a seed there is nothing to compare with"
        key = repr(sorted(values.items()))
        if key not in known:
            assert pending(served) == {}, "the server is not idle"
            known[key] = served.infer(**values)
        return known[key]

    return call


@pytest.fixture
def rng() -> random.Random:
    """A generator whose seed is printed; `TEST_SEED` in the environment repeats a run."""
    seed = int(os.environ.get("TEST_SEED") or random.SystemRandom().getrandbits(32))
    print(f"TEST_SEED={seed}")
    return random.Random(seed)


def rounds(few: int, full: int) -> int:
    """Return how many rounds to do: a few, or with SOAK=1 as many as the list of cases says."""
    return full if SOAK else few


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether pictures are equal within 1 of 255."""
    return a.shape == b.shape and int(np.abs(a.astype(int) - b.astype(int)).max()) <= 1


class Blocker:
    """Holds a slot of a model until it is closed.

    Args:
        count: slots to hold.
    """

    def __init__(self, served: Served, model: str = "tight", count: int = 1, **values: Any) -> None:
        self.calls = [served.stream(model, prompt="blocker", **{**LONG, **values}) for _ in range(count)]
        for call in self.calls:
            call.wait_step()

    def close(self) -> None:
        for call in self.calls:
            call.cancel()

    def __enter__(self) -> Blocker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
