"""From what was measured to figures, on made-up measurements; and one real run, small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engine_overhead import StepCost
from benchmarks.figures import engine_figures, load_figures, single_figures
from benchmarks.limit import Work
from benchmarks.report import Figure
from benchmarks.suite import ideal_works
from benchmarks.workload import make_jobs

ROOT = Path(__file__).parents[2]


def by_key(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.key: figure for figure in figures}


def test_jobs_are_always_the_same() -> None:
    jobs = make_jobs(48, (8, 20, 40))
    assert jobs == make_jobs(48, (8, 20, 40))
    assert [sum(job.steps == steps for job in jobs) for steps in (8, 20, 40)] == [16, 16, 16]
    assert [job.steps for job in jobs] != [8, 20, 40] * 16
    assert len({job.seed for job in jobs}) == 48
    assert {job.rows for job in jobs} == {2}


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


def test_load_figures() -> None:
    load = {
        "bare": {"seconds": 20.0, "latencies_s": [5.0] * 4, "denoiser_s": [4.0] * 4},
        "served": {8: {"seconds": 10.0, "latencies_s": [4.0, 5.0, 6.0, 7.0], "mean_rows": 12.0}},
        "limit": {8: {"seconds": 8.0, "forwards": 10, "mean_rows": 14.0}},
        "forward_check": 0.97,
    }
    figures = by_key(load_figures([load], [8]))
    assert figures["load.bare_per_s"].value == 0.2
    assert figures["load.8.per_s"].value == 0.4
    assert figures["load.8.speedup"].value == 2.0
    assert figures["load.8.limit"].value == 2.5
    assert figures["load.8.of_limit"].value == 80.0
    assert figures["load.8.of_limit"].is_met is False
    assert figures["load.8.p50_ms"].value == 5500
    assert figures["load.forward_check"].value == 0.97


def test_engine_figures() -> None:
    rounds = [
        {1: StepCost(20e-6, 0.0), 1000: StepCost(21e-6, 0.0)},
        {1: StepCost(20e-6, 0.0), 1000: StepCost(25e-6, 0.0)},
    ]
    figures = by_key(engine_figures(rounds, [1, 1000]))
    assert figures["engine.1000.us"].value == pytest.approx(23)
    assert figures["engine.flat"].rounds == pytest.approx([1.05, 1.25])
    assert figures["engine.flat"].is_met is False


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its figures say nothing" in done.stdout
    results = json.loads((tmp_path / "quick.json").read_text())
    figures = {data["key"]: data for data in results["figures"]}
    assert set(figures) >= {"single.ratio", "load.4.of_limit", "load.4.speedup", "idle.percent", "engine.flat"}
    assert all(data["value"] > 0 for key, data in figures.items() if key != "pictures.difference")
    # The requests were really drawn, and in joint forwards: more than the two rows that one request has.
    assert figures["pictures.difference"]["value"] <= 2
    assert figures["load.4.rows"]["value"] > 2
    assert results["settings"]["threads"] == results["raw"]["bare_settings"]["torch_num_threads"]
    assert str(ROOT) not in json.dumps(results)
    assert str(tmp_path) not in json.dumps(results)
