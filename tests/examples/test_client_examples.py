"""Every example as a user runs it: a process of its own against a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffusion_backend.serve import TritonServer
from diffusion_backend.serve.ports import free_ports

EXAMPLES = Path(__file__).parents[2] / "client_examples"
DEADLINE_S = 120.0
HTTP = ("http_infer.py", "generate_stream.py", "generate.sh")
GRPC = ("grpc_stream.py", "asyncio_many.py", "cancel.py")
MEDIA = ("sound.py", "video.py", "image_to_image.py")
"""For models that do not ship: `tests/media_server/test_examples.py` runs these."""


def run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run an example; its interpreter is this one, for `python3` in the shell script, too."""
    interpreter = ["bash"] if name.endswith(".sh") else [sys.executable, "-W", "error"]
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [*interpreter, str(EXAMPLES / name), *args], capture_output=True, text=True, timeout=DEADLINE_S, env=env
    )


def succeed(name: str, *args: str) -> str:
    done = run(name, *args)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_pictures(folder: Path, names: Sequence[str], side: int = 64) -> None:
    """Check that the folder holds these pictures, of this size and not of one colour, and nothing else."""
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    for name in names:
        with Image.open(folder / name) as picture:
            assert (picture.format, picture.size, picture.mode) == ("PNG", (side, side), "RGB")
            assert np.asarray(picture).std() > 5, f"{name} is blank"


def test_the_readme_lists_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text()
    names = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh"))
    assert names == sorted(HTTP + GRPC + MEDIA)
    assert [name for name in names if f"[{name}]({name})" not in text] == []


def test_http_infer(server: TritonServer, tmp_path: Path) -> None:
    out = succeed("http_infer.py", "red apple", "--url", server.address_http, "--seed", "7", "--out", str(tmp_path))
    assert "seed 7," in out
    check_pictures(tmp_path, ["http_infer.png"])


def test_the_same_seed_gives_the_same_picture(server: TritonServer, tmp_path: Path) -> None:
    pictures = []
    for name in ("a", "b"):
        succeed("http_infer.py", "--url", server.address_http, "--seed", "7", "--steps", "4", "--out", tmp_path / name)
        with Image.open(tmp_path / name / "http_infer.png") as picture:
            pictures.append(np.asarray(picture, dtype=int))
    assert np.abs(pictures[0] - pictures[1]).max() <= 1


def test_generate_sh(server: TritonServer, tmp_path: Path) -> None:
    prompt = """a "red" apple's \\ 🍎"""
    out = succeed("generate.sh", "--url", server.address_http, "--steps", "4", "--out", str(tmp_path), prompt)
    assert "generate.png: seed" in out
    check_pictures(tmp_path, ["generate.png"])


def test_grpc_stream(server: TritonServer, tmp_path: Path) -> None:
    args = ("--url", server.url_grpc, "--steps", "6", "--preview-interval", "2", "--out", str(tmp_path))
    done = run("grpc_stream.py", "pizza", *args)
    assert done.returncode == 0, done.stderr
    assert "6/6" in done.stderr  # the progress bar
    for phase in ("queue", "preprocess", "execute", "postprocess", "total"):
        assert f"time_{phase}_ms" in done.stdout
    check_pictures(tmp_path, ["grpc_stream.png", "grpc_stream-step02.png", "grpc_stream-step04.png"])


def test_asyncio_many(server: TritonServer, tmp_path: Path) -> None:
    out = succeed("asyncio_many.py", "cat face", "rocket", "pizza", "--url", server.url_grpc, "--out", str(tmp_path))
    for line in ("cat face, 8 steps", "rocket, 20 steps", "pizza, 40 steps", "3 pictures in"):
        assert line in out
    check_pictures(tmp_path, [f"asyncio_many-{i:02}.png" for i in range(3)])


def test_cancel(server: TritonServer) -> None:
    metrics = server.url_metrics.removeprefix("http://").removesuffix("/metrics")
    out = succeed("cancel.py", "--url", server.url_grpc, "--metrics-url", metrics, "--after", "3")
    assert "step 3 of 1000" in out
    assert "client: StatusCode.CANCELLED" in out
    assert "server: CANCELLED" in out


def test_generate_stream(server: TritonServer, tmp_path: Path) -> None:
    out = succeed("generate_stream.py", "rocket", "--url", server.address_http, "--steps", "3", "--out", str(tmp_path))
    assert out.splitlines()[:3] == ["step 1 of 3", "step 2 of 3", "step 3 of 3"]
    check_pictures(tmp_path, ["generate_stream.png"])


@pytest.mark.parametrize("name", ["http_infer.py", "generate.sh", "grpc_stream.py", "generate_stream.py"])
def test_a_refused_request_is_told_in_one_line(server: TritonServer, tmp_path: Path, name: str) -> None:
    url = server.address_http if name in HTTP else server.url_grpc
    done = run(name, "--url", url, "--steps", "0", "--out", str(tmp_path))
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("error: ")
    assert "num_inference_steps: 0 is not allowed" in message
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("asyncio_many.py", ("--concurrency", "0"), "0 is not allowed; it must be at least 1"),
        ("cancel.py", ("--steps", "5", "--after", "5"), "5 is not allowed; it must be from 1 to 4"),
        ("cancel.py", ("--after", "0"), "0 is not allowed; it must be from 1 to 999"),
        ("generate.sh", ("--steps", "many"), "'many' is not a number"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_at_once(name: str, args: Sequence[str], message: str) -> None:
    done = run(name, *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", HTTP)
def test_a_port_that_does_not_speak_http_is_told(server: TritonServer, tmp_path: Path, name: str) -> None:
    done = run(name, "--url", server.url_grpc, "--out", str(tmp_path))
    assert done.returncode == 1
    assert "error: no server answers HTTP" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", [*HTTP, *GRPC, *MEDIA])
def test_without_a_server_the_remedy_is_told(name: str, tmp_path: Path) -> None:
    url = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    picture = (str(EXAMPLES / "README.md"),) if name == "image_to_image.py" else ()  # not looked at before it is sent
    done = run(name, *picture, "--url", url, *(() if name == "cancel.py" else ("--out", str(tmp_path))))
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("error: no server answers")
    assert url in message
    assert "make serve" in message
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", [*HTTP, *GRPC, *MEDIA])
def test_help(name: str) -> None:
    assert "--url" in succeed(name, "--help")
