"""``TritonServer`` as tests and benchmarks use it, against the real server."""

from __future__ import annotations

import contextlib
import errno
import functools
import http.client
import os
import signal
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from diffusion_backend.serve import (
    ArgumentError,
    LoadError,
    PortError,
    ServeError,
    ServerExitError,
    TritonServer,
    drain,
    endpoints,
)
from diffusion_backend.serve import server as server_module
from diffusion_backend.serve.ports import free_ports
from diffusion_backend.serve.watch import find_stubs
from tests.serve.client import Pending, generate, post
from tests.serve.conftest import DEADLINE_S, PLAIN_CONFIG, is_gone, wait_until


def _inputs(text: str, delay_s: float, shape: tuple[int, ...] = (1,)) -> list[grpcclient.InferInput]:
    inputs = [grpcclient.InferInput("text", (1,), "BYTES"), grpcclient.InferInput("delay_s", shape, "FP32")]
    inputs[0].set_data_from_numpy(np.array([text.encode()], dtype=object))
    inputs[1].set_data_from_numpy(np.full(shape, delay_s, dtype=np.float32))
    return inputs


def test_two_servers_at_once_answer_over_http_and_grpc(repository):
    repository.add_echo()
    with TritonServer(repository.path) as first, TritonServer(repository.path) as second:
        for server in (first, second):
            assert [(model.name, model.version, model.state) for model in server.wait_ready()] == [
                ("echo", "1", "READY")
            ]
            assert generate(server.url_http, "hello") == "hello"
            with grpcclient.InferenceServerClient(server.url_grpc) as client:
                assert client.is_model_ready("echo")
            assert len(server.stub_pids()) == 1
        pids = {first.pid, second.pid, *first.stub_pids(), *second.stub_pids()}
        assert len(pids) == 4
    assert first.returncode == second.returncode == -signal.SIGKILL
    assert all(is_gone(pid) for pid in pids)


def test_a_server_starts_once(repository):
    repository.add_echo()
    server = TritonServer(repository.path)
    with pytest.raises(ServeError, match=r"Call start\(\) first"):
        _ = server.url_http
    with server, pytest.raises(ServeError, match="started before"):
        server.start()


def test_log_goes_to_the_file_and_to_the_callback(repository, tmp_path):
    repository.add_echo()
    lines = []
    with TritonServer(repository.path, log_file=tmp_path / "log", on_line=lines.append) as server:
        server.wait_ready()
        assert any("successfully loaded 'echo'" in line for line in server.log_tail())
    assert "successfully loaded 'echo'" in (tmp_path / "log").read_text()
    assert any(line.text == "loading: echo:1" for line in lines)


def test_failing_start_leaves_no_folder(repository, tmp_path, monkeypatch):
    repository.add_echo()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with TritonServer(repository.path) as server:
        server.wait_ready()
        with pytest.raises(PortError, match="METRICS_PORT="):
            TritonServer(repository.path, metrics_port=server.addresses.metrics_port).start()
    with pytest.raises(ArgumentError, match=r"The log file /dev/null/log cannot be written: Not a directory"):
        TritonServer(repository.path, log_file="/dev/null/log").start()
    assert [path for path in tmp_path.iterdir() if path.name.startswith("diffusion_backend_")] == []


@pytest.mark.parametrize(
    "pair", [("http_port", "grpc_port"), ("http_port", "metrics_port"), ("grpc_port", "metrics_port")]
)
def test_one_port_given_twice_is_refused_before_the_start(repository, pair):
    repository.add_echo()
    (port,) = free_ports("127.0.0.1", 1)
    server = TritonServer(repository.path, **dict.fromkeys(pair, port))
    with pytest.raises(PortError, match=f"{pair[0].upper()} and {pair[1].upper()} are both {port}"):
        server.start()
    assert server.pid is None


