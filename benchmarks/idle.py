"""What a server costs that has nothing to do: the processor time of tritonserver and of the models' processes."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

SETTLE_S = 1.0
"""After the last request, until the measurement begins."""


@dataclass(frozen=True, slots=True)
class IdleCost:
    """Processor time while idle.

    Attributes:
        seconds: how long it was measured.
        percent_of_core: by process name, in percent of one core.
    """

    seconds: float
    percent_of_core: dict[str, float]

    @property
    def total_percent(self) -> float:
        """Of all processes."""
        return sum(self.percent_of_core.values())


def measure_idle(server_pid: int, seconds: float) -> IdleCost:
    """Measure the server and everything that it has started, for `seconds` seconds after a short rest."""
    time.sleep(SETTLE_S)
    root = psutil.Process(server_pid)
    processes = [root, *root.children(recursive=True)]
    begin = time.monotonic()
    before = {process.pid: processor_seconds(process.pid) for process in processes}
    time.sleep(seconds)
    used = {process: processor_seconds(process.pid) - before[process.pid] for process in processes}
    elapsed = time.monotonic() - begin
    percent: dict[str, float] = {}
    for process, spent in used.items():
        percent[process.name()] = percent.get(process.name(), 0.0) + 100 * spent / elapsed
    return IdleCost(elapsed, percent)


def processor_seconds(pid: int, *, but: Collection[str] = ()) -> float:
    """Return the processor time that a process's threads have used, from the kernel's nanosecond counters.

    Args:
        but: numbers of threads that do not count, as the folders of /proc/PID/task are named.

    The usual counters (`/proc/PID/stat`) go in steps of 10 ms, too coarse for a few tenths of a percent.
    """
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        if task.name in but:
            continue
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except FileNotFoundError:  # the thread has ended
            continue
    return total / 1e9
