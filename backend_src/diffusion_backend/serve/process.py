"""The server's process as its launcher holds it: run under a keeper, with its log read and its end told."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from diffusion_backend.serve import keeper
from diffusion_backend.serve.access import hide
from diffusion_backend.serve.errors import ArgumentError
from diffusion_backend.serve.log import LineCallback, LogLine, parse_line
from diffusion_backend.serve.watch import end_stubs

_START_S = 30.0
_READ_S = 5.0
_MAX_LINES = 500
"""The server's help, which it prints when it does not know an argument, has 400."""

_logger = logging.getLogger(__name__)


class ServerProcess:
    """A tritonserver that runs from the making of this object until ``returncode`` is there.

    Methods may be called from any thread, ``terminate`` and ``kill`` also in a signal handler.

    Args:
        command: the server's command line.
        secret: what is in it, but not to be seen in the system's list of processes, nor in the log.
        env: its environment.
        shm_prefix: what the names of its shared memory regions begin with; they are removed at its end.
        folder: temporary folder that is removed at its end.
        log_file: file to which its log is appended.
        on_line: called with every line of its log, by the thread that reads it.
        on_end: called once all of it is gone and cleaned up, by another thread.

    Raises:
        ArgumentError: the log file cannot be written.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        secret: str,
        env: Mapping[str, str],
        shm_prefix: str,
        folder: Path,
        log_file: str | os.PathLike[str] | None,
        on_line: LineCallback,
        on_end: Callable[[], None],
    ) -> None:
        self._secret = secret
        self._shm_prefix = shm_prefix
        self._folder = folder
        self._on_line = on_line
        self._on_end = on_end
        self._changed = threading.Condition()  # guards what follows
        self._lines: deque[LogLine] = deque(maxlen=_MAX_LINES)
        self._pid: int | None = None
        self._returncode: int | None = None

        shown = [argument.replace(secret, keeper.PLACEHOLDER) for argument in command]
        log = _open_log(log_file) if log_file is not None else None
        status_read, status_write = os.pipe()
        try:
            self._keeper = subprocess.Popen(
                (sys.executable, "-I", "-S", keeper.__file__, str(status_write), shm_prefix, str(folder), *shown),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**env, keeper.SECRET_VARIABLE: secret},
                pass_fds=(status_write,),
                start_new_session=True,  # the terminal's Ctrl-C reaches the launcher only
            )
        except BaseException:
            os.close(status_read)
            if log is not None:
                log.close()
            raise
        finally:
            os.close(status_write)
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._stdin: IO[bytes] = self._keeper.stdin
        self._reader = threading.Thread(
            target=self._read_log, args=(self._keeper.stdout, log), name="server-log", daemon=True
        )
        self._ender = threading.Thread(target=self._read_status, args=(status_read,), name="server-end", daemon=True)
        self._reader.start()
        self._ender.start()
        with self._changed:
            self._changed.wait_for(lambda: self._pid is not None or self._returncode is not None, _START_S)

    @property
    def pid(self) -> int | None:
        """Process id of the server; ``None`` if it could not be started."""
        return self._pid

    @property
    def returncode(self) -> int | None:
        """The server's exit code, minus the number of the signal that ended it; ``None`` until all of it is gone."""
        return self._returncode

    def lines(self) -> list[LogLine]:
        """Return the last lines of the log."""
        with self._changed:
            return list(self._lines)

    def terminate(self) -> None:
        """Ask the server to stop; returns at once."""
        self._command(b"t")

    def kill(self) -> None:
        """End the server and its stubs; returns before they are gone."""
        self._command(b"k")

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until all of the server is gone and cleaned up; return ``returncode``."""
        with self._changed:
            self._changed.wait_for(lambda: self._returncode is not None, timeout)
            return self._returncode

    def join(self) -> None:
        """Wait until the server is gone and this object's threads have ended."""
        if threading.current_thread() is not self._ender:
            self._ender.join()

    def _command(self, letter: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # the keeper has gone
            # Not through the buffer, whose lock a signal handler must not take twice.
            os.write(self._stdin.fileno(), letter)

    def _read_log(self, pipe: IO[bytes], log: IO[str] | None) -> None:
        """Read the log until the last process that writes to it is gone."""
        hidden = False
        with pipe, log or contextlib.nullcontext():
            for raw in pipe:
                line = parse_line(raw.decode(errors="replace").replace(self._secret, "***"))
                with self._changed:
                    self._lines.append(line)
                if line.level and not hidden:  # the server has read its arguments before it logs anything
                    hidden = True
                    self._hide_secret()
                try:
                    if log is not None:
                        log.write(f"{line.raw}\n")
                        log.flush()
                    self._on_line(line)
                except Exception:
                    # A reader that stops would let the pipe fill up and block the server.
                    _logger.exception("a line of the server's log could not be handed on")

    def _hide_secret(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._pid is not None, _START_S)
        if self._pid is not None and not hide(self._pid, self._secret):
            _logger.warning(
                "this system does not let the administrator's key be taken out of the server's command line, where "
                "every user of this machine can read it"
            )

    def _read_status(self, descriptor: int) -> None:
        """Read what the keeper reports until it is gone, then make sure that nothing is left."""
        code: int | None = None
        with open(descriptor, encoding="ascii") as status:
            for report in status:
                word, _, number = report.strip().partition(" ")
                if word == "pid":
                    with self._changed:
                        self._pid = int(number)
                        self._changed.notify_all()
                elif word == "exit":
                    code = int(number)
        self._keeper.wait()
        if code is None:  # the keeper was killed, and the kernel has killed the server for that
            code = -9
            end_stubs(self._shm_prefix)
            keeper.remove_regions(self._shm_prefix)
            keeper.remove_folder(str(self._folder))
        self._reader.join(_READ_S)
        self._stdin.close()
        with self._changed:
            self._returncode = code
            self._changed.notify_all()
        self._on_end()


def _open_log(path: str | os.PathLike[str]) -> IO[str]:
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise ArgumentError(
            f"The log file {os.fspath(path)} cannot be written: {error.strerror}. Choose another with --log-file"
        ) from error
