"""When a server that stops is idle, and what its end is called."""

from __future__ import annotations

from diffusion_backend.serve import drain


def test_what_holds_since_the_last_look_holds():
    now = [7.0]
    span = drain._Span(clock=lambda: now[0])
    assert not span.holds
    span.note(None)
    assert not span.holds
    span.note(True)
    assert (span.holds, span.lasted) == (True, 0.0)
    now[0] = 9.0
    span.note(None)
    assert (span.holds, span.lasted) == (True, 0.0), "changed by a look that told nothing"
    span.note(True)
    assert span.lasted == 2.0
    span.note(False)
    assert (span.holds, span.lasted) == (False, 0.0)


class Stopping:
    """Stands in for a server whose work ends just when its time is up, which no real one can be made to do."""

    is_running = True
    is_unloaded = False
    failure = None
    exit_timeout = 0.0
    returncode: int | None = None

    def __init__(self) -> None:
        self.told = False
        self._looks = 1

    def terminate(self) -> None:
        """It is asked to stop."""

    def wait(self, timeout: float) -> int | None:
        """Say once that it still runs."""
        del timeout
        if not self._looks:
            self.returncode = 0
        self._looks -= 1
        return self.returncode

    def tell_stopping(self) -> None:
        """Take note that the callers are told."""
        self.told = True

    def close(self) -> None:
        """Nothing is left."""


def test_a_server_that_is_idle_at_the_very_end_of_its_time_cut_nobody_off(monkeypatch):
    monkeypatch.setattr(drain, "_Look", lambda server: lambda: "")
    server = Stopping()
    assert drain.drain(server) is True
    assert not server.told
