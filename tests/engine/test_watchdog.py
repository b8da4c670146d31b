"""A unit of work that does not end is noticed, everybody is answered, and the process ends even if Python cannot."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from diffusion_backend.engine import DiffusionEngine, EngineConfig, Watchdog, WatchedExecutor
from diffusion_backend.errors import EngineStoppedError, HungError
from diffusion_backend.telemetry import MemorySink, Telemetry
from diffusion_backend.timing import now
from tests.engine.conftest import within_deadline
from tests.support.fakes import DEADLINE_S, FakeExecutor, eventually, make


class Watched:
    """An engine whose watchdog breaks it down, as it does in the server, but does not end this process."""

    def __init__(self, limit_s: float) -> None:
        self.executor = FakeExecutor()
        self.sink = MemorySink()
        self.expired: list[tuple[str, float]] = []
        self.watchdog = Watchdog(limit_s, self._expire)
        self.engine = DiffusionEngine(
            WatchedExecutor(self.executor, self.watchdog), EngineConfig(max_num_seqs=2), Telemetry(self.sink)
        )
        self.engine.start()

    def _expire(self, what: str) -> None:
        self.expired.append((what, now()))
        limit = self.watchdog.limit_s
        self.engine.break_down("the model hangs", lambda i: HungError(what, limit, request_id=i), wait_s=DEADLINE_S)


@pytest.fixture
def watched() -> Callable[[float], Watched]:
    made: list[Watched] = []

    def build(limit_s: float) -> Watched:
        made.append(Watched(limit_s))
        return made[-1]

    yield build
    for one in made:
        one.executor.gate.open()
        within_deadline(lambda one=one: (one.engine.shutdown(), True))
        one.watchdog._thread.join(DEADLINE_S)
    assert not [t for t in threading.enumerate() if t.name.startswith("diffusion-")]


def test_a_forward_that_hangs_ends_all_requests_and_no_new_one_is_taken(watched: Callable[[float], Watched]) -> None:
    made = watched(0.3)
    made.executor.gate.close()
    begin = now()
    handles = [made.engine.submit(make(str(i), steps=3)) for i in range(4)]  # two run, two wait
    for handle in handles:
        with pytest.raises(
            HungError, match=r"the model hangs: a forward of [12] requests was not done within 0.3 s"
        ) as e:
            handle.result(DEADLINE_S)
        assert e.value.request_id == handle.request.request_id
    assert made.expired[0][1] - begin >= 0.3
    assert not made.engine.is_ready
    within_deadline(lambda: (made.engine.wait_for_slot(), True))  # whoever feeds the engine is not left asleep
    with pytest.raises(EngineStoppedError, match="the model hangs"):
        made.engine.submit(make("late"))
    assert made.engine.stats() == {
        "accepted": 4, "waiting": 0, "running": 0, "finished": 0, "failed": 4, "cancelled": 0
    }  # fmt: skip
    eventually(lambda: made.sink.values["diffusion_errors_total", ("hung",)] == 4, "counted")
    assert made.sink.values["diffusion_requests_running", ()] == 0


def test_what_the_engine_thread_brings_after_all_is_dropped(watched: Callable[[float], Watched]) -> None:
    """The hang ends when everybody has been told: nobody hears of it, and the thread ends without an error."""
    made = watched(0.2)
    made.executor.gate.close()
    handle = made.engine.submit(make("a", steps=1))
    with pytest.raises(HungError):
        handle.result(DEADLINE_S)
    made.executor.gate.open()
    made.engine._thread.join(DEADLINE_S)
    assert not made.engine._thread.is_alive()
    assert handle._final is not None
    assert handle._final.error is not None
    assert made.engine.stats()["failed"] == 1


class Late(FakeExecutor):
    """One whose engine is given up when it comes to `moment`, and which goes on all the same."""

    moment: str
    give_up: Callable[[], None]

    def _note(self, what: str, *ids: str) -> None:
        super()._note(what, *ids)
        if what == self.moment:
            self.give_up()


@pytest.mark.parametrize("moment", ["add_req", "start", "forward", "on_work", "decode", "abort", "idle"])
def test_an_engine_that_is_given_up_just_as_its_work_ends_stops_without_an_error(
    moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A watchdog gives up on its own thread, at any moment: whatever the engine thread has in hand is nobody's then."""
    executor = Late()
    engine = DiffusionEngine(executor)
    executor.moment = moment
    executor.give_up = lambda: engine.break_down("the model hangs", lambda i: HungError("it", 1.0, request_id=i))
    engine.start()
    steps, extra = (10**9 if moment == "abort" else 2), ({"raise_in": moment} if moment == "add_req" else {})
    handle = engine.submit(make("a", steps=steps, decode=1, **extra), on_work=lambda *_: executor._note("on_work"))
    if moment == "abort":
        eventually(lambda: executor.count("forward"), "it runs")
        handle.abort()
    if moment == "idle":
        assert handle.result(DEADLINE_S)
        eventually(lambda: engine._work._waiters, "the engine thread sleeps")
        executor.give_up()
    else:
        with pytest.raises(HungError):
            handle.result(DEADLINE_S)
    engine._thread.join(DEADLINE_S)
    assert not engine._thread.is_alive()
    engine.shutdown()
    with pytest.raises(EngineStoppedError, match="the model hangs"):
        engine.submit(make("late"))
    assert "the engine thread died" not in caplog.text
    stats = engine.stats()
    assert (stats["accepted"], stats["waiting"], stats["running"]) == (1, 0, 0)


def test_many_units_that_end_in_time_and_idleness_are_no_hang(watched: Callable[[float], Watched]) -> None:
    made = watched(0.4)
    for i in range(3):
        assert made.engine.submit(make(str(i), steps=200)).result(DEADLINE_S)
    time.sleep(1.0)  # idle for longer than the limit
    assert made.engine.submit(make("after")).result(DEADLINE_S)
    assert made.expired == []


def test_an_idle_watchdog_sleeps() -> None:
    """Between units it wakes at most once more, then not at all."""
    dog = Watchdog(0.05, lambda _what: None)
    dog.start()
    with dog.watching("a unit"):
        pass
    eventually(lambda: dog._is_idle, "it sleeps without a limit")
    wakes: list[int] = []
    original = dog._changed.wait
    dog._changed.wait = lambda timeout=None: (wakes.append(1), original(timeout))[1]  # type: ignore[method-assign]
    time.sleep(0.3)
    assert wakes == []
    dog.close()
    dog._thread.join(DEADLINE_S)
    assert not dog._thread.is_alive()


HOLDS_THE_LOCK = """
import ctypes, sys
from diffusion_backend.engine import Watchdog
dog = Watchdog(0.5, lambda what: None, is_hard=True)
dog.start()
with dog.watching("a forward"):
    print("hangs", flush=True)
    ctypes.PyDLL(None).sleep(300)  # unlike CDLL, this keeps the interpreter's lock
"""


def test_a_hang_that_keeps_the_interpreters_lock_ends_the_process_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLDS_THE_LOCK], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 1
    assert done.stdout == "hangs\n"
    assert "Timeout (0:00:0" in done.stderr, "where each thread stood"
    assert '<string>", line 8' in done.stderr


IN_TIME = (
    HOLDS_THE_LOCK.replace("ctypes.PyDLL(None).sleep(300)", "pass").replace('print("hangs"', 'print("done"')
    + """
import time
time.sleep(2.5)
"""
)


def test_the_alarm_is_taken_back_when_the_work_is_done() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_TIME], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
