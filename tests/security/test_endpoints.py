"""Who may call what: the endpoints that administer the server need the key, and nothing tells the key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from diffusion_backend.serve import Access, ArgumentError, TritonServer
from diffusion_backend.serve.access import HEADER, RESTRICTABLE, hide, parse_apis, read_key
from diffusion_backend.serve.keeper import PLACEHOLDER
from tests.security.conftest import READY_S, ask
from tests.support.client import grpc_inputs, tensors

REGISTER = {"key": "/attack", "offset": 0, "byte_size": 64}

HTTP = [
    # the restricted API, and how it is called; each changes the server or tells how it is set up
    ("shared-memory", "GET", "/v2/systemsharedmemory/status", None),
    ("shared-memory", "POST", "/v2/systemsharedmemory/region/attack/register", REGISTER),
    ("shared-memory", "POST", "/v2/systemsharedmemory/unregister", {}),
    ("shared-memory", "GET", "/v2/cudasharedmemory/status", None),
    ("shared-memory", "POST", "/v2/cudasharedmemory/unregister", {}),
    ("model-config", "GET", "/v2/models/light/config", None),
    ("model-repository", "POST", "/v2/repository/index", {}),
    ("model-repository", "POST", "/v2/repository/models/light/load", {}),
    ("model-repository", "POST", "/v2/repository/models/light/unload", {}),
    ("statistics", "GET", "/v2/models/stats", None),
    ("statistics", "GET", "/v2/models/light/stats", None),
    ("trace", "GET", "/v2/trace/setting", None),
    ("trace", "POST", "/v2/trace/setting", {"trace_file": "/tmp/attack"}),
    ("trace", "GET", "/v2/models/light/trace/setting", None),
    ("logging", "GET", "/v2/logging", None),
    ("logging", "POST", "/v2/logging", {"log_verbose_level": 0}),
]

GRPC = [
    ("shared-memory", "get_system_shared_memory_status", ()),
    ("shared-memory", "register_system_shared_memory", ("attack", "/attack", 64)),
    ("shared-memory", "unregister_system_shared_memory", ()),
    ("shared-memory", "get_cuda_shared_memory_status", ()),
    ("shared-memory", "unregister_cuda_shared_memory", ()),
    ("model-config", "get_model_config", ("light",)),
    ("model-repository", "get_model_repository_index", ()),
    ("model-repository", "load_model", ("light",)),
    ("model-repository", "unload_model", ("light",)),
    ("statistics", "get_inference_statistics", ()),
    ("trace", "get_trace_settings", ()),
    ("trace", "update_trace_settings", ()),
    ("logging", "get_log_settings", ()),
    ("logging", "update_log_settings", ({"log_verbose_level": 1},)),
]


def label(value: Any) -> str:
    return value if isinstance(value, str) else ""


def error_of(method: Any, *arguments: Any, **options: Any) -> str:
    """Return the text of the error that a call ends with, "" if with none."""
    try:
        method(*arguments, **options)
    except InferenceServerException as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("api", "method", "path", "body"), HTTP, ids=label)
def test_http_needs_the_key(light: TritonServer, api: str, method: str, path: str, body: Any) -> None:
    """403 without a key, with a wrong one, and with one that begins like it; not with the right one."""
    key = light.access.key
    for headers in ({}, {HEADER: "x" * 43}, {HEADER: key[:-1]}, {HEADER: ""}, {"authorization": f"Bearer {key}"}):
        status, text = ask(light.address_http, method, path, body, headers)
        assert status == 403, (headers, text)
        assert "restricted" in text
        assert key not in text
    status, text = ask(light.address_http, method, path, body, light.access.http_headers)
    assert status != 403, text


@pytest.mark.parametrize(("api", "call", "arguments"), GRPC, ids=label)
def test_grpc_needs_the_key(light: TritonServer, api: str, call: str, arguments: tuple[Any, ...]) -> None:
    """The same over gRPC."""
    with tritonclient.grpc.InferenceServerClient(light.url_grpc) as client:
        method = getattr(client, call)
        ours = dict(light.access.grpc_metadata)
        (name,) = ours
        for headers in ({}, {name: "x" * 43}, {HEADER: light.access.key}):
            refused = error_of(method, *arguments, headers=headers)
            assert "restricted" in refused
            assert light.access.key not in refused
        assert "restricted" not in error_of(method, *arguments, headers=ours)


def test_every_restrictable_api_is_tried_here() -> None:
    assert {case[0] for case in HTTP} == {case[0] for case in GRPC} == set(RESTRICTABLE)


def test_what_everyone_needs_is_open(light: TritonServer) -> None:
    """Health, metadata and inference need no key."""
    for path in ("/v2/health/live", "/v2/health/ready", "/v2", "/v2/models/light", "/v2/models/light/ready"):
        assert ask(light.address_http, "GET", path)[0] == 200
    status, text = ask(light.address_http, "POST", "/v2/models/light_unary/generate", {"prompt": "hello"})
    assert (status, "hello" in text) == (200, True)
    with tritonclient.grpc.InferenceServerClient(light.url_grpc) as client:
        assert client.is_server_live()
        assert client.get_model_metadata("light").name == "light"
        answer = client.infer("light_unary", grpc_inputs(tensors(prompt="hello")))
        assert answer.as_numpy("encoded").tolist() == [b"hello"]


def test_models_cannot_be_loaded_or_unloaded_even_with_the_key(light: TritonServer) -> None:
    """Model control is off: with it, the load API takes a model's code from the network."""
    files = {"config": '{"backend": "python"}', "file:1/model.py": "aW1wb3J0IG9z"}
    for path, body in (("light/unload", {}), ("light/load", {}), ("attack/load", {"parameters": files})):
        status, text = ask(light.address_http, "POST", f"/v2/repository/models/{path}", body, light.access.http_headers)
        assert status == 503, text
        assert "not allowed" in text
    assert light.is_model_ready("light")
    assert not light.is_model_ready("attack")


