"""What the launcher says of who may call, and what it refuses to start with."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from diffusion_backend.serve import Access, ArgumentError, TritonServer
from diffusion_backend.serve.app import App, _guard_lines
from diffusion_backend.serve.command import Addresses, build_command, is_loopback
from diffusion_backend.serve.log import parse_line, printable
from diffusion_backend.serve.ports import free_ports
from tests.security.conftest import READY_S, ask


def launch(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher with what it must refuse."""
    return subprocess.run(
        [sys.executable, "-m", "diffusion_backend.serve", "--model-repository", str(tmp_path), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ((), {"ADMIN_KEY": "tooshort"}, "The key in ADMIN_KEY must be at least 16 characters"),
        (("--admin-key-file", "/nowhere/key"), {}, "The key's file /nowhere/key cannot be read"),
        (("--restricted-apis", "health"), {}, "'health' cannot be restricted"),
        (("--grpc-tls-cert", "/nowhere/cert"), {}, "needs both --grpc-tls-cert and --grpc-tls-key"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], environment: dict[str, str], words: str
) -> None:
    done = launch(tmp_path, *arguments, **environment)
    assert done.returncode == 1
    assert words in done.stdout
    assert "tooshort" not in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_there_is_no_option_for_the_key_itself(tmp_path: Path) -> None:
    """On a command line every user of the machine could read it."""
    done = launch(tmp_path, "--help", COLUMNS="200")
    assert "--admin-key-file" in done.stdout
    assert "--admin-key " not in done.stdout


@pytest.mark.parametrize(
    "argument",
    [
        "--http-restricted-api=inference:a=b",
        "--grpc-restricted-protocol=inference:a=b",
        "--grpc-use-ssl=false",
        "--grpc-use-ssl-mutual=false",
        "--grpc-server-key=x",
        "--metrics-address=0.0.0.0",
        "--http-address=0.0.0.0",
    ],
)
def test_guards_cannot_be_taken_off_by_further_arguments(argument: str) -> None:
    with pytest.raises(ArgumentError, match=r"The launcher sets .* Set it with"):
        build_command(
            Path("/bin/tritonserver"),
            Path("/backends"),
            "/models",
            Addresses("127.0.0.1", 1, 2, 3),
            shm_prefix="p_",
            exit_timeout=1,
            log_verbose=0,
            extra_args=[argument],
        )


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True), ("triton.example", False)]
    + [(host, False) for host in ("0.0.0.0", "::", "10.0.0.1")],
)
def test_which_hosts_are_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def announced(host: str, access: Access, tmp_path: Path) -> str:
    """What the launcher would say of a server (that is not started)."""
    server = TritonServer(tmp_path, access=access)
    server._addresses = Addresses(host, 1, 2, 3)
    return "\n".join(_guard_lines(server))


def test_the_announcement_tells_who_may_call(tmp_path: Path) -> None:
    access = Access()
    quiet = announced("127.0.0.1", access, tmp_path)
    assert "warning" not in quiet
    assert "closed   shared-memory, model-config" in quiet
    assert "ADMIN_KEY" in quiet
    public = announced("0.0.0.0", access, tmp_path)
    assert "warning" in public
    assert "without TLS and without a key" in public
    assert "HOST=127.0.0.1" in public
    assert "RESTRICTED_APIS is none" in announced("127.0.0.1", Access(()), tmp_path)
    assert access.key not in quiet + public


FORGED = 'W1130 12:00:00.000001 7 model.py:1] "request a\\nE1130 12:00:00.0 7 server.cc:1] forged\\u001b[2J"'


def shown(raw: str, *, verbose: bool) -> str:
    """What the launcher's console gets of a line of the server's log."""
    output = io.StringIO()
    console = Console(file=output, soft_wrap=True, highlight=False)
    app = App(lambda *_: None, console, ready_timeout=1, strict=False, verbose=verbose)  # type: ignore[arg-type,return-value]
    app._show_line(parse_line(raw))
    return output.getvalue()


@pytest.mark.parametrize("verbose", [True, False])
def test_a_request_cannot_forge_lines_of_the_console(verbose: bool) -> None:
    """What follows a line's end that a request brought in is indented, and the terminal is not steered."""
    text = shown(FORGED, verbose=verbose)
    assert "forged" in text
    assert not any(line.startswith(("E1130", "error")) for line in text.splitlines())
    assert "\x1b" not in shown(FORGED.replace("\\u001b", "\x1b"), verbose=verbose)


def test_printable_keeps_what_can_be_read() -> None:
    assert printable("naïve 🐳\ttab\r\nnext\x00\u202e") == "naïve 🐳\ttab\\r\n    next\\x00\\u202e"


def test_the_launcher_as_it_is_run(light_repository: Path, tmp_path: Path) -> None:
    """From the environment: a key that opens what is closed and is not shown, a warning where everyone may call."""
    http_port, grpc_port, metrics_port = free_ports("0.0.0.0", 3)
    key = "a-key-for-this-test-only"
    environment = os.environ | {
        "MODEL_REPOSITORY": str(light_repository),
        "HOST": "0.0.0.0",
        "HTTP_PORT": str(http_port),
        "GRPC_PORT": str(grpc_port),
        "METRICS_PORT": str(metrics_port),
        "ADMIN_KEY": key,
        "TMPDIR": str(tmp_path),
    }
    launcher = subprocess.Popen(
        [sys.executable, "-m", "diffusion_backend.serve", "--verbose"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert launcher.stdout is not None
    try:
        output = ""
        for line in launcher.stdout:
            output += line
            if "Ctrl-C stops the server" in line:
                break
        address = f"127.0.0.1:{http_port}"
        assert ask(address, "GET", "/v2/models/stats")[0] == 403
        assert ask(address, "GET", "/v2/models/stats", headers={"admin-key": key})[0] == 200
        launcher.send_signal(signal.SIGINT)
        output += launcher.stdout.read()
        assert launcher.wait(READY_S) == 0, output
    finally:
        launcher.kill()  # no effect on one that has ended
        launcher.stdout.close()
        launcher.wait()
    assert "warning: HTTP and gRPC are open to every machine that reaches 0.0.0.0" in output
    assert "closed   shared-memory, model-config" in output
    assert key not in output
