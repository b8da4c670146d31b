"""The parts of the report that draw: contact sheets and the chart."""

from __future__ import annotations

import numpy as np

from tools.emoji.chart import COLOURS, HEIGHT, WIDTH, Line, line_chart
from tools.emoji.render import draw_all
from tools.emoji.report import Outcome
from tools.emoji.sheet import COLUMNS, GAP, MISS_COLOUR, Pair, contact_sheet


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


def test_chart_shows_each_line_in_its_colour() -> None:
    chart = line_chart("title", "minutes", [Line("up", [(0, 0), (9, 1)]), Line("down", [(0, 1), (9, 0)])], top=1.0)
    assert chart.size == (WIDTH, HEIGHT)
    pixels = np.asarray(chart).astype(int)
    for colour in COLOURS[:2]:
        assert (np.abs(pixels - colour).sum(axis=2) < 30).sum() > 50
