"""The process between the launcher and the server: whatever dies, nothing of the server is left behind.

It starts the server, adopts every orphan that the server or its stubs leave, and lives until all of them are gone.
Then it removes the server's shared memory and temporary folder. If the launcher dies, even by kill -9, its end of the
pipe on standard input closes and the keeper ends the server. If the keeper dies, the kernel ends the server.

Run as a file by ``process.py``, isolated and without site packages so that it starts at once: standard library only.

    python -I -S keeper.py STATUS_FD SHM_PREFIX REMOVE_DIR COMMAND...

PLACEHOLDER in the command stands for the secret in the environment variable SECRET_VARIABLE, which the server does not
inherit: command lines can be read by all users, an environment by its owner only.

Reads one letter a command from standard input: ``t`` asks the server to stop (SIGTERM), ``k`` ends it (SIGKILL).
Writes to STATUS_FD the lines ``pid N`` once the server runs and ``exit N`` after all is cleaned up, where N is the
server's exit code, or minus the number of the signal that ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time

PLACEHOLDER = "@SECRET@"
SECRET_VARIABLE = "DIFFUSION_KEEPER_SECRET"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_SWEEP_S = 5.0


def main(argv: list[str]) -> int:
    """Run the command and see it and all its descendants out."""
    status_fd, prefix, folder, command = int(argv[0]), argv[1], argv[2], argv[3:]
    secret = os.environ.pop(SECRET_VARIABLE, PLACEHOLDER)
    command = [argument.replace(PLACEHOLDER, secret) for argument in command]
    os.set_inheritable(status_fd, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # The launcher decides when the server stops; a signal sent to the whole group must not end its keeper. Handlers,
    # not SIG_IGN: the server would inherit that.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    wake, notify = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(notify, warn_on_full_buffer=False)
    server = _spawn(command)
    _tell(status_fd, f"pid {server}")
    code = _keep(server, wake)
    _sweep()
    remove_regions(prefix)
    remove_folder(folder)
    _tell(status_fd, f"exit {code}")
    return 0


def remove_regions(prefix: str) -> None:
    """Remove the shared memory regions whose names begin with ``prefix``; the server's stubs must be gone."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/shm"):
            if name.startswith(prefix):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join("/dev/shm", name))


def remove_folder(folder: str) -> None:
    """Remove a temporary folder, whatever of it is there."""
    shutil.rmtree(folder, ignore_errors=True)


def _keep(server: int, wake: int) -> int:
    """Carry out commands until the server has ended; return its exit code, negative for a signal."""
    inputs = [0, wake]
    while True:
        ready, _, _ = select.select(inputs, [], [])
        if 0 in ready:
            letters = os.read(0, 64)
            if not letters:
                inputs.remove(0)
            # The server has not been reaped, so its number cannot belong to another process.
            if b"k" in letters or not letters:
                os.kill(server, signal.SIGKILL)
            elif b"t" in letters:
                os.kill(server, signal.SIGTERM)
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 1024)
        for pid, code in _reap():
            if pid == server:
                return code


def _spawn(command: list[str]) -> int:
    """Start the command so that it dies with this process; return its process id."""
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(127)  # the keeper died before the line above
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execv(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def _sweep() -> None:
    """End and reap whatever the server left: stubs that outlived it, and their children."""
    deadline = time.monotonic() + _SWEEP_S
    while time.monotonic() < deadline:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            for _ in _reap():
                pass
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        time.sleep(0.01)  # a killed process takes a moment to become a zombie


def _reap() -> list[tuple[int, int]]:
    """Collect the children that have ended, as (process id, exit code)."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def _children() -> list[int]:
    """Return the process ids of this process's children."""
    me, found = os.getpid(), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == me:
                    found.append(int(name))
    return found


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _tell(status_fd: int, line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the launcher is gone
        os.write(status_fd, f"{line}\n".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
