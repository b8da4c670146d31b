"""The launcher in a process of its own, with signals, dead processes and wrong settings."""

from __future__ import annotations

import os
import re
import signal
import socket
import urllib.request

import pytest

from tests.serve.client import Pending, generate
from tests.serve.conftest import is_gone, wait_until


def _wait_executing(launcher, count: int = 1) -> None:
    """Wait until ``count`` requests run: the gauge of the model says so."""

    def running() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{launcher.metrics_port}/metrics", timeout=60) as page:
            match = re.search(r"^diffusion_requests_running\{.*\} (\S+)$", page.read().decode(), re.MULTILINE)
        return match is not None and float(match[1]) == count

    wait_until(running, f"{count} running")


def test_serves_and_stops_with_0(repository, launch):
    repository.add_echo()
    launcher = launch(repository.path)
    launcher.wait_ready()
    assert generate(launcher.url, "hello") == "hello"
    for endpoint in (launcher.url, f"127.0.0.1:{launcher.grpc_port}", f":{launcher.metrics_port}/metrics"):
        assert endpoint in launcher.output
    assert f"curl -s {launcher.url}/v2/models/echo" in launcher.output
    launcher.signal(signal.SIGTERM)
    assert launcher.wait() == 0
    assert launcher.leftovers() == []


def test_ctrl_c_lets_the_running_request_finish(repository, launch):
    repository.add_echo(gauge=True)
    launcher = launch(repository.path)
    launcher.wait_ready()
    request = Pending(launcher.url, delay_s=2.0)
    _wait_executing(launcher)
    launcher.signal(signal.SIGINT)
    launcher.wait_for("waiting for requests: 1 running")
    assert request.wait() == "late"
    assert launcher.wait() == 0
    assert launcher.leftovers() == []


def test_second_ctrl_c_ends_at_once(repository, launch):
    repository.add_echo(gauge=True)
    launcher = launch(repository.path)
    launcher.wait_ready()
    server = launcher.server_pid()
    request = Pending(launcher.url, delay_s=600.0)
    _wait_executing(launcher)
    launcher.signal(signal.SIGINT)
    launcher.wait_for("waiting for requests: 1 running")
    launcher.signal(signal.SIGINT)
    assert launcher.wait(10) == 128 + signal.SIGINT
    assert is_gone(server)
    assert isinstance(request.wait(), Exception)
    assert launcher.leftovers() == []


def test_request_longer_than_the_exit_timeout_is_cut_off(repository, launch):
    repository.add_echo(gauge=True)
    launcher = launch(repository.path, "--exit-timeout", "1")
    launcher.wait_ready()
    Pending(launcher.url, delay_s=600.0)
    _wait_executing(launcher)
    launcher.signal(signal.SIGTERM)
    assert launcher.wait() == 1
    assert "--exit-timeout" in launcher.output
    assert launcher.leftovers() == []


def test_ctrl_c_while_loading_ends_at_once(repository, launch):
    repository.add_slow()
    launcher = launch(repository.path)
    launcher.wait_for("loading slow")
    launcher.signal(signal.SIGINT)
    assert launcher.wait(10) == 0
    assert launcher.leftovers() == []


def test_dead_stub_takes_the_server_down(repository, launch):
    repository.add_echo()
    launcher = launch(repository.path)
    launcher.wait_ready()
    server, stub = launcher.server_pid(), launcher.stub_pid()
    os.kill(stub, signal.SIGKILL)
    assert launcher.wait(5) == 1
    assert f"The Python process of model 'echo' (process {stub}) was ended by SIGKILL" in launcher.output
    assert is_gone(server)
    assert launcher.leftovers() == []


def test_kill_of_the_server_leaves_nothing(repository, launch):
    repository.add_echo()
    launcher = launch(repository.path)
    launcher.wait_ready()
    stub = launcher.stub_pid()
    os.kill(launcher.server_pid(), signal.SIGKILL)
    assert launcher.wait(10) == 1
    assert "The Triton server ended by signal 9" in launcher.output
    assert is_gone(stub)
    assert launcher.leftovers() == []


@pytest.mark.parametrize("victim", ["launcher", "keeper"])
def test_kill_of_the_processes_above_leaves_nothing(repository, launch, victim):
    repository.add_echo()
    launcher = launch(repository.path)
    launcher.wait_ready()
    server, stub, keeper = launcher.server_pid(), launcher.stub_pid(), launcher.keeper_pid()
    os.kill(launcher.process.pid if victim == "launcher" else keeper, signal.SIGKILL)
    assert launcher.wait(10) != 0
    wait_until(lambda: is_gone(server) and is_gone(stub) and is_gone(keeper), "all processes gone", 10)
    wait_until(lambda: launcher.leftovers() == [], "shared memory and folders removed", 10)


def test_broken_model_is_named_and_the_others_are_served(repository, launch):
    repository.add_echo()
    repository.add_broken()
    launcher = launch(repository.path)
    launcher.wait_ready()
    assert "failed  broken 1: ValueError: no weights at 'here'; set the parameter 'model'\n" in launcher.output
    assert "ready   echo 1\n" in launcher.output
    assert launcher.output.count("no weights") == 1
    assert generate(launcher.url, "hello") == "hello"


def test_no_model_that_loads_is_an_error(repository, launch):
    repository.add_broken()
    launcher = launch(repository.path)
    assert launcher.wait() == 1
    assert "No model could be loaded" in launcher.output
    assert "broken: ValueError: no weights at 'here'; set the parameter 'model'\n" in launcher.output
    assert "Traceback" not in launcher.output


def test_strict_wants_every_model(repository, launch):
    repository.add_echo()
    repository.add_broken()
    launcher = launch(repository.path, "--strict")
    assert launcher.wait() == 1
    assert "Not every model could be loaded" in launcher.output


def test_port_in_use_is_named_before_anything_starts(repository, launch):
    repository.add_echo()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launcher = launch(repository.path, "--http-port", str(port))
        assert launcher.wait() == 1
    assert f"Port {port} at 127.0.0.1 is in use by process {os.getpid()}" in launcher.output
    assert "HTTP_PORT=" in launcher.output
    assert "Traceback" not in launcher.output


def test_missing_repository_is_named(launch, tmp_path):
    launcher = launch(tmp_path / "nowhere")
    assert launcher.wait() == 1
    assert f"{tmp_path / 'nowhere'} does not exist" in launcher.output
    assert "MODEL_REPOSITORY" in launcher.output


def test_models_too_slow_to_load_are_named(repository, launch):
    repository.add_slow()
    launcher = launch(repository.path, "--ready-timeout", "3")
    assert launcher.wait() == 1
    assert "not ready within 3 s (still loading slow)" in launcher.output
    assert launcher.leftovers() == []


def test_arguments_after_two_dashes_reach_the_server(repository, launch):
    repository.add_echo()
    launcher = launch(repository.path, "--", "--model-control-mode=explicit", "--load-model=echo")
    launcher.wait_ready()
    assert generate(launcher.url, "hello") == "hello"
