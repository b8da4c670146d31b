"""One real run of everything, small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fleet import BASELINES, missing_extras
from benchmarks.plots import draw_plots
from benchmarks.report import markdown, plots_of

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path) -> None:
    baselines = [name for name in BASELINES if not missing_extras([name])]  # a test installs nothing
    chosen = [argument for name in baselines for argument in ("--baseline", name)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", *chosen, "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its figures say nothing" in done.stdout
    results = json.loads((tmp_path / "quick.json").read_text())
    figures = {data["key"]: data for data in results["figures"]}
    wanted = {"single.ratio", "load.4.of_limit", "load.4.vs_best", "poisson.mean_ratio", "poisson.first_step"}
    wanted |= {
        "memory.peak",
        "idle.percent",
        "engine.flat",
        "engine.callers",
        "mixes.alike",
        "mixes.sizes",
        "fairness.huge.ratio",
    }
    assert set(figures) >= wanted | {f"load.4.{name}.per_s" for name in baselines}
    may_be_nothing = ("pictures.difference", "cancelling.steps", "engine.callers")
    assert all(data["value"] > 0 for key, data in figures.items() if key not in may_be_nothing)
    # The requests were really drawn, and in joint forwards: more than the two rows that one request has.
    assert figures["pictures.difference"]["value"] <= 2
    assert figures["load.4.rows"]["value"] > 2
    # A request that was given up had no steps done for it but the one under way, and what came before the news of it.
    assert 0 <= figures["cancelling.steps"]["value"] <= results["settings"]["mixed_steps"][-1]
    assert results["settings"]["threads"] == results["raw"]["bare_settings"]["torch_num_threads"]
    hops = results["raw"]["hops"]
    for each in hops["requests"]:
        assert sum(each[name] for name in hops["hops_ms"] if name != "encode") == pytest.approx(each["total"])
    assert str(ROOT) not in json.dumps(results)
    assert str(tmp_path) not in json.dumps(results)

    records = [json.loads(line) for line in (tmp_path / "quick.records.jsonl").read_text().splitlines()]
    assert {record["server"] for record in records} == {"served", *baselines}
    assert {record["outcome"] for record in records} == {"completed", "cancelled"}
    assert all(0 <= record["arrival"] <= record["send"] <= record["end"] for record in records)
    poisson = [record for record in records if record["arm"] == "poisson" and record["server"] == "served"]
    assert all(len(record["step_times"]) == record["steps"] for record in poisson)
    assert all(record["times"]["time_total_ms"] / 1e3 <= record["end"] - record["send"] for record in poisson)

    drawn = draw_plots(results, records, tmp_path)
    assert {path.name for path in drawn} == set(plots_of(results))
    assert all(path.stat().st_size > 10_000 for path in drawn)
    assert "| steps: forwards and scheduler |" in markdown(results)
