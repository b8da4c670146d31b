"""Models that come and go, processes that are killed, and a machine with hardly any shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from tritonclient.utils import InferenceServerException

from diffusion_backend.serve.server import TritonServer
from tests.server.conftest import LONG, READY_S, Repository, rounds
from tests.server.test_shutdown import Launched
from tests.support.client import DEADLINE_S, Served, eventually
from tools.soak.watch import Watch

MODEL = {"step_batching": "off", "warmup_sizes": "32x32"}
SMALL_SHM = 'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$0" "$@"'


def control(server: TritonServer, what: str) -> None:
    """Load or unload the model `guest`; returns when that is done."""
    url = f"{server.url_http}/v2/repository/models/guest/{what}"
    request = urllib.request.Request(url, b"{}", dict(server.access.http_headers))
    with urllib.request.urlopen(request, timeout=READY_S) as response:
        response.read()


def test_loading_and_unloading_again_and_again_50(tmp_path):
    """Case 50: half of the times with calls in flight: each is answered, and nothing is left of what was unloaded."""
    repository = Repository(tmp_path / "repository")
    repository.add_streaming("guest", MODEL)
    arguments = ["--model-control-mode=explicit", "--load-model=guest"]
    with TritonServer(repository.path, extra_args=arguments, env=os.environ | {"HF_HUB_OFFLINE": "1"}) as server:
        server.wait_ready(READY_S)
        served = Served.of(server)
        baseline = None
        for cycle in range(rounds(4, 20)):
            values = {"prompt": "a", "height": 32, "width": 32, "progress": True}
            calls = []
            if cycle % 2:
                calls = [served.stream("guest", num_inference_steps=60, **values).wait_step() for _ in range(3)]
            else:
                served.stream("guest", num_inference_steps=2, **values).result()
            (stub,) = server.stub_pids()
            control(server, "unload")
            for call in calls:
                assert call.result().images.shape == (1, 32, 32, 3), "it was running, and may end"
            eventually(lambda stub=stub: not psutil.pid_exists(stub), "the model's process is gone")
            with pytest.raises(InferenceServerException, match="unknown model"):
                served.stream("guest", num_inference_steps=2, **values).result()
            sample = Watch(server, lambda: 0).take(idle=True)
            found = sample.processes["tritonserver"]
            baseline = baseline or (found, sample.shm_regions)
            assert found.descriptors <= baseline[0].descriptors + 4, cycle
            assert found.threads <= baseline[0].threads + 8, cycle
            assert sample.shm_regions <= baseline[1], cycle
            assert found.own_kib <= baseline[0].own_kib + 16 * 1024, cycle
            control(server, "load")
            assert server.is_model_ready("guest")
        served.close()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One model with its twin."""
    made = Repository(tmp_path / "repository")
    made.add_streaming("five", {**MODEL, "max_num_seqs": "5"})
    made.add_twin("five_unary")
    return made.path


def test_kill_of_the_server_during_five_calls_49(repository):
    """Case 49: all its processes are gone within 10 s, the calls end, and no shared memory is left."""
    launched = Launched(repository)
    try:
        launched.wait_ready()
        children = psutil.Process(launched.process.pid).children(recursive=True)
        (server,) = [child for child in children if child.name() == "tritonserver"]
        calls = [launched.served.stream("five", prompt="a", **LONG).wait_step() for _ in range(5)]
        begin = time.monotonic()
        server.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(children, 10)
        assert alive == []
        for call in calls:
            call.wait(10)
            assert call.error is not None
        assert launched.process.wait(DEADLINE_S) != 0
        print(f"all gone after {time.monotonic() - begin:.1f} s")
        prefix = f"diffusion_{launched.process.pid}_"
        assert [name for name in os.listdir("/dev/shm") if name.startswith(prefix)] == []
    finally:
        launched.close()


def test_a_large_output_in_a_small_shared_memory_44(repository):
    """Case 44, with 3 MB: an output that does not fit is an error, and the next call is served."""
    command = ["unshare", "--mount", "sh", "-c", SMALL_SHM.format(size="3m")]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may give a process a /dev/shm of its own")
    launched = Launched(repository, prefix=command)
    try:
        launched.wait_ready()
        served = launched.served
        large = {"num_inference_steps": 1, "height": 208, "width": 208, "num_outputs_per_prompt": 16}
        call = served.stream("five", prompt="a", guidance_scale=1.0, **large).wait(READY_S)
        print(f"the large one: {call.error}")
        assert "does not fit into the server's shared memory" in str(call.error), "2 MB fitted into 1"
        assert call.error.status() == "StatusCode.UNAVAILABLE"
        answer = served.infer("five_unary", prompt="a", seed=3, num_inference_steps=2, height=32, width=32)
        assert answer.seeds == [3]
    finally:
        launched.close()