def test_ports_that_are_not_given_are_none_that_are(repository, monkeypatch):
    """The free ports that are found first are those that were given."""
    repository.add_echo()
    given, *others = free_ports("127.0.0.1", 3)
    monkeypatch.setattr(server_module, "free_ports", lambda host, count: [given, *others][:count])
    with TritonServer(repository.path, metrics_port=given) as server:
        addresses = server.addresses
        assert [addresses.http_port, addresses.grpc_port, addresses.metrics_port] == [*others, given]


def test_server_that_ends_while_loading_is_reported_with_its_words(repository):
    repository.add_echo()
    with TritonServer(repository.path, extra_args=["--no-such-option"]) as server:
        with pytest.raises(ServerExitError, match="ended with exit code 1"):
            server.wait_ready()
        assert server.describe_exit().endswith("unrecognized option '--no-such-option'")


def test_load_error_leaves_the_server_running(repository):
    repository.add_broken()
    with TritonServer(repository.path) as server:
        with pytest.raises(LoadError, match="broken: ValueError: no weights"):
            server.wait_ready()
        assert server.is_running


def test_a_model_whose_configuration_is_refused_counts_as_failed(repository):
    """Triton lists it without a state; the reason is in its log only."""
    repository.add_echo()
    repository.add("negative", "", config="max_batch_size: -3\n")
    repository.add("unreadable", "", config="max_batch_size: many\n")
    with TritonServer(repository.path) as server:
        with pytest.raises(LoadError, match="Not every model could be loaded") as caught:
            server.wait_ready(strict=True)
        assert "negative: 'max_batch_size' must be non-negative value for negative\n" in str(caught.value)
        assert "unreadable: failed to read text proto from" in str(caught.value)
        states = {model.name: model.state for model in server.wait_ready()}
        assert states == {"echo": "READY", "negative": "UNAVAILABLE", "unreadable": "UNAVAILABLE"}


def test_unloading_a_model_is_no_death_but_killing_its_stub_is(repository):
    repository.add_echo()
    with TritonServer(repository.path, extra_args=["--model-control-mode=explicit", "--load-model", "echo"]) as server:
        server.wait_ready()
        (before,) = server.stub_pids()
        post(server.url_http, "/v2/repository/models/echo/unload", server.access.http_headers)
        wait_until(lambda: is_gone(before), "the stub of the unloaded model gone")
        post(server.url_http, "/v2/repository/models/echo/load", server.access.http_headers)
        assert generate(server.url_http, "hello") == "hello"
        (after,) = server.stub_pids()
        # The new stub is found by looking now and then; give the watch the time to.
        assert server._watch is not None
        wait_until(lambda: after in server._watch._stubs, "the new stub watched")
        assert server.is_running
        os.kill(after, signal.SIGKILL)
        assert server.wait(5) is not None
        assert server.failure is not None
        assert "model 'echo'" in server.failure


def test_a_death_is_noticed_where_the_kernel_has_no_pidfd(repository, monkeypatch):
    """Such a kernel is older than any that the server runs on here, so the call fails by hand."""

    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    repository.add_echo()
    with TritonServer(repository.path) as server:
        server.wait_ready()
        os.kill(server.stub_pids()[0], signal.SIGKILL)
        assert server.wait(DEADLINE_S) is not None
        assert server.failure is not None
        assert "was ended by SIGKILL" in server.failure


def test_watching_can_be_switched_off(repository):
    repository.add_echo()
    with TritonServer(repository.path, watch_stubs=False) as server:
        server.wait_ready()
        os.kill(server.stub_pids()[0], signal.SIGKILL)
        assert server.wait(1.0) is None


def test_drain_waits_for_the_running_request(repository):
    repository.add_echo(gauge=True)
    with TritonServer(repository.path) as server:
        server.wait_ready()
        request = Pending(server.url_http, delay_s=1.5)
        wait_until(functools.partial(_is_running, server), "the request runs")
        waits: list[str] = []
        assert server.drain(waits.append) is True
        assert request.wait() == "late"
        assert "requests: 1 running, 0 waiting" in waits
        assert server.returncode == 0


