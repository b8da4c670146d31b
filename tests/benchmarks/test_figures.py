"""From what was measured to figures, on made-up measurements."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.engine_overhead import StepCost, measure_callers
from benchmarks.figure import Figure
from benchmarks.figures import (
    callers_figure,
    engine_figures,
    load_figures,
    once_figures,
    poisson_figures,
    single_figures,
)
from benchmarks.limit import Work
from benchmarks.rounds import ideal_works
from benchmarks.workload import make_jobs


def by_key(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.key: figure for figure in figures}


def test_ratios_are_taken_round_by_round() -> None:
    # The machine is twice as slow in the second round; the ratio does not see that.
    rounds = [{"served_s": [1.1, 1.1, 9.0], "bare_s": [1.0, 1.0, 1.0]}, {"served_s": [2.2] * 3, "bare_s": [2.0] * 3}]
    figures = by_key(single_figures(rounds))
    assert figures["single.ratio"].rounds == pytest.approx([1.1, 1.1])
    assert figures["single.ratio"].is_met is False
    assert figures["single.bare_ms"].value == pytest.approx(1500)


def test_everything_but_the_denoiser_counts_as_in_the_bare_run() -> None:
    jobs = make_jobs(4, (8, 8, 8, 20))
    seconds = {8: iter([(1.0, 0.75), (1.5, 0.5), (1.25, 0.75)]), 20: iter([(3.0, 2.0)])}
    latencies, inside = zip(*(next(seconds[job.steps]) for job in jobs), strict=True)
    works = ideal_works(jobs, latencies, inside)
    assert works == [Work(job.steps, 2, 0.5 if job.steps == 8 else 1.0) for job in jobs]


def load_round(**baselines: float) -> dict[str, Any]:
    return {
        "bare": {"seconds": 20.0, "latencies_s": [5.0] * 4, "denoiser_s": [4.0] * 4},
        "served": {8: {"seconds": 10.0, "latencies_s": [4.0, 5.0, 6.0, 7.0], "mean_rows": 12.0}},
        "baselines": {name: {8: {"seconds": s, "latencies_s": [s] * 4}} for name, s in baselines.items()},
        "limit": {8: {"seconds": 8.0, "forwards": 10, "mean_rows": 14.0}},
        "forward_check": 0.97,
    }


def test_load_figures() -> None:
    figures = by_key(load_figures([load_round()], [8]))
    assert figures["load.bare_per_s"].value == 0.2
    assert figures["load.8.per_s"].value == 0.4
    assert figures["load.8.speedup"].value == 2.0
    assert figures["load.8.limit"].value == 2.5
    assert figures["load.8.of_limit"].value == 80.0
    assert figures["load.8.of_limit"].is_met is False
    assert figures["load.8.p50_ms"].value == 5500
    assert figures["load.forward_check"].value == 0.97
    assert "load.8.vs_best" not in figures


def test_the_best_baseline_is_chosen_in_each_round() -> None:
    rounds = [
        load_round(triton_batched=16.0, litserve_batch=18.0),
        load_round(triton_batched=40.0, litserve_batch=30.0),
    ]
    figures = by_key(load_figures(rounds, [8]))
    assert figures["load.8.triton_batched.per_s"].rounds == [4 / 16, 4 / 40]
    # In the second round the bare pipeline, at 20 s, is the best.
    assert figures["load.8.vs_best"].rounds == pytest.approx([1.6, 2.0])


def record(steps: int, *, execute_ms: float, queue_ms: float, first_ms: float) -> dict[str, Any]:
    times = {"time_execute_ms": execute_ms, "time_queue_ms": queue_ms, "time_to_first_step_ms": first_ms}
    return {"steps": steps, "times": times}


def test_poisson_figures() -> None:
    requests = [
        record(8, execute_ms=880, queue_ms=50, first_ms=170),
        record(20, execute_ms=1800, queue_ms=0, first_ms=120),
    ]
    each = {
        "rate_per_s": 4.0,
        "served": {"latencies_s": [1.0, 2.0, 3.0]},
        "rival": {"latencies_s": [4.0, 5.0, 12.0]},
        "requests": requests,
    }
    figures = by_key(poisson_figures([each], 0.8))
    assert figures["poisson.served.mean_s"].value == 2.0
    assert figures["poisson.mean_ratio"].value == pytest.approx(2 / 7)
    assert figures["poisson.p99_ratio"].is_met is True
    assert figures["poisson.step_ms"].value == pytest.approx(100)
    assert figures["poisson.first_step"].value == pytest.approx(1.2)  # 120 ms from admission, both of them
    assert figures["poisson.first_step_entered"].value == pytest.approx(1.675)  # 95 % between 120 and 170 ms
    alone = by_key(poisson_figures([{name: value for name, value in each.items() if name != "rival"}], 0.8))
    assert "poisson.mean_ratio" not in alone


def test_once_figures() -> None:
    raw = {
        "mixes": {"alike": {"served": 5.0, "triton_batched": 15.0}, "sizes": {"served": 5.0}},
        "cancelling": {"cancelled": 4, "steps_wanted": 100, "steps_done": 106.0},
        "memory": {
            "peak_mib": {"bare": 1000.0, "served": 1100.0},
            "server_mib": 300.0,
            "device_mib": {"bare": None, "served": None},
        },
        "pictures": {"served": 0, "triton_batched": 1},
        "idle": {"seconds": 5.0, "percent_of_core": {"a": 0.1, "b": 0.2}, "baselines_percent": 1.5},
    }
    figures = by_key(once_figures(raw))
    assert figures["mixes.alike"].value == 3.0
    assert "mixes.sizes" not in figures
    assert figures["cancelling.steps"].value == 1.5
    assert figures["memory.peak"].value == pytest.approx(1.1)
    assert "memory.device" not in figures
    assert figures["pictures.difference"].value == 1
    assert figures["idle.percent"].value == pytest.approx(0.3)
    assert figures["idle.baselines"].value == 1.5
    raw["memory"]["device_mib"] = {"bare": 100.0, "served": 120.0}
    assert by_key(once_figures(raw))["memory.device"].is_met is False
    assert once_figures({}) == []


def test_engine_figures() -> None:
    rounds = [
        {1: StepCost(20e-6, 0.0), 1000: StepCost(21e-6, 0.0)},
        {1: StepCost(20e-6, 0.0), 1000: StepCost(25e-6, 0.0)},
    ]
    figures = by_key(engine_figures(rounds, [1, 1000]))
    assert figures["engine.1000.us"].value == pytest.approx(23)
    assert figures["engine.flat"].rounds == pytest.approx([1.05, 1.25])
    assert figures["engine.flat"].is_met is False


def test_callers_that_wait_are_measured() -> None:
    percent = measure_callers(4, 0.2)
    assert 0 <= percent < 100
    assert callers_figure(4, percent).value == percent
