"""The server's command line, and the checks of what it is made from."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffusion_backend.serve import ArgumentError, RepositoryError
from diffusion_backend.serve.command import Addresses, build_command, check_repository, control_mode


def _command(*extra: str, **changes) -> list[str]:
    settings = {"shm_prefix": "p_", "exit_timeout": 30.0, "log_verbose": 0, "extra_args": extra} | changes
    addresses = Addresses("10.0.0.1", 1, 2, 3)
    return build_command(Path("/bin/tritonserver"), Path("/backends"), "/models", addresses, **settings)


def test_every_endpoint_binds_the_host():
    command = _command()
    for name, port in (("http", 1), ("grpc", 2)):
        assert f"--{name}-address=10.0.0.1" in command
        assert f"--{name}-port={port}" in command
    assert {"--metrics-address=127.0.0.1", "--metrics-port=3"} <= set(command), "metrics have an address of their own"


def test_extra_arguments_win_over_defaults():
    assert "--model-control-mode=none" in _command()
    command = _command("--model-control-mode=explicit", "--exit-on-error=true")
    assert [argument for argument in command if argument.startswith("--model-control-mode")] == [
        "--model-control-mode=explicit"
    ]
    assert "--exit-on-error=false" not in command


@pytest.mark.parametrize("argument", ["--http-port=1", "--http-port", "--metrics-address=0.0.0.0", "--model-store=/x"])
def test_arguments_of_the_launcher_cannot_be_given_again(argument):
    with pytest.raises(ArgumentError, match=r"Set it with [A-Z_]+\."):
        _command(argument)


def test_shared_memory_prefix_cannot_be_given_again():
    with pytest.raises(ArgumentError, match="shared memory"):
        _command("--backend-config=python,shm-region-prefix-name=mine")


def test_processes_of_models_have_time_to_come_up_unless_told_otherwise():
    def given(*arguments):
        return [argument for argument in _command(*arguments) if "stub-timeout-seconds" in argument]

    assert given() == ["--backend-config=python,stub-timeout-seconds=180"]
    assert given("--backend-config=python,stub-timeout-seconds=5") == ["--backend-config=python,stub-timeout-seconds=5"]


@pytest.mark.parametrize(("timeout", "flag"), [(0.2, "1"), (30.0, "30"), (2.6, "3")])
def test_exit_timeout_is_whole_seconds_and_at_least_one(timeout, flag):
    assert f"--exit-timeout-secs={flag}" in _command(exit_timeout=timeout)


@pytest.mark.parametrize(
    ("extra", "mode"),
    [
        ((), "none"),
        (("--strict-readiness=true",), "none"),
        (("--model-control-mode=explicit",), "explicit"),
        (("--model-control-mode", "poll"), "poll"),
    ],
)
def test_control_mode_is_read_from_the_extra_arguments(extra, mode):
    assert control_mode(extra) == mode


@pytest.mark.parametrize(
    ("host", "local"), [("0.0.0.0", "127.0.0.1:8"), ("::", "[::1]:8"), ("localhost", "localhost:8")]
)
def test_local_address(host, local):
    assert Addresses(host, 8, 9, 10).local(8) == local


def test_repository_that_is_a_model_itself_is_recognised(tmp_path):
    model = tmp_path / "models" / "emoji"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").touch()
    check_repository(str(model.parent))
    with pytest.raises(RepositoryError, match=f"looks like a model itself: try {model.parent}"):
        check_repository(str(model))


def test_repository_without_a_model_or_not_a_folder_is_refused(tmp_path):
    with pytest.raises(RepositoryError, match="holds no model"):
        check_repository(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(RepositoryError, match="is not a folder"):
        check_repository(str(tmp_path / "file"))


def test_repository_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)  # the mode of a folder keeps root from nothing
    with pytest.raises(RepositoryError, match=r"cannot be read: .*Permission denied.* MODEL_REPOSITORY"):
        check_repository(str(tmp_path))


def test_repository_in_a_store_is_left_to_the_server():
    check_repository("s3://bucket/models")
