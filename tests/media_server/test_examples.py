"""The client examples of sound, video and pictures in, as a user runs them: processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.media_server.conftest import assert_same
from tests.support.media_files import as_file, film, opened, picture, sound
from tests.support.media_models import SOUND_RATE

EXAMPLES = Path(__file__).parents[2] / "client_examples"
DEADLINE_S = 120.0


def run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=os.environ.copy())


def test_sound(served, tmp_path):
    """Two `.wav` files, different ones, with the rate and the length asked for."""
    args = ("--url", served.grpc_url, "--seconds", "1.5", "--steps", "3", "--number", "2", "--out", str(tmp_path))
    done = run("sound.py", "a bell", *args)
    assert done.returncode == 0, done.stderr
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == ["sound-1.wav", "sound-2.wav"]
    decoded = [sound(path.read_bytes(), "WAV") for path in paths]
    for samples, rate in decoded:
        assert rate == SOUND_RATE
        assert samples.shape == (2, round(1.5 * SOUND_RATE))
    assert np.abs(decoded[0][0] - decoded[1][0]).max() > 0.01
    assert f"sound-2.wav: {SOUND_RATE} Hz, seed" in done.stdout


@pytest.mark.parametrize("model", ["clip", "talkie"])
def test_video(served, tmp_path, model):
    """An `.mp4` file, with a progress bar; with its sound, if the model makes one."""
    args = ("--url", served.grpc_url, "--model", model, "--steps", "4", "--frames", "9", "--frame-rate", "6")
    done = run("video.py", "a ball", *args, "--size", "32", "32", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "4/4" in done.stderr
    assert "video.mp4: 6 frames a second, seed" in done.stdout
    found = film((tmp_path / "video.mp4").read_bytes())
    assert found.frames.shape == (9, 32, 32, 3)
    assert found.frame_rate == 6
    assert (found.track is not None) == (model == "talkie")


def test_image_to_image(served, alone, tmp_path):
    """A picture's file in, a PNG out: that of the bare pipeline."""
    image = picture(1, 64)
    (tmp_path / "in.png").write_bytes(as_file(image))
    args = ("--url", served.http_url, "--model", "redraw_unary", "--steps", "5", "--seed", "7", "--strength", "0.6")
    done = run("image_to_image.py", str(tmp_path / "in.png"), "red apple", *args, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "image_to_image.png: seed 7," in done.stdout
    values = {"num_inference_steps": 5, "strength": 0.6, "guidance_scale": 3.0}
    expected = alone("redraw", "red apple", seed=7, image=image, **values).images[0]
    assert_same(opened((tmp_path / "out" / "image_to_image.png").read_bytes()), expected)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sound.py", "duration_s: 99.0 is not allowed"),
        ("video.py", "num_frames: 0 is not allowed"),
        ("image_to_image.py", "strength: 2.0 is not allowed"),
    ],
)
def test_a_refused_request_is_told_in_one_line(served, tmp_path, name, words):
    """The server's words, no traceback, and no file."""
    (tmp_path / "in.png").write_bytes(as_file(picture(1, 64)))
    args = {
        "sound.py": ("--url", served.grpc_url, "--seconds", "99"),
        "video.py": ("--url", served.grpc_url, "--model", "clip", "--frames", "0"),
        "image_to_image.py": ("--url", served.http_url, "--model", "redraw_unary", "--strength", "2", "--steps", "1"),
    }[name]
    picture_file = (str(tmp_path / "in.png"),) if name == "image_to_image.py" else ()
    done = run(name, *picture_file, *args, "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("error: ")
    assert words in message
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["sound.py", "video.py", "image_to_image.py"])
def test_a_model_that_is_not_served_is_named(served, tmp_path, name):
    """The remedy is `--model`."""
    url = served.http_url if name == "image_to_image.py" else served.grpc_url
    picture_file = (str(EXAMPLES / "README.md"),) if name == "image_to_image.py" else ()
    done = run(name, *picture_file, "--url", url, "--model", "nothing", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "does not serve the model 'nothing'; name another with --model" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_picture_that_is_not_there(tmp_path):
    """Told before the server is asked."""
    done = run("image_to_image.py", str(tmp_path / "nothing.png"), "--url", "127.0.0.1:1")
    assert done.returncode == 1
    assert "nothing.png cannot be read: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr
