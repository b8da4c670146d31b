"""What the plots are made of; that they are drawn is seen in a quick run (test_suite.py)."""

from __future__ import annotations

import json

from benchmarks.plots import forwards, throughput_of_rounds


def test_step_events_that_come_together_are_of_one_forward() -> None:
    first, second = [0.0, 0.1, 0.2], [0.101, 0.201, 0.3]
    assert forwards([first, second]) == [(0.0, 1), (0.1, 2), (0.2, 2), (0.3, 1)]
    assert forwards([[], []]) == []


def test_throughput_is_the_median_of_the_rounds() -> None:
    def one(seconds: float) -> dict[str, object]:
        return {
            "bare": {"seconds": 8.0, "latencies_s": [1.0] * 4},
            "served": {8: {"seconds": seconds, "latencies_s": [1.0] * 4}},
            "limit": {8: {"seconds": 1.0}},
            "baselines": {"triton_plain": {8: {"seconds": 4.0, "latencies_s": [1.0] * 2}}},
        }

    rounds = json.loads(json.dumps([one(2.0), one(4.0), one(1.0)]))  # as they come from a file
    assert throughput_of_rounds(rounds) == {
        "bare": {1: 0.5},
        "served": {8: 2.0},
        "limit": {8: 4.0},
        "triton_plain": {8: 0.5},
    }
    assert throughput_of_rounds([]) == {}
