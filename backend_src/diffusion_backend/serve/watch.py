"""Notice at once when a stub, the process in which a Python model runs, dies under the server.

The server of this release goes on as if nothing had happened: the model stays "ready" and callers wait for ever. So the
launcher watches the stubs and takes the server down.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from diffusion_backend.engine.watchdog import EXIT_HUNG
from diffusion_backend.serve.layout import STUB_NAME

_RESCAN_S = 0.5
"""How often to look for new stubs where models come and go, and for dead ones where the kernel has no pidfd."""

_REAP_S = 1.0
"""The server collects a stub that it ends itself within this time: a thread of it does nothing but wait for that."""


@dataclass(frozen=True)
class Stub:
    """One stub process.

    Attributes:
        pid: its process id.
        model: the model's name, "" if it cannot be told.
        instance: the model instance's name, such as ``emoji_0``.
    """

    pid: int
    model: str
    instance: str


@dataclass(frozen=True)
class StubDeath:
    """A stub that ended although nobody had stopped its model.

    Attributes:
        stub: the stub.
        status: its wait status (see ``os.waitstatus_to_exitcode``), ``None`` if the server took it first.
    """

    stub: Stub
    status: int | None

    def __str__(self) -> str:
        model = f"model '{self.stub.model}'" if self.stub.model else "a model"
        return f"the Python process of {model} (process {self.stub.pid}) {self._how()}"

    def _how(self) -> str:
        if self.status is None:
            return "died"
        code = os.waitstatus_to_exitcode(self.status)
        if code == EXIT_HUNG:
            return "ended itself, as its work took longer than watchdog_timeout_s"
        if code >= 0:
            return f"ended with exit code {code}"
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            hint = ", most often by the kernel because memory ran out" if name == "SIGKILL" else ""
            return f"was ended by {name}{hint}"
        return f"was ended by signal {-code}"


def find_stubs(server: int) -> list[Stub]:
    """Return the live stubs of the server with this process id; none if the server is gone."""
    stubs = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(server).children():
            with contextlib.suppress(psutil.Error, IndexError):
                command = child.cmdline()  # empty for a zombie
                if Path(command[0]).name == STUB_NAME:
                    stubs.append(_describe(child.pid, command))
    return stubs


def end_stubs(shm_prefix: str, timeout: float = 5.0) -> None:
    """End the stubs of a server that is gone, known by the shared memory they use, and wait for that.

    Args:
        shm_prefix: what the names of that server's shared memory regions begin with.
        timeout: seconds.
    """
    orphans = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, IndexError):
            command = process.cmdline()
            if Path(command[0]).name == STUB_NAME and command[2].startswith(shm_prefix):
                process.kill()
                orphans.append(process)
    psutil.wait_procs(orphans, timeout)


class StubWatch:
    """Watches the stubs of one server from a thread of its own until it is stopped or one of them dies.

    Args:
        server: process id of the server.
        steady: whether models stay loaded until the server stops (model control mode ``none``), so that any stub
            that ends before has died. Otherwise stubs of unloaded models end, too, and new ones come.
        is_model_ready: tells whether a model takes requests; asked where it is not clear why a stub ended.
        on_death: called once, by the watching thread, with the stub that died.
    """

    def __init__(
        self,
        server: int,
        *,
        steady: bool,
        is_model_ready: Callable[[str], bool],
        on_death: Callable[[StubDeath], None],
    ) -> None:
        self._server = server
        self._steady = steady
        self._is_model_ready = is_model_ready
        self._on_death = on_death
        self._stubs: dict[int, Stub] = {}
        self._pidfds: dict[int, int] = {}  # by process id
        self._unloading = False  # whether the server unloads its models, as it stops
        # Something to read in this pipe means stop. Not an Event: a signal handler must not take its lock twice.
        self._wake, self._notify = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="stub-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch; to be called once the models are loaded, as loading uses short-lived stubs of its own."""
        self._scan()
        self._thread.start()

    def expect_unloading(self) -> None:
        """Take note that the server is about to stop, and will end stubs itself; one that dies is told all the same.

        May be called by any thread, and again.
        """
        self._unloading = True

    def stop(self) -> None:
        """Stop watching, before the server is ended at once; may be called by any thread, and again."""
        with contextlib.suppress(OSError):
            os.write(self._notify, b"x")

    def close(self) -> None:
        """Stop, wait for the thread and give back what it held; not to be called by ``on_death``."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()
        # A later stop() must not write to what another file has got for its number.
        descriptors = {*self._pidfds.values(), self._wake, self._notify} - {-1}
        self._wake = self._notify = -1
        self._pidfds.clear()
        for descriptor in descriptors:
            os.close(descriptor)

    def _run(self) -> None:
        while not self._is_stopped():
            for stub in self._wait():
                death = self._judge(stub)
                if death is not None and not self._is_stopped():
                    self._on_death(death)
                    return
            if not self._steady:
                self._scan()

    def _is_stopped(self) -> bool:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        return bool(poller.poll(0))

    def _scan(self) -> None:
        """Begin to watch the stubs that are new."""
        for stub in find_stubs(self._server):
            if stub.pid in self._stubs:
                continue
            self._stubs[stub.pid] = stub
            with contextlib.suppress(OSError):  # a kernel without pidfd, or gone already: found by _has_ended
                self._pidfds[stub.pid] = os.pidfd_open(stub.pid)

    def _wait(self) -> list[Stub]:
        """Sleep until a stub has ended, or new ones may have come; return those that have ended."""
        poller = select.poll()
        for descriptor in (self._wake, *self._pidfds.values()):
            poller.register(descriptor, select.POLLIN)
        sleeps = self._steady and len(self._pidfds) == len(self._stubs)
        readable = {descriptor for descriptor, _ in poller.poll(None if sleeps else _RESCAN_S * 1000)}
        ended = []
        for pid in list(self._stubs):
            pidfd = self._pidfds.get(pid)
            has_ended = pidfd in readable if pidfd is not None else _has_ended(pid)
            if has_ended:
                ended.append(self._stubs.pop(pid))
                if pidfd is not None:
                    os.close(self._pidfds.pop(pid))
        return ended

    def _judge(self, stub: Stub) -> StubDeath | None:
        """Tell a stub that died from one that the server has ended because its model was unloaded.

        Only the latter does the server collect. The exit status tells little: many stubs crash once they are done.
        """
        status = _exit_status(stub.pid)
        if _is_dead(self._server):
            return None  # it took the stub with it, and that is told elsewhere
        if self._steady and not self._unloading:
            return StubDeath(stub, status)
        deadline = time.monotonic() + _REAP_S
        while _is_uncollected(stub.pid):
            if time.monotonic() > deadline:
                return None if _is_dead(self._server) else StubDeath(stub, status)
            time.sleep(0.05)
        if status and not self._unloading and self._is_model_ready(stub.model):
            return StubDeath(stub, status)
        return None


def _describe(pid: int, command: list[str]) -> Stub:
    # STUB /repository/MODEL/VERSION/model.py REGION ... INSTANCE RUNTIME_DIR
    parts = Path(command[1]).parts
    return Stub(pid, model=parts[-3] if len(parts) >= 3 else "", instance=command[-2])


def _is_dead(pid: int) -> bool:
    """Return whether the process does nothing any more, though threads of it may still be on their way out."""
    fields = _stat(pid)
    return not fields or fields[0] in ("Z", "X")


def _has_ended(pid: int) -> bool:
    """Return whether all threads of the process are gone, so that its parent can collect it."""
    fields = _stat(pid)
    return not fields or (fields[0] in ("Z", "X") and int(fields[17]) <= 1)  # field 20 of proc(5)


def _is_uncollected(pid: int) -> bool:
    """Return whether the process has ended and its parent has not asked how."""
    fields = _stat(pid)
    return bool(fields) and fields[0] == "Z"


def _exit_status(pid: int) -> int | None:
    """Return the wait status of a dead process that nobody has collected yet."""
    fields = _stat(pid)
    return int(fields[49]) if fields and fields[0] in ("Z", "X") else None  # field 52 of proc(5)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()
