"""How many rounds fit into the time."""

from __future__ import annotations

import pytest

from benchmarks import plan
from benchmarks.plan import ARMS, QUICK, Clock, Settings


class Time:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(plan.time, "monotonic", lambda: self.now)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def rounds_that_run(time: Time, clock: Clock, seconds: float) -> int:
    count = 0
    while clock.begin_round():
        time.now += seconds
        clock.end_round()
        count += 1
    return count


@pytest.mark.parametrize(
    ("budget_s", "before_s", "round_s", "expected"),
    [
        (0, 0, 1000, 3),
        (1000, 100, 200, 3),
        (600, 100, 200, 2),
        (100, 90, 200, 1),
        (710, 100, 200, 3),
        (709, 100, 200, 2),
    ],
)
def test_no_round_begins_that_would_not_end_in_time(
    time: Time, budget_s: float, before_s: float, round_s: float, expected: int
) -> None:
    # The next round is taken to need 5 % more than the longest so far; the first one always runs.
    clock = Clock(lambda _: None, budget_s, rounds=3)
    time.now += before_s
    assert rounds_that_run(time, clock, round_s) == expected


def test_what_is_said(time: Time) -> None:
    said: list[str] = []
    clock = Clock(said.append, 0, rounds=3)
    time.now += 30
    clock.say("starting")
    clock.begin_round()
    clock.say("working")
    time.now += 120
    clock.end_round()
    clock.begin_round()
    time.now += 60
    clock.say("working on")
    clock.end_rounds()
    clock.say("at rest")
    assert said == [
        "[ 0.5 min] starting",
        "[ 0.5 min] round 1 of 3: working",
        "[ 3.5 min] round 2 of 3: working on (rounds end in about 3.0 min)",
        "[ 3.5 min] at rest",
    ]


def test_settings_tell_no_folder(tmp_path) -> None:
    told = Settings(model=tmp_path / "emoji").as_dict()
    assert told["model"] == "emoji"
    assert str(tmp_path) not in str(told)


def test_quick_changes_settings_that_there_are(tmp_path) -> None:
    assert Settings(model=tmp_path, **QUICK).rounds == 1


@pytest.mark.parametrize("arm", ARMS)
def test_which_arms_need_the_servers(arm: str, tmp_path) -> None:
    needs = Settings(model=tmp_path, arms=(arm,)).needs_servers
    assert needs == (arm not in ("engine", "fairness", "hops"))
