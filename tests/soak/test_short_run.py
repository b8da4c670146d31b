"""A short run of `make soak` against a real server: nothing is lost, the books balance, the results are written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.soak.mix import BLOCK

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1500


@pytest.mark.slow
def test_a_short_run_loses_nothing_and_counts_right(tmp_path):
    """Four blocks: each kind of request several times."""
    count = 4 * BLOCK
    command = [sys.executable, "-m", "tools.soak", "--requests", str(count), "--parts", "2", "--out", str(tmp_path)]
    env = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    results = json.loads((tmp_path / "soak.json").read_text())
    assert results["requests"] == count
    assert all(check["holds"] for check in results["checks"])
    names = {check["name"] for check in results["checks"]}
    assert names >= {"no request was lost", "as alone", "shared memory", "memory of emoji", "the server drained"}
    assert [sample["requests"] for sample in results["samples"] if sample["idle"]] == [0, count // 2, count]
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_settings_are_refused_by_name():
    done = subprocess.run(
        [sys.executable, "-m", "tools.soak", "--requests", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 2
    assert "--requests" in done.stderr
