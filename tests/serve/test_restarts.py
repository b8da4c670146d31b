"""A server that died is started again as often as it is allowed to, and no more often."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from rich.console import Console

from diffusion_backend.serve import ServerExitError
from diffusion_backend.serve.app import App
from diffusion_backend.serve.restarts import MAX_PAUSE_S, WINDOW_S, Restarts
from tests.serve.client import generate
from tests.serve.conftest import DEADLINE_S, wait_until


def test_pauses_grow_and_end():
    restarts = Restarts(9, clock=lambda: 0.0)
    assert [restarts.next_pause() for _ in range(10)] == [
        1,
        2,
        4,
        8,
        16,
        32,
        MAX_PAUSE_S,
        MAX_PAUSE_S,
        MAX_PAUSE_S,
        None,
    ]


def test_restarts_are_counted_over_an_hour():
    now = [0.0]
    restarts = Restarts(2, clock=lambda: now[0])
    assert [restarts.next_pause() for _ in range(3)] == [1, 2, None]
    now[0] = WINDOW_S - 1
    assert restarts.next_pause() is None
    now[0] = WINDOW_S
    assert [restarts.next_pause() for _ in range(3)] == [1, 2, None]


def test_none_unless_told():
    assert Restarts(0).next_pause() is None


@pytest.mark.parametrize(("loading", "code"), [(True, 0), (False, 1)])
def test_a_signal_does_not_hide_that_a_server_that_served_has_died(monkeypatch, loading, code):
    """Both at the same moment, which no real server can be made to do; it is not started again either."""
    app = App(
        lambda *_: contextlib.nullcontext(), Console(), ready_timeout=1, strict=False, verbose=False, max_restarts=9
    )

    def die(_):
        app._has_served, app._loading = True, loading
        app._on_signal(signal.SIGTERM, None)
        raise ServerExitError("it died")

    monkeypatch.setattr(app, "_serve", die)
    assert app.run() == code


def test_a_dead_model_is_back_after_a_restart_and_the_second_death_is_the_end(repository, launch):
    repository.add_echo()
    launcher = launch(repository.path, "--max-restarts", "1")
    launcher.wait_ready()
    first = launcher.server_pid()
    os.kill(launcher.stub_pid(), signal.SIGKILL)
    launcher.wait_for("starting the server again in 1 s")
    wait_until(lambda: launcher.output.count("Ctrl-C stops the server") == 2, "ready again", 2 * DEADLINE_S)
    assert generate(launcher.url, "hello") == "hello"
    assert launcher.server_pid() != first
    os.kill(launcher.server_pid(), signal.SIGKILL)
    assert launcher.wait(10) == 1
    assert launcher.output.count("starting the server again") == 1
    assert launcher.leftovers() == []


def test_a_server_that_never_served_is_not_started_again(repository, launch):
    repository.add_broken()
    launcher = launch(repository.path, "--max-restarts", "5")
    assert launcher.wait() == 1
    assert "starting the server again" not in launcher.output


def test_ctrl_c_in_the_pause_ends_at_once(repository, launch):
    repository.add_echo()
    launcher = launch(repository.path, "--max-restarts", "9")
    launcher.wait_ready()
    for number in range(1, 4):  # until the pause is long enough to hit
        os.kill(launcher.stub_pid(), signal.SIGKILL)
        launcher.wait_for(f"starting the server again in {2 ** (number - 1)} s")
        if number < 3:
            wait_until(
                lambda number=number: launcher.output.count("Ctrl-C stops the server") == number + 1, "ready again"
            )
    launcher.signal(signal.SIGTERM)
    assert launcher.wait(10) == 0
    assert launcher.leftovers() == []
