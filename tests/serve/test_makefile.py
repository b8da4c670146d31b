"""The Makefile: what a user types, on a terminal and off it."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from diffusion_backend.serve.ports import free_ports
from tests.serve.conftest import DEADLINE_S

MAKEFILE = Path(__file__).parents[2] / "Makefile"

# Makes the terminal on standard input this session's own, so that Ctrl-C on it becomes a signal.
TAKE_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp('make', sys.argv[1:])"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the Makefile, in which setup is done: its Python is the one that runs this test."""
    shutil.copy(MAKEFILE, tmp_path)
    for name in ("requirements.lock", "pyproject.toml"):
        (tmp_path / name).touch()
    _script(tmp_path / ".venv" / "bin" / "python", f'exec {sys.executable} "$@"')
    (tmp_path / ".venv" / ".setup-done").touch()
    return tmp_path


def _script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def _make(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *args], cwd=folder, env=os.environ | env, capture_output=True, text=True, timeout=60, check=False
    )


def test_help_lists_every_target(checkout):
    done = _make(checkout)
    for target in ["setup", "serve", "test", "check", "bench", "demo", "train-emoji", "emoji-report", "clean", "help"]:
        assert f"  make {target} " in done.stdout


@pytest.mark.parametrize(
    "prompt", ["red apple", """a "quoted" 'one' with $HOME; `and` more""", "ein \u00e4pfelchen \U0001f34e"]
)
def test_demo_hands_the_prompt_on_untouched(checkout, prompt):
    _script(checkout / ".venv" / "bin" / "python", 'printf "%s|" "$@"')
    expected = f"-m|diffusion_backend.demo|--prompt|{prompt}|"
    assert _make(checkout, "demo", f"PROMPT={prompt}").stdout == expected
    assert _make(checkout, "demo", PROMPT=prompt).stdout == expected


def test_setup_runs_again_only_if_the_lock_has_changed(checkout):
    log = checkout / "log"
    _script(checkout / ".venv" / "bin" / "python", f'echo "$@" >> {log}')
    assert _make(checkout, "setup").returncode == 0
    assert not log.exists()
    later = time.time() + 10
    os.utime(checkout / "requirements.lock", (later, later))
    assert _make(checkout, "setup").returncode == 0
    assert "-r requirements.lock" in log.read_text()


def test_setup_without_a_fitting_python_says_what_to_install(checkout):
    shutil.rmtree(checkout / ".venv")
    for name in ("python3.11", "python3.12", "python3"):
        _script(checkout / "bin" / name, "exit 1")
    done = _make(checkout, "setup", PATH=f"{checkout / 'bin'}:{os.environ['PATH']}")
    assert done.returncode != 0
    assert "no Python 3.11 or 3.12 was found" in done.stderr
    assert "apt-get install" in done.stderr


def test_serve_on_a_terminal_returns_0_after_ctrl_c(checkout, repository):
    repository.add_echo()
    ports = zip(("HTTP_PORT", "GRPC_PORT", "METRICS_PORT"), map(str, free_ports("127.0.0.1", 3)), strict=True)
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE_TERMINAL, "make", "serve"],
        cwd=checkout,
        env=os.environ | {"MODEL_REPOSITORY": str(repository.path)} | dict(ports),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    output = b""
    with open(master, "r+b", buffering=0) as terminal:
        while b"Ctrl-C stops" not in output and (chunk := _read(terminal)):
            output += chunk
        terminal.write(b"\x03")
        while chunk := _read(terminal):
            output += chunk
    assert process.wait(DEADLINE_S) == 0, output.decode()
    assert b"stopped" in output


def test_serve_off_a_terminal_drains_on_sigterm(checkout, repository, launch):
    repository.add_echo()
    launcher = launch(repository.path, command=["make", "-C", str(checkout), "serve"])
    launcher.wait_ready()
    launcher.signal(signal.SIGTERM)  # make hands it on to the launcher, and dies of it after that
    launcher.wait()
    assert "stopped after" in launcher.output
    assert launcher.leftovers() == []


def _read(terminal: IO[bytes]) -> bytes:
    """Return what is on the terminal next, nothing once its last process has closed it."""
    assert select.select([terminal], [], [], DEADLINE_S)[0], "nothing more came"
    try:
        return terminal.read(4096)
    except OSError:
        return b""
