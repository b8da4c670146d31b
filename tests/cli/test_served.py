"""What `add` wrote, in the real server; and the console script as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient

from diffusion_backend.serve.server import TritonServer
from tests.cli.conftest import EMOJI

SCRIPT = Path(sys.executable).with_name("diffusion-backend")
SEED = 4242


def run_script(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**{k: v for k, v in os.environ.items() if k != "COLUMNS"}, **environment},
        check=False,
    )


def test_an_added_model_answers_through_its_twin(call, repository):
    assert call("add", EMOJI, "--name", "mine", "--default-num-inference-steps", 2, "--max-num-seqs", 2).exit_code == 0
    print(f"seed {SEED}")
    with TritonServer(repository) as server:
        states = {model.name: model.is_ready for model in server.wait_ready(strict=True)}
        assert states == {"mine": True, "mine_unary": True}
        inputs = []
        values: tuple[tuple[str, str, Any], ...] = (("prompt", "BYTES", b"red apple"), ("seed", "INT64", SEED))
        for name, kind, value in values:
            tensor = httpclient.InferInput(name, (1, 1), kind)
            tensor.set_data_from_numpy(np.array([[value]], dtype=object if kind == "BYTES" else np.int64))
            inputs.append(tensor)
        with httpclient.InferenceServerClient(server.address_http, network_timeout=120) as client:
            answer = client.infer("mine_unary", inputs)
        images = answer.as_numpy("images")
        assert images.shape == (1, 64, 64, 3)
        assert images.std() > 1  # something was drawn
        assert answer.as_numpy("seeds").tolist() == [SEED]
        assert b'"param_num_inference_steps": 2' in answer.as_numpy("metrics")[0]


def test_the_script_lists_and_its_output_has_no_colours(tmp_path):
    done = run_script("list", "--repository", tmp_path, NO_COLOR="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path} holds no models; add one with `diffusion-backend add`\n"


@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_color_is_respected(tmp_path, no_color):
    done = run_script("list", "--repository", tmp_path / "x", NO_COLOR=no_color, FORCE_COLOR="1")
    assert done.returncode == 2
    assert ("\x1b[1;31m" in done.stderr) is not bool(no_color)


def test_a_hub_model_offline_is_one_readable_line(tmp_path):
    done = run_script(
        "add", "some/model", "--repository", tmp_path / "r", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "home")
    )
    assert done.returncode == 2
    assert done.stdout == ""
    *progress, error = done.stderr.splitlines()
    assert progress == ["looking at some/model …"]
    assert error.startswith("error some/model is not in the cache of Hugging Face, and HF_HUB_OFFLINE is set: ")
    assert not (tmp_path / "r").exists()