def test_a_model_that_dies_while_the_server_drains_ends_it(repository):
    repository.add_echo(gauge=True)
    repository.add_echo("idle", gauge=True)
    with TritonServer(repository.path, exit_timeout=600) as server:
        server.wait_ready()
        victim = {stub.model: stub.pid for stub in find_stubs(server.pid)}["echo"]
        request = Pending(server.url_http, delay_s=600.0)
        wait_until(functools.partial(_is_running, server), "the request runs")
        begin = time.monotonic()
        assert server.drain(lambda what: os.kill(victim, signal.SIGKILL) if "1 running" in what else None) is False
        assert isinstance(request.wait(), Exception)
        assert time.monotonic() - begin < 60
        assert server.failure is not None
        assert f"model 'echo' (process {victim}) was ended by SIGKILL" in server.failure


def test_models_that_take_their_time_to_end_have_not_died(repository, monkeypatch):
    """One process of the model is gone for seconds while another still keeps it from being unloaded."""
    monkeypatch.setattr(drain, "IDLE_S", 60.0)
    repository.add(
        "slow_to_end",
        "import time\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        return []\n"
        "    def finalize(self):\n"
        "        time.sleep(3)\n",
        config="instance_group [ { kind: KIND_CPU count: 2 } ]\n" + PLAIN_CONFIG,
    )
    with TritonServer(repository.path, exit_timeout=60) as server:
        server.wait_ready()
        assert len(server.stub_pids()) == 2
        assert server.drain() is True
        assert server.failure is None
        assert server.returncode == 0


def test_drain_with_an_open_connection_does_not_take_the_whole_timeout(repository, monkeypatch):
    """Triton waits for connections that a client keeps open, though no request is on them."""
    monkeypatch.setattr(drain, "IDLE_S", 1.5)
    repository.add_echo(gauge=True)
    with TritonServer(repository.path, exit_timeout=60) as server:
        server.wait_ready()
        waits: list[str] = []
        with contextlib.closing(http.client.HTTPConnection(server.address_http)) as connection:
            connection.request("GET", "/v2")
            connection.getresponse().read()
            begin = time.monotonic()
            assert server.drain(waits.append) is True
        assert time.monotonic() - begin < 30
        assert "does not exit, so it is ended" in waits[-1]


def test_drain_ends_a_server_that_leaked_a_refused_request(repository, monkeypatch):
    """Triton keeps the model of a request that it refused as long as the stream it came on is open."""
    monkeypatch.setattr(drain, "IDLE_S", 3.0)
    repository.add_echo(gauge=True)
    answers = []
    with TritonServer(repository.path, exit_timeout=60) as server:
        server.wait_ready()
        client = grpcclient.InferenceServerClient(server.url_grpc)
        client.start_stream(lambda result, error: answers.append((result, error)))
        client.async_stream_infer("echo", _inputs("refused", 0.0, shape=(1, 1, 1)))
        client.async_stream_infer("echo", _inputs("late", 1.0))
        wait_until(functools.partial(_is_running, server), "the request runs")
        begin = time.monotonic()
        assert server.drain() is True
        assert time.monotonic() - begin < 30
        wait_until(lambda: len(answers) >= 2, "both answered")
        client.stop_stream(cancel_requests=True)
        client.close()
    assert "unexpected shape" in str(answers[0][1])
    assert answers[1][0].as_numpy("text")[0] == b"late"


