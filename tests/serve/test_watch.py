"""How a stub's death is told from its end."""

from __future__ import annotations

import signal

import pytest

from diffusion_backend.engine import EXIT_HUNG
from diffusion_backend.serve.watch import Stub, StubDeath, find_stubs


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
