"""The README's picture: it can be drawn from what Prometheus answers, and it is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.observability.conftest import SCRAPE_S, Scraped, needs_prometheus
from tools.dashboard.panels import ROWS
from tools.dashboard.picture import SHOWN, draw
from tools.dashboard.prometheus import Series
from tools.dashboard.variables import interpolate

ROOT = Path(__file__).parents[2]


@needs_prometheus
def test_the_panels_are_drawn(scraped: Scraped, tmp_path: Path) -> None:
    def ask(expr: str) -> list[Series]:
        variables = {"model": ["emoji"], "instance": scraped.prometheus.label_values("instance", "up")}
        query = interpolate(expr, variables, step_s=SCRAPE_S, scrape_s=SCRAPE_S)
        return scraped.prometheus.query_range(query, scraped.start, scraped.end, SCRAPE_S)

    path = tmp_path / "picture.png"
    draw(ask, scraped.start, scraped.end, path, "caption")
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape[1] > 1200
    height, width = pixels.shape[0] // 3, pixels.shape[1] // 3
    for row in range(3):
        for column in range(3):
            panel = pixels[row * height : (row + 1) * height, column * width : (column + 1) * width]
            assert (panel.max(axis=2) - panel.min(axis=2) > 60).sum() > 200, f"no colour in panel {row}, {column}"


def test_a_panel_without_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data for 'Requests by outcome'"):
        draw(lambda _: [], 0, 60, tmp_path / "picture.png", "caption")


def test_what_is_shown_is_of_the_dashboard() -> None:
    assert set(SHOWN) <= {panel.title for row in ROWS for panel in row.panels}


def test_the_readme_shows_it() -> None:
    assert "(docs/images/dashboard.png)" in (ROOT / "README.md").read_text()
    with Image.open(ROOT / "docs" / "images" / "dashboard.png") as picture:
        assert picture.size[0] > 1200
