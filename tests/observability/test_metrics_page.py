"""The queries of `docs/metrics.md` are answered by a Prometheus that scraped a real server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from diffusion_backend.telemetry import ERROR_REASONS
from tests.observability.conftest import Scraped, needs_prometheus
from tests.observability.names import labels_of, metrics_of
from tests.support.client import Metrics

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
TABLE = PAGE.split("## Queries that people start with", 1)[1]
QUERIES = dict(re.findall(r"^\| ([^|]+) \| `([^`]+)` \|$", TABLE, flags=re.MULTILINE))
QUERIES["waiting requests"] = re.search(r"^- waiting requests: `([^`]+)`", PAGE, flags=re.MULTILINE)[1]


def test_the_table_is_read_whole() -> None:
    assert len(QUERIES) == len(re.findall(r"^\| .+", TABLE, flags=re.MULTILINE)) - 2 + 1


@needs_prometheus
@pytest.mark.parametrize("question", QUERIES)
def test_a_query_returns_data(scraped: Scraped, question: str) -> None:
    known = metrics_of(scraped.page)
    assert set(labels_of(QUERIES[question])) <= set(known)
    assert scraped.prometheus.query(QUERIES[question], scraped.end)


@needs_prometheus
@pytest.mark.parametrize("name", sorted(set(re.findall(r"\bnv_\w+\b", PAGE))))
def test_triton_has_the_metrics_that_are_named(scraped: Scraped, name: str) -> None:
    assert name in metrics_of(scraped.page)


@needs_prometheus
def test_errors_are_what_failed_or_was_rejected(scraped: Scraped) -> None:
    """Of the load's requests: wrong ones are rejected, those that are late or break the pipeline fail."""
    metrics = Metrics.parse(scraped.page)
    errors = {reason: metrics.get("diffusion_errors_total", reason=reason) for reason in ERROR_REASONS}
    assert {reason for reason, count in errors.items() if count} == {"argument", "deadline", "pipeline"}
    assert errors["argument"] == metrics.get("diffusion_requests_total", outcome="rejected")
    assert errors["deadline"] + errors["pipeline"] == metrics.get("diffusion_requests_total", outcome="failed")
