"""Servers to attack: a light one of a model without weights, and one that draws; both as the launcher starts them."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from diffusion_backend.serve import TritonServer
from tests.support.client import Served, eventually

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "emoji"
READY_S = 600.0
"""Generous, as other work may share the machine."""

TOKEN = "hf_ThisTokenMustNotBeSeenAnywhere"
"""A secret in the server's environment."""

LIGHT = """
import triton_python_backend_utils as pb_utils
from diffusion_backend.triton import signature

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        return signature.complete(config, decoupled=True)

    def execute(self, requests):
        for request in requests:
            prompt = pb_utils.get_input_tensor_by_name(request, "prompt").as_numpy().reshape(-1)
            pb_utils.Logger.log_warn(f"request {request.request_id()}")
            response = pb_utils.InferenceResponse([pb_utils.Tensor("encoded", prompt)])
            request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
"""A streaming model that answers with the prompt, and logs the id of each request."""


def add_model(repository: Path, name: str, source: str, parameters: Mapping[str, str] | None = None) -> None:
    """Write a model's folder; `source` is its code or, in one word, the class of this package that it is."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    if source.isidentifier():
        source = f"from diffusion_backend.triton import {source} as TritonPythonModel\n"
    (version / "model.py").write_text(source)
    entries = "".join(
        f'parameters: {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'
        for key, value in (parameters or {}).items()
    )
    (repository / name / "config.pbtxt").write_text(f'backend: "python"\n{entries}')


@pytest.fixture(scope="session")
def light_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of the light model and its unary twin."""
    repository = tmp_path_factory.mktemp("light") / "repository"
    add_model(repository, "light", LIGHT)
    add_model(repository, "light_unary", "UnaryModel")
    return repository


@pytest.fixture(scope="session")
def light_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The light server's log, which is as verbose as can be."""
    return tmp_path_factory.mktemp("light-log") / "log"


@pytest.fixture(scope="session")
def light(light_repository: Path, light_log: Path) -> Iterator[TritonServer]:
    """The light server, with the launcher's own defaults."""
    with TritonServer(light_repository, log_file=light_log, log_verbose=1) as server:
        server.wait_ready(READY_S, strict=True)
        yield server
        assert server.is_running, server.describe_exit()


DRAWING: dict[str, tuple[str, dict[str, str]]] = {
    "emoji": ("StreamingModel", {"model": str(MODEL), "max_extra_args_bytes": "2000"}),
    "emoji_unary": ("UnaryModel", {}),
    "redraw": (
        "StreamingModel",
        {
            "model": str(MODEL),
            "pipeline_class": "StableDiffusionImg2ImgPipeline",
            "max_side": "256",
            "max_picture_bytes": "300000",
            "lora_root": "loras",
        },
    ),
    "redraw_unary": ("UnaryModel", {}),
    "outside": ("StreamingModel", {"model": "../outside"}),
    "from_hub": ("StreamingModel", {"model": "somebody/something"}),
}
"""For each model its class and its parameters; the last two must not load."""


@pytest.fixture(scope="session")
def drawing_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drawing server's log, which is as verbose as can be."""
    return tmp_path_factory.mktemp("drawing-log") / "log"


@pytest.fixture(scope="session")
def drawing(tmp_path_factory: pytest.TempPathFactory, drawing_log: Path) -> Iterator[TritonServer]:
    """A server that draws, whose models may come from its repository and from the folder of the emoji's model only."""
    folder = tmp_path_factory.mktemp("drawing")
    repository = folder / "repository"
    for name, (source, parameters) in DRAWING.items():
        add_model(repository, name, source, parameters)
    (repository / "redraw" / "loras").mkdir()
    (repository / "redraw" / "loras" / "link.safetensors").symlink_to("/etc/hostname")
    (repository / "outside").joinpath("weights").symlink_to(MODEL)
    (folder / "outside").mkdir()
    (folder / "outside" / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    (repository / "outside" / "config.pbtxt").write_text(
        'backend: "python"\nparameters: { key: "model" value: { string_value: "../../outside" } }\n'
    )
    env = os.environ | {
        "DIFFUSION_MODEL_ROOTS": f"{repository}:{MODEL}",
        "HF_HUB_OFFLINE": "1",
        "HF_TOKEN": TOKEN,
        "ADMIN_KEY": "this-one-is-the-launchers-and-not-for-models",
    }
    with TritonServer(repository, log_file=drawing_log, log_verbose=1, env=env) as server:
        server.wait_ready(READY_S)
        yield server
        assert server.is_running, server.describe_exit()


@pytest.fixture(scope="session")
def served(drawing: TritonServer) -> Iterator[Served]:
    """The client of the drawing server."""
    client = Served(drawing.address_http, drawing.url_grpc, drawing.url_metrics.split("/")[2])
    yield client
    client.close()


@pytest.fixture
def settled(served: Served) -> Iterator[None]:
    """After the test nothing runs or waits any more: no attack left a request behind."""
    yield
    gauges = ("diffusion_requests_running", "diffusion_requests_waiting", "nv_inference_pending_request_count")

    def pending() -> dict[str, float]:
        metrics = served.metrics()
        found = {f"{model} {gauge}": metrics.get(gauge, model) for model in ("emoji", "redraw") for gauge in gauges}
        return {name: value for name, value in found.items() if value}

    eventually(lambda: pending() == {}, "idle")


def ask(
    address: str, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Send one HTTP request; return the status and the text of the answer."""
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, {"Connection": "close", **(headers or {})})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()
