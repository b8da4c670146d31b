"""The table, from a fixed results file."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.figure import Figure, Goal, number
from benchmarks.hops import HOPS
from benchmarks.report import (
    BEGIN,
    END,
    IMAGES,
    LATEST,
    PROJECT_README,
    README,
    hops_table,
    markdown,
    plots_of,
    show,
    summary,
    write_all,
    write_between,
)

EXPECTED = """\
| what | median of the rounds | smallest – largest | goal | met |
| --- | ---: | ---: | ---: | --- |
| served | 421 ms | 400 – 430 |  |  |
| served / bare | 1.03 × | 1.02 – 1.10 | ≤ 1.05 | yes |
| of the limit | 90.0 % | 80.0 – 95.0 | ≥ 90 | no |
| idle | 0.041 % of a core |  | < 0.5 | yes |

Example 9000, 2 cores, 16 GiB; Linux x86_64, Python 3.11.7, torch 2.13.0, diffusers 0.42.1, nvidia-pytriton 0.7.0.
Commit 0123456789ab, 2026-01-02, `python -m benchmarks --rounds 3`: 3 rounds; OMP_NUM_THREADS=2 and \
OMP_WAIT_POLICY=PASSIVE in all arms.
Other work kept the processors busy: 1 % before the run, 3 % after it."""


SUMMARY = """\
| | measured | goal |
| --- | --- | --- |
| served / bare | 1.03 × | ≤ 1.05 |
| of the limit | 90.0 % | ≥ 90 (no) |
| idle | 0.041 % of a core | < 0.5 |

Example 9000, 2 cores, 2026-01-02, commit 0123456789ab; medians of 3 rounds."""


@pytest.fixture
def results() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "results.json").read_text())


def test_markdown(results: dict[str, Any]) -> None:
    assert markdown(results) == EXPECTED


def test_gpus_are_told(results: dict[str, Any]) -> None:
    results["machine"]["gpus"] = ["Example GPU 80GB"]
    assert "Example 9000, 2 cores, Example GPU 80GB, 16 GiB;" in markdown(results)
    assert "Example 9000, 2 cores, Example GPU 80GB, 2026-01-02" in summary(results)


def test_summary(results: dict[str, Any]) -> None:
    assert summary(results) == SUMMARY


def test_what_is_printed(results: dict[str, Any]) -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    show(console, results)
    text = console.export_text()
    for part in ("served / bare", "1.03 ×", "≤ 1.05", "90.0 %", "Example 9000"):
        assert part in text


def test_figures_survive_the_file(results: dict[str, Any]) -> None:
    for data in results["figures"]:
        assert Figure.from_dict(data).as_dict() == data


@pytest.mark.parametrize(
    ("relation", "met"),
    [("<=", (True, True, False)), (">=", (False, True, True)), ("<", (True, False, False))],
)
def test_goals(relation: str, met: tuple[bool, ...]) -> None:
    assert tuple(Goal(relation, 2.0).is_met(value) for value in (1.0, 2.0, 3.0)) == met


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00"),
        (0.0412, "0.041"),
        (0.5, "0.50"),
        (1.049, "1.05"),
        (19.96, "20.0"),
        (421.3, "421"),
        (12345.6, "12,346"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_a_busy_machine_is_told(results: dict[str, Any]) -> None:
    results["other_load_percent"]["after"] = 60.0
    text = markdown(results)
    assert text.endswith("The machine was busy with other work: these figures are noise.")
    assert "| ≤ 1.05 | noise |" in text
    assert "| ≥ 90 | noise |" in text
    assert "| yes |" not in text
    assert "| no |" not in text


def test_between_markers(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for text in ("first", "second"):
        write_between(readme, BEGIN, END, text)
        assert readme.read_text() == f"before\n{BEGIN}\n{text}\n{END}\nafter\n"


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_readme_without_its_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text)
    with pytest.raises(ValueError, match="marker"):
        write_between(readme, BEGIN, END, "new")
    assert readme.read_text() == text


def test_quick_results_stay_out_of_the_readmes(results: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.report.write_between", lambda *_: pytest.fail("a file was written"))
    with pytest.raises(ValueError, match="quick run"):
        write_all(results | {"quick": True}, [])


def test_a_whole_run_is_written_everywhere(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("README", "PROJECT_README"):
        path = tmp_path / f"{name}.md"
        path.write_text(f"{BEGIN}\n{END}\n")
        monkeypatch.setattr(f"benchmarks.report.{name}", path)
    monkeypatch.setattr("benchmarks.report.IMAGES", tmp_path / "images")
    assert write_all(results, []) == [tmp_path / "README.md", tmp_path / "PROJECT_README.md"]
    assert EXPECTED in (tmp_path / "README.md").read_text()
    assert SUMMARY in (tmp_path / "PROJECT_README.md").read_text()


def test_hops() -> None:
    found = {
        "hops_ms": dict.fromkeys(HOPS, 1.0) | {"steps": 88.0, "encode": 2.0},
        "total_ms": 100.0,
        "total_png_ms": 102.0,
        "remainder_ms": 3.0,
    }
    table = hops_table(found)
    assert "| steps: forwards and scheduler | 88.00 | 88.0 % |" in table
    assert "| encode: png | 2.00 |  |" in table
    assert "| **total, as the client sees it, pixels** | 100.00 | 100 % |" in table


def test_plots_are_named_for_the_data_there_is(results: dict[str, Any]) -> None:
    assert plots_of(results) == {}
    names = list(plots_of(results | {"raw": {"curves": {}, "poisson": []}}))
    assert names == ["bench-throughput.png", "bench-latency.png", "bench-first-step.png", "bench-timeline.png"]


@pytest.mark.parametrize(("path", "write"), [(README, markdown), (PROJECT_README, summary)])
def test_our_readmes_hold_the_last_results(path: Path, write: Callable[[dict[str, Any]], str]) -> None:
    latest = json.loads(LATEST.read_text())
    text = path.read_text()
    assert (text.count(BEGIN), text.count(END)) == (1, 1)
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == write(latest)
    for name in plots_of(latest):
        assert (IMAGES / name).is_file()
