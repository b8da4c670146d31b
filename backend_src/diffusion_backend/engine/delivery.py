"""Everything that follows a decision of the engine but must not hold up the next forward.

One thread works through a queue in order: metrics, and events to the callers. Results are finished (encoded) by a few
further threads, so that a large picture does not hold up the events of other requests; a result is its request's last
event, so the order within a request stays.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger(__name__)

Job = Callable[[], None]


class Delivery:
    """A thread that runs jobs in order, and a pool for the slow ones.

    Args:
        num_finishers: threads that finish results.
    """

    def __init__(self, num_finishers: int) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(num_finishers, thread_name_prefix="diffusion-finish")
        self._thread = threading.Thread(target=self._run, name="diffusion-delivery", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, job: Job) -> None:
        """Run `job` after all that were put before it; returns at once, from any thread, with any lock held."""
        self._jobs.put(job)

    def put_slow(self, job: Job) -> None:
        """Run `job` in the pool, once all that were put before it are done."""
        self._jobs.put(lambda: self._submit(job))

    def flush(self, timeout: float) -> bool:
        """Sleep until what was put before is done, the slow jobs excepted; return whether it was within `timeout`."""
        done = threading.Event()
        self.put(done.set)
        return done.wait(timeout)

    def stop(self) -> None:
        """Run what was put, then end the threads."""
        self._jobs.put(None)
        self._thread.join()
        self._pool.shutdown(wait=True)

    def _submit(self, job: Job) -> None:
        self._pool.submit(_guarded, job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            _guarded(job)


def _guarded(job: Job) -> None:
    """Run a job; a caller's function that raises is logged and stops nothing."""
    try:
        job()
    except Exception:
        log.exception("delivery to a caller failed")