def test_drain_leaves_a_model_alone_that_does_not_tell_what_it_works_on(repository, monkeypatch):
    """A model of somebody else, beside an idle one of ours, works for longer than an idle server is given to stop."""
    monkeypatch.setattr(drain, "IDLE_S", 1.0)
    repository.add_echo("foreign")
    repository.add_echo("ours", gauge=True)
    with TritonServer(repository.path, exit_timeout=60) as server:
        server.wait_ready()
        request = Pending(server.url_http, delay_s=5.0, model="foreign")
        wait_until(lambda: drain._count_clients(server) == 1, "the request is there")
        waits: list[str] = []
        assert server.drain(waits.append) is True
        assert request.wait() == "late"
        assert "clients that are connected, perhaps for foreign: 1" in waits


def test_a_server_that_stops_takes_nothing_new_and_is_not_ready(repository):
    """The running one ends with its result meanwhile."""
    repository.add_echo(gauge=True)
    with TritonServer(repository.path) as server:
        server.wait_ready()
        answers = []
        with grpcclient.InferenceServerClient(server.url_grpc) as client:
            client.start_stream(lambda result, error: answers.append((result, error)))
            client.async_stream_infer("echo", _inputs("late", 4.0))
            wait_until(functools.partial(_is_running, server), "the request runs")
            assert client.is_server_ready()
            drained = []
            thread = threading.Thread(target=lambda: drained.append(server.drain()))
            thread.start()
            wait_until(lambda: not endpoints.is_model_ready("127.0.0.1", server.addresses.http_port, "echo"), "HTTP")
            wait_until(lambda: not _is_ready(client), "not ready over gRPC")
            assert isinstance(Pending(server.url_http, 0.0).wait(), Exception), "taken over HTTP"
            client.async_stream_infer("echo", _inputs("new", 0.0))
            wait_until(lambda: len(answers) == 2, "both answered")
        thread.join(60)
    assert drained == [True]
    assert "has no available versions" in str(answers[0][1]), "taken over gRPC"
    assert answers[1][0].as_numpy("text")[0] == b"late"


def _is_ready(client: grpcclient.InferenceServerClient) -> bool:
    try:
        return bool(client.is_model_ready("echo"))
    except InferenceServerException:
        return False


def test_drain_cuts_off_what_outlasts_the_exit_timeout(repository, monkeypatch):
    monkeypatch.setattr(drain, "OVERTIME_S", 0.5)
    repository.add_echo()
    with TritonServer(repository.path, exit_timeout=1) as server:
        server.wait_ready()
        request = Pending(server.url_http, delay_s=600.0)
        wait_until(lambda: drain._count_clients(server) == 1, "the request is there")
        waits: list[str] = []
        assert server.drain(waits.append) is False
        assert waits[0] == "clients that are connected, perhaps for echo: 1"
        assert isinstance(request.wait(), Exception)


def test_close_may_be_called_again_and_before_the_start(repository):
    repository.add_echo()
    TritonServer(repository.path).close()
    with TritonServer(repository.path) as server:
        server.wait_ready()
        server.close()
        server.close()
        assert not server.is_running
        assert server.stub_pids() == []
        assert server.drain() is True


def test_helper_processes_of_a_model_end_with_the_server(repository, tmp_path):
    pid_file = tmp_path / "helper.pid"
    repository.add(
        "helper",
        "import subprocess, sys\n"
        "class TritonPythonModel:\n"
        "    def initialize(self, args):\n"
        "        helper = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"        open({str(pid_file)!r}, 'w').write(str(helper.pid))\n"
        "    def execute(self, requests):\n"
        "        return []\n",
    )
    with TritonServer(repository.path) as server:
        server.wait_ready()
        helper = int(Path(pid_file).read_text())
        assert not is_gone(helper)
        os.kill(server.stub_pids()[0], signal.SIGKILL)
        assert server.wait(10) is not None
        assert is_gone(helper)


def _metrics(server: TritonServer) -> str:
    with urllib.request.urlopen(server.url_metrics, timeout=60) as page:
        return page.read().decode()


def _is_running(server: TritonServer) -> bool:
    return 'diffusion_requests_running{model="echo"} 1' in _metrics(server)
