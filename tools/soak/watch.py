"""Reads what the server's processes hold: memory, file descriptors, threads, shared memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from diffusion_backend.serve import TritonServer
from diffusion_backend.serve.watch import find_stubs

SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process holds.

    Attributes:
        own_kib: its own memory: the pages that no file backs. Those of libraries are shared with whatever else runs on
            the machine, so any share of them moves when another program starts or ends.
        rss_kib: all its pages in memory.
    """

    own_kib: int
    rss_kib: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """What the server held at one time.

    Attributes:
        at_s: seconds since the run began.
        requests: requests that had ended.
        idle: whether nothing was in flight.
        processes: by name: `tritonserver`, and each model's.
        shm_kib, shm_regions: the server's own shared memory that is really backed, and its regions.
    """

    at_s: float
    requests: int
    idle: bool
    processes: dict[str, Usage]
    shm_kib: int
    shm_regions: int

    def as_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)


class Watch:
    """Takes samples of one server: at its caller's wish, and every few seconds by a thread of its own.

    Args:
        server: must be ready; the processes of its models stay the same from now on.
        count_ended: tells how many requests have ended.
        interval_s: seconds between the thread's samples.
    """

    def __init__(self, server: TritonServer, count_ended: Callable[[], int], interval_s: float = 5.0) -> None:
        assert server.pid is not None
        self.samples: list[Sample] = []
        self._prefix = server.shm_prefix
        self._count_ended = count_ended
        self._interval_s = interval_s
        self._pids = {"tritonserver": server.pid, **{stub.model: stub.pid for stub in find_stubs(server.pid)}}
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def take(self, *, idle: bool) -> Sample:
        """Take a sample now.

        Raises:
            psutil.NoSuchProcess: a process of the server is gone.
        """
        with self._lock:
            shm_kib, regions = _shared_memory(self._prefix)
            sample = Sample(
                time.monotonic() - self._begin,
                self._count_ended(),
                idle,
                {name: _usage(pid) for name, pid in self._pids.items()},
                shm_kib,
                regions,
            )
            self.samples.append(sample)
        return sample

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.take(idle=False)
            except psutil.NoSuchProcess:
                return  # the run itself finds out, and says so


def _usage(pid: int) -> Usage:
    process = psutil.Process(pid)
    return Usage(_own_memory(pid), process.memory_info().rss // 1024, process.num_fds(), process.num_threads())


def _own_memory(pid: int) -> int:
    """Return `RssAnon` of /proc/PID/status, in KiB.

    Raises:
        psutil.NoSuchProcess: the process is gone.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise psutil.NoSuchProcess(pid)  # ended, and not yet waited for: it has no memory any more


def _shared_memory(prefix: str) -> tuple[int, int]:
    sizes = []
    for name in os.listdir(SHM):
        if name.startswith(prefix):
            try:
                sizes.append((SHM / name).stat().st_blocks * 512 // 1024)
            except FileNotFoundError:  # freed in the meantime
                continue
    return sum(sizes), len(sizes)