def test_the_key_is_in_no_command_line_no_model_and_no_log(light: TritonServer, light_log: Path) -> None:
    """All that other users can read of processes is free of it, and so is what the models' processes hold."""
    key = light.access.key
    for process in psutil.process_iter(["cmdline"]):
        assert not any(key in argument for argument in process.info["cmdline"] or ()), process
    stubs = [psutil.Process(pid) for pid in light.stub_pids()]
    assert len(stubs) == 2
    for process in (psutil.Process(light.pid), *stubs):
        assert key not in "\0".join(process.environ().values())
    log = light_log.read_text()
    assert "Started GRPCInferenceService" in log
    assert key not in log
    assert key not in repr(light.access)
    assert not any(key in line for line in light.log_tail())


def test_the_key_is_not_told_when_the_server_refuses_its_arguments(light_repository: Path, tmp_path: Path) -> None:
    """Triton repeats arguments that it does not like."""
    access = Access(("nonsense",))
    with TritonServer(light_repository, access=access, log_file=tmp_path / "log") as server:
        assert server.wait(READY_S) is not None
        assert "nonsense" in server.describe_exit()
        assert access.key not in server.describe_exit()
    assert access.key not in (tmp_path / "log").read_text()


def test_every_server_has_a_key_of_its_own_unless_one_is_given() -> None:
    keys = {Access().key for _ in range(20)}
    assert len(keys) == 20
    assert all(len(key) >= 40 for key in keys)


@pytest.mark.parametrize("key", ["", "short", "x" * 15, "with space in the key", "comma,comma,comma,comma", "ä" * 20])
def test_a_weak_key_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ArgumentError, match="must be at least 16 characters") as caught:
        Access(key=key)
    assert not key or key not in str(caught.value)


def test_the_key_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("a-key-from-the-file\n")
    file.chmod(0o640)
    assert read_key({"ADMIN_KEY": "another-key-for-us"}, file) == "a-key-from-the-file"
    assert read_key({"ADMIN_KEY": "another-key-for-us"}, None) == "another-key-for-us"
    assert read_key({"ADMIN_KEY": ""}, None) is None
    file.chmod(0o644)
    with pytest.raises(ArgumentError, match=r"Everyone on this machine can read .* chmod o="):
        read_key({}, file)
    file.write_text(" \n")
    file.chmod(0o600)
    with pytest.raises(ArgumentError, match="is empty"):
        read_key({}, file)
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_key({}, tmp_path / "none")


def test_a_weak_key_is_named_by_what_it_was_set_with(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("tooshort")
    file.chmod(0o600)
    with pytest.raises(ArgumentError, match=rf"^The key in the file {file} must be at least 16 characters") as caught:
        read_key({"ADMIN_KEY": "another-one-that-is-long-enough"}, file)
    assert "ADMIN_KEY" not in str(caught.value)
    with pytest.raises(ArgumentError, match=r"^The key in ADMIN_KEY must be at least 16 characters"):
        read_key({"ADMIN_KEY": "tooshort"}, None)
    with pytest.raises(ArgumentError, match=r"^The administrator's key must be at least 16 characters"):
        Access(key="tooshort")


def test_which_endpoints_are_restricted_is_read() -> None:
    assert parse_apis("statistics, trace,statistics") == ("statistics", "trace")
    assert parse_apis(" none ") == ()
    assert parse_apis("") == RESTRICTABLE, "nothing is opened by a variable that was left empty"
    with pytest.raises(ArgumentError, match="'statistic' cannot be restricted; did you mean 'statistics'"):
        parse_apis("statistic")
    with pytest.raises(ArgumentError, match="'inference' cannot be restricted"):
        parse_apis("inference")


def test_restriction_can_be_narrowed(light_repository: Path) -> None:
    """`RESTRICTED_APIS` opens what it leaves out, and nothing else."""
    with TritonServer(light_repository, access=Access(("model-repository", "logging"))) as server:
        server.wait_ready(READY_S)
        assert ask(server.address_http, "GET", "/v2/models/stats")[0] == 200
        assert ask(server.address_http, "GET", "/v2/logging")[0] == 403
        assert ask(server.address_http, "POST", "/v2/repository/index", {})[0] == 403


def test_hiding_says_so_if_it_cannot() -> None:
    """A process that is gone, and a secret that stays (in this process's own name for itself, say)."""
    assert hide(2**22 + 1, "secret") is False
    assert hide(os.getpid(), PLACEHOLDER) is True, "there is nothing to hide"


def test_everything_listens_on_loopback(light: TritonServer) -> None:
    listening = {
        connection.laddr.ip.removeprefix("::ffff:")
        for connection in psutil.Process(light.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_metrics_stay_on_loopback_when_requests_come_from_everywhere(light_repository: Path) -> None:
    with TritonServer(light_repository, host="0.0.0.0") as server:
        server.wait_ready(READY_S)
        listening = {
            connection.laddr.port: connection.laddr.ip.removeprefix("::ffff:")
            for connection in psutil.Process(server.pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        addresses = server.addresses
        assert listening[addresses.metrics_port] == "127.0.0.1"
        assert {listening[addresses.http_port], listening[addresses.grpc_port]} <= {"0.0.0.0", "::"}
        assert addresses.is_public
