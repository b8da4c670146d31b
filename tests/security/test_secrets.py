"""What the server must not tell: secrets of its environment, its files, its code; and nobody forges its log."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from diffusion_backend.serve import TritonServer
from tests.security.conftest import MODEL, ROOT, TOKEN, ask
from tests.support.client import Served, eventually, grpc_inputs, tensors

PATH = re.compile(rf"{re.escape(str(ROOT))}|/(usr|home|tmp|root|opt|var|etc|proc)/")
FORGED = 'x\nE1130 12:00:00.000001 7 server.cc:1] "forged"\r\x1b[2J'


@pytest.fixture(scope="module")
def told(served: Served, drawing: TritonServer) -> str:
    """All that the server says of itself, with and without the key."""
    paths = [("GET", "/v2"), ("GET", "/v2/models/emoji"), ("GET", "/v2/models/emoji/config"), ("GET", "/v2/logging")]
    paths += [("GET", "/v2/models/stats"), ("GET", "/v2/trace/setting"), ("POST", "/v2/repository/index")]
    answers = [
        ask(drawing.address_http, method, path, None if method == "GET" else {}, headers)[1]
        for method, path in paths
        for headers in ({}, drawing.access.http_headers)
    ]
    metrics = ask(drawing.url_metrics.split("/")[2], "GET", "/metrics")[1]
    assert "diffusion_requests" in metrics
    return "\n".join([*answers, metrics])


def test_no_secret_is_told(told: str, drawing: TritonServer) -> None:
    """The token of the hub and the key, in metadata, configuration, statistics, settings, reasons and metrics."""
    assert TOKEN not in told
    assert drawing.access.key not in told
    assert '"emoji"' in told


def test_no_secret_is_logged(served: Served, drawing: TritonServer, drawing_log: Path) -> None:
    """With the most verbose log, after a request, an error, and a load that failed on the hub."""
    served.infer(prompt="red apple", num_inference_steps=1, height=16, width=16)
    with pytest.raises(InferenceServerException):
        served.infer(prompt="red apple", height=1)
    log = drawing_log.read_text()
    assert "from_hub" in log
    assert TOKEN not in log
    assert drawing.access.key not in log


def test_prompts_are_not_logged(served: Served, drawing_log: Path) -> None:
    prompt = "a very private prompt that nobody else may read " * 8  # more than the text encoder takes
    sent = {"prompt": prompt, "negative_prompt": prompt, "num_inference_steps": 1, "height": 16, "width": 16}
    served.infer(**sent, request_id="the private one")
    served.infer(**{**sent, "prompt": "a"}, request_id="the one after it")
    eventually(lambda: "the one after it" in drawing_log.read_text(), "the first request's lines are in the log")
    assert "very private prompt" not in drawing_log.read_text()


def test_libraries_write_no_notices_of_themselves(drawing: TritonServer, drawing_log: Path) -> None:
    """What `transformers` says of missing packages, once a process, would bury what the launcher says."""
    log = drawing_log.read_text()
    assert "calls are batched" in log  # so the libraries are imported, and what models write is in it
    assert "[transformers]" not in log


def test_the_launchers_key_is_not_handed_to_models(drawing: TritonServer) -> None:
    """`ADMIN_KEY` of the launcher's environment ends at the launcher; the token of the hub goes on, for downloads."""
    environment = psutil.Process(drawing.stub_pids()[0]).environ()
    assert "ADMIN_KEY" not in environment
    assert environment["HF_TOKEN"] == TOKEN


BAD = [
    {"prompt": b"\xff"},
    {"prompt": "a", "extra_args": {"sigmas": [0.5]}},
    {"prompt": "a", "extra_args": {"eta": "x"}},
    {"prompt": "a", "extra_args": {"clip_skip": -(10**9)}},
    {"prompt": "a", "extra_args": {"cross_attention_kwargs": [1]}},
    {"prompt": "a", "extra_args": {"guidance_rescale": [1]}},
    {"prompt": "a", "extra_args": {"scheduler": "../../etc/passwd"}},
    {"prompt": "a", "output_format": "../../etc/passwd"},
]


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("sent", BAD, ids=str)
def test_an_error_tells_no_path_and_no_code(served: Served, sent: dict[str, object]) -> None:
    """Also one that the pipeline finds out only while it runs."""
    with pytest.raises(InferenceServerException) as caught:
        served.infer(**{"num_inference_steps": 2, "height": 16, "width": 16, **sent})
    message = caught.value.message()
    assert not PATH.search(message.replace("../../etc/passwd", "")), message
    assert "Traceback" not in message
    assert ".py" not in message
    assert "\n" not in message


def test_metadata_tells_no_path(drawing: TritonServer) -> None:
    for path in ("/v2", "/v2/models/emoji", "/v2/models/outside", "/v2/models/nothing"):
        assert not PATH.search(ask(drawing.address_http, "GET", path)[1])
    assert str(MODEL) not in ask(drawing.address_http, "GET", "/v2/models/emoji")[1]


def test_a_model_that_did_not_load_tells_callers_nothing(drawing: TritonServer) -> None:
    """Its reason, which has paths, needs the key."""
    with (
        tritonclient.grpc.InferenceServerClient(drawing.url_grpc) as client,
        pytest.raises(InferenceServerException) as caught,
    ):
        client.infer("outside", grpc_inputs(tensors(prompt="a")))
    assert not PATH.search(str(caught.value))


@pytest.mark.parametrize("where", ["request id", "model", "path", "field", "header"])
def test_a_caller_cannot_forge_lines_of_the_log(light: TritonServer, light_log: Path, where: str) -> None:
    """Whatever a request brings in stays within its line, and steers no terminal."""
    before = light_log.read_bytes().count(b"\n")
    with tritonclient.grpc.InferenceServerClient(light.url_grpc) as client:
        inputs = grpc_inputs(tensors(prompt="a"))
        if where == "request id":
            client.infer("light_unary", inputs, request_id=FORGED)
        elif where == "model":
            with pytest.raises(InferenceServerException):
                client.infer(FORGED, inputs)
        elif where == "path":
            ask(light.address_http, "GET", "/v2/models/x%0AE1130%20forged%1b[2J/config")
        elif where == "field":
            ask(light.address_http, "POST", "/v2/models/light_unary/generate", {"prompt": "a", FORGED: 1})
        else:
            ask(light.address_http, "GET", "/v2", headers={"x-forged": "E1130 forged"})
        last = f"sent after the {where}"
        client.infer("light_unary", inputs, request_id=last)

    eventually(lambda: last.encode() in light_log.read_bytes(), "all of it is in the log")

    def new_lines() -> list[bytes]:
        return light_log.read_bytes().split(b"\n")[before:]

    if where in ("request id", "path"):  # what was sent is in the log, or this test would show nothing
        eventually(lambda: any(b"forged" in line for line in new_lines()), "what was sent is in the log")
    new = new_lines()
    assert not any(line.startswith((b"E1130", b"E")) and b"forged" in line for line in new)
    assert b"\x1b" not in b"\n".join(new)
