"""The demo: any prompt has a file name; the whole of it runs for real."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from diffusion_backend.demo import Drawing, save, slug

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300.0


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("red apple", "red-apple"),
        ("  Red  APPLE!  ", "red-apple"),
        ("../../etc/passwd", "etc-passwd"),
        ("""it's "quoted" \\ and `$(so)`""", "it-s-quoted-and-so"),
        ("Éclair über", "eclair-uber"),
        ("🍎", "red-apple"),
        ("", "picture"),
        ("?!", "picture"),
        ("\x00\ud800", "picture"),
        ("x" * 500, "x" * 60),
    ],
)
def test_slug(prompt: str, name: str) -> None:
    assert slug(prompt) == name


@given(st.text())
def test_slug_is_a_safe_file_name(prompt: str) -> None:
    assert re.fullmatch(r"[a-z0-9](?:[a-z0-9-]{0,58}[a-z0-9])?", slug(prompt))


def test_several_pictures_are_numbered(tmp_path: Path) -> None:
    drawing = Drawing([b"a", b"b"], [1, 2], {})
    paths = save(drawing, tmp_path / "new", "cat")
    assert [(path.name, path.read_bytes()) for path in paths] == [("cat-1.png", b"a"), ("cat-2.png", b"b")]


def run_demo(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "diffusion_backend.demo", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | {"COLUMNS": "100", "OMP_WAIT_POLICY": "PASSIVE"} | env,
    )


@pytest.mark.slow
def test_demo_draws_a_picture(tmp_path: Path) -> None:
    prompt = """a "red" apple's [bold] \\ 🍎"""
    done = run_demo("--steps", "4", "--seed", "5", "--out", str(tmp_path), PROMPT=prompt)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    assert path.name == "a-red-apple-s-bold-red-apple.png"
    with Image.open(path) as picture:
        assert (picture.format, picture.size) == ("PNG", (64, 64))
        assert np.asarray(picture).std() > 5
    assert str(path) in done.stdout
    assert "seed 5" in done.stdout
    assert "4/4" in done.stdout
    for phase in ("queue", "preprocess", "execute", "postprocess"):
        assert phase in done.stdout
    assert done.stdout.strip().endswith("stopped")
    assert done.stderr == ""


@pytest.mark.slow
def test_demo_tells_what_is_wrong(tmp_path: Path) -> None:
    done = run_demo("--steps", "0", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "error num_inference_steps: 0 is not allowed" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_demo_refuses_a_model_without_steps(tmp_path: Path) -> None:
    done = run_demo("--model", "emoji_unary", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "error --model: 'emoji_unary' tells no steps; name a streaming model" in done.stdout
    assert list(tmp_path.iterdir()) == []
