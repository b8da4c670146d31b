"""Pipelines on the hub: the real client of Hugging Face against a server that answers as the hub does."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from tests.cli.conftest import parameters_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"
INDEX = json.dumps({"_class_name": "StableDiffusion3Pipeline"}).encode()

ANSWERS = {
    "good": (200, ""),
    "empty": (404, "EntryNotFound"),
    "private": (401, "RepoNotFound"),
    "missing": (404, "RepoNotFound"),
    "gated": (403, "GatedRepo"),
    "broken": (403, ""),
}
"""For each repository of the owner `some`: the status and the code of the error."""


class Hub(BaseHTTPRequestHandler):
    """Answers requests for one file of one repository."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        status, code = ANSWERS.get(self.path.split("/")[2], (404, "RepoNotFound"))
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        body = INDEX if status == 200 else b""
        for name, value in (("ETag", '"tag"'), ("X-Repo-Commit", COMMIT), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A hub, and an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=functools.partial(server.serve_forever, 0.01))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield url
        server.shutdown()
        thread.join()


def test_a_hub_model_is_added_by_its_id_and_found_again_offline(call, hub, repository, monkeypatch):
    result = call("add", "some/good", "--name", "sd35", "--dtype", "bfloat16")
    assert result.exit_code == 0
    assert parameters_of(repository / "sd35") == {"model": "some/good", "dtype": "bfloat16"}
    assert "StableDiffusion3Pipeline from some/good" in result.stdout
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert call("add", "some/good").exit_code == 0
    assert parameters_of(repository / "good") == {"model": "some/good"}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("empty", "some/empty is on the hub, but holds no diffusers pipeline (model_index.json is missing)"),
        ("private", "there is no some/private on the hub, or it is private: check the name, or log in with `hf auth"),
        ("missing", "there is no some/missing on the hub, or it is private: check the name, or log in with `hf auth"),
        ("gated", "some/gated is gated: ask for access at HUB/some/gated, then log in with `hf auth login`"),
        ("broken", "some/broken is not in the cache of Hugging Face, and HUB cannot be reached"),
        ("-bad-", "'some/-bad-' is no hub id: "),
    ],
)
def test_what_the_hub_refuses_is_said(refused, hub, name, problem):
    assert refused("add", f"some/{name}", "--name", "x").startswith(problem.replace("HUB", hub))


def test_offline(refused, hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = refused("add", "some/good")
    assert message.startswith("some/good is not in the cache of Hugging Face, and HF_HUB_OFFLINE is set: download it")
    assert "`hf download some/good`" in message
