"""The README's own examples, run as they stand but for the ports."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

from PIL import Image

from diffusion_backend.serve import TritonServer

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_python_block_draws(server: TritonServer) -> None:
    (block,) = blocks("python")
    program = block.replace("localhost:8001", server.url_grpc)
    assert program != block
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program + "\nprint(done[0].shape, done[0].dtype)"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "step 1 of 20" in done.stdout
    assert done.stdout.splitlines()[-1] == "(1, 64, 64, 3) uint8"


def test_the_curl_line_makes_a_picture(server: TritonServer, tmp_path: Path) -> None:
    (block,) = (b for b in blocks("console") if "curl" in b)
    command = block.removeprefix("$ ").replace("localhost:8000", server.address_http)
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    picture = Image.open(io.BytesIO((tmp_path / "apple.png").read_bytes()))
    assert (picture.format, picture.size) == ("PNG", (64, 64))
