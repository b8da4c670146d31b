"""The parts of the report that draw: contact sheets and the chart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tools.emoji.chart import COLOURS, HEIGHT, WIDTH, Line, line_chart
from tools.emoji.document import quality_table, training_table, write_part
from tools.emoji.render import draw_all
from tools.emoji.report import Outcome
from tools.emoji.sheet import COLUMNS, GAP, MISS_COLOUR, Pair, contact_sheet

ROOT = Path(__file__).parents[2]


def test_contact_sheet_puts_originals_beside_what_was_drawn() -> None:
    apple, rocket = draw_all(["🍎", "🚀"])
    pairs = [Pair(apple, rocket, "a very long caption that no cell can hold", hit=True)] * COLUMNS
    pairs.append(Pair(apple, rocket, "apple", hit=False))
    sheet = np.asarray(contact_sheet(pairs))
    assert np.array_equal(sheet[GAP : GAP + 64, GAP : GAP + 64], apple)
    assert np.array_equal(sheet[GAP : GAP + 64, GAP + 64 : GAP + 128], rocket)
    red = (sheet == MISS_COLOUR).all(axis=2)
    assert not red[: GAP + 64].any()
    assert red[GAP + 64 :].sum() >= 4 * 63


def test_figures_count_the_nearest() -> None:
    prompts = [(0, "apple"), (1, "rocket"), (0, "fruit"), (1, "space")]
    outcome = Outcome(prompts, np.zeros((4, 64, 64, 3), np.uint8), [0, 0, 3, 9])
    assert outcome.figures() == {"prompts": 4, "top1": 0.5, "top5": 0.75}
    pairs = outcome.sheet_pairs(draw_all(["🍎", "🚀"]), places=1)
    assert [pair.hit for pair in pairs] == [True, True, False, False]


def test_documents_hold_what_the_model_s_record_says() -> None:
    table = training_table(ROOT / "models" / "emoji" / "training.json")
    for document in ("docs/emoji-model.md", "models/emoji/README.md"):
        assert table in (ROOT / document).read_text(encoding="utf-8")


def test_figures_go_between_the_markers_and_nowhere_else(tmp_path: Path) -> None:
    share = {"prompts": 96, "top1": 0.91666, "top5": 1.0}
    table = quality_table({"names": share, "keywords": share, "emoji": 700, "autoencoder_mse": 0.01})
    document = tmp_path / "document.md"
    document.write_text("before\n<!-- quality -->\nold | 0.1\n<!-- /quality -->\nafter\n", encoding="utf-8")
    write_part(document, "quality", table)
    write_part(document, "quality", table)
    text = document.read_text(encoding="utf-8")
    assert text == f"before\n<!-- quality -->\n\n{table}\n\n<!-- /quality -->\nafter\n"
    assert "| 96 names | 0.917 | 1.000 |" in text
    with pytest.raises(ValueError, match="<!-- training -->"):
        write_part(document, "training", table)


def test_chart_shows_each_line_in_its_colour() -> None:
    chart = line_chart("title", "minutes", [Line("up", [(0, 0), (9, 1)]), Line("down", [(0, 1), (9, 0)])], top=1.0)
    assert chart.size == (WIDTH, HEIGHT)
    pixels = np.asarray(chart).astype(int)
    for colour in COLOURS[:2]:
        assert (np.abs(pixels - colour).sum(axis=2) < 30).sum() > 50
