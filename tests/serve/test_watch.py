"""How a stub's death is told from its end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from diffusion_backend.engine import EXIT_HUNG
from diffusion_backend.serve import watch
from diffusion_backend.serve.watch import Stub, StubDeath, find_stubs
from tests.serve.conftest import wait_until


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (signal.SIGKILL, "was ended by SIGKILL, most often by the kernel because memory ran out"),
        (signal.SIGSEGV, "was ended by SIGSEGV"),
        (3 << 8, "ended with exit code 3"),
        (EXIT_HUNG << 8, "ended itself, as its work took longer than watchdog_timeout_s"),
        (0, "ended with exit code 0"),
        (None, "died"),
    ],
)
def test_death_in_words(status, how):
    death = StubDeath(Stub(7, "emoji", "emoji_0"), status)
    assert str(death) == f"the Python process of model 'emoji' (process 7) {how}"


def test_death_of_an_unknown_model_in_words():
    assert str(StubDeath(Stub(7, "", ""), None)) == "the Python process of a model (process 7) died"


def test_no_server_no_stubs():
    assert find_stubs(2**22 + 1) == []


def test_a_process_has_ended_with_its_last_thread():
    """Until then it shows as dead, but its parent cannot collect it; giving back a device's memory takes long."""
    leave_one_thread = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", leave_one_thread]) as process:
        try:
            wait_until(lambda: watch._is_dead(process.pid), "the first thread gone")
            assert not watch._has_ended(process.pid)
        finally:
            process.kill()
        wait_until(lambda: watch._has_ended(process.pid), "all threads gone")
        assert watch._is_uncollected(process.pid)
        process.wait()
        assert not watch._is_uncollected(process.pid)
