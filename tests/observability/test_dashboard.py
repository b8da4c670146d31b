"""Every query of the dashboard, as Grafana sends it, returns data of a real server that a real Prometheus scraped.

Grafana itself is not run: its part, the replacing of variables, is done by `tools.dashboard.variables`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from tests.observability.conftest import MODELS, SCRAPE_S, Scraped, needs_prometheus
from tests.observability.names import labels_of, metrics_of
from tools.dashboard.grafana import DATA_SOURCE, render
from tools.dashboard.prometheus import FOLDER, Series
from tools.dashboard.variables import interpolate

GRAFANA = FOLDER.parent / "grafana"
DASHBOARD: dict[str, Any] = json.loads((GRAFANA / "dashboards" / "diffusion.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [
    pytest.param(panel, target, id=f"{panel['title']}-{target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}

ZERO = {"Alerts"}
"""Panels whose values may all be 0: the rules wait longer for an alert than the load lasts."""
NOT_OF_EMOJI = {"Solo calls by reason"}
"""Panels that have nothing to show of a model that is as it should be."""


def options(scraped: Scraped, name: str, chosen: Mapping[str, list[str]]) -> list[str]:
    """Return the values that Grafana offers for a variable."""
    match = re.fullmatch(r"label_values\((.+), (\w+)\)", VARIABLES[name]["query"])
    assert match is not None
    query = interpolate(match[1], chosen, step_s=SCRAPE_S, scrape_s=SCRAPE_S)
    return scraped.prometheus.label_values(match[2], query)


@pytest.fixture(scope="session")
def everything(scraped: Scraped) -> dict[str, list[str]]:
    """All models and servers, in the order in which Grafana asks for them."""
    chosen: dict[str, list[str]] = {}
    for name, variable in VARIABLES.items():
        if variable["type"] == "query":
            chosen[name] = options(scraped, name, chosen)
    return chosen


def ask(scraped: Scraped, target: Mapping[str, Any], chosen: Mapping[str, list[str]]) -> list[Series]:
    """Send a query as Grafana does: over the time of the load, or for its end."""
    query = interpolate(target["expr"], chosen, step_s=SCRAPE_S, scrape_s=SCRAPE_S)
    if target["instant"]:
        return scraped.prometheus.query(query, scraped.end)
    return scraped.prometheus.query_range(query, scraped.start, scraped.end, SCRAPE_S)


@needs_prometheus
def test_the_variables_offer_models_and_servers(scraped: Scraped, everything: Mapping[str, list[str]]) -> None:
    assert everything["model"] == sorted(MODELS), "streaming models only"
    (target,) = scraped.prometheus.query("up")
    assert everything["instance"] == [target.labels["instance"]]


@needs_prometheus
@pytest.mark.parametrize(("panel", "target"), TARGETS)
def test_a_query_returns_data(
    scraped: Scraped, everything: Mapping[str, list[str]], panel: Mapping[str, Any], target: Mapping[str, Any]
) -> None:
    found = ask(scraped, target, everything)
    values = [value for series in found for value in series.values if math.isfinite(value)]
    assert values, f"no data: {target['expr']}"
    assert min(values) >= 0
    assert max(values) > 0 or panel["title"] in ZERO
    assert max(values) <= panel["fieldConfig"]["defaults"].get("max", math.inf)
    wanted = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
    for series in found:
        assert set(wanted) <= set(series.labels), "a legend names a label that the series has not"
    assert len({tuple(series.labels.get(name) for name in wanted) for series in found}) == len(found)


@needs_prometheus
@pytest.mark.parametrize(("panel", "target"), TARGETS)
def test_a_query_returns_data_of_one_model(
    scraped: Scraped, everything: Mapping[str, list[str]], panel: Mapping[str, Any], target: Mapping[str, Any]
) -> None:
    found = ask(scraped, target, {**everything, "model": ["emoji"]})
    assert bool(found) != (panel["title"] in NOT_OF_EMOJI)
    assert all(series.labels.get("model", "emoji") == "emoji" for series in found)


@needs_prometheus
@pytest.mark.parametrize(("panel", "target"), TARGETS)
def test_names_are_those_of_the_metrics(scraped: Scraped, panel: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    known = metrics_of(scraped.page)
    for name, labels in labels_of(target["expr"]).items():
        assert name in known, name
        assert labels <= known[name] | {"job", "instance"}, f"{name} has no label {labels - known[name]}"


def test_the_file_is_what_its_panels_make() -> None:
    assert (GRAFANA / "dashboards" / "diffusion.json").read_text() == render(), "run: make dashboard"


@pytest.mark.parametrize("panel", [pytest.param(panel, id=panel["title"]) for panel in PANELS])
def test_a_panel_says_what_it_shows(panel: Mapping[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        covered = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not covered & cells, panel["title"]
        assert max(x for x, _ in covered) < 24
        cells |= covered
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_data_source_is_the_provisioned_one() -> None:
    provisioned = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())
    (source,) = provisioned["datasources"]
    assert source["type"] == VARIABLES["datasource"]["query"] == "prometheus"
    assert source["uid"] == VARIABLES["datasource"]["current"]["value"] == DATA_SOURCE
    scraping = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == scraping["global"]["scrape_interval"]


def test_dashboards_are_provisioned_from_a_folder() -> None:
    provisioned = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "diffusion.yml").read_text())
    (provider,) = provisioned["providers"]
    assert (provider["type"], provider["options"]["path"]) == ("file", "/var/lib/grafana/dashboards")


@pytest.mark.parametrize(
    ("expr", "wanted"),
    [
        ("rate(x[$__rate_interval])", "rate(x[60s])"),
        ('x{a=~"$one"}', 'x{a=~"emoji"}'),
        ('x{a=~"${many}"}', r'x{a=~"(a\\.b:8002|c)"}'),
    ],
)
def test_variables_are_replaced_as_grafana_does_it(expr: str, wanted: str) -> None:
    values = {"one": ["emoji"], "many": ["a.b:8002", "c"]}
    assert interpolate(expr, values, step_s=15, scrape_s=15) == wanted


def test_the_rate_interval_grows_with_the_step() -> None:
    assert interpolate("$__rate_interval", {}, step_s=300, scrape_s=15) == "315s"


def test_an_unknown_variable_is_an_error() -> None:
    with pytest.raises(ValueError, match="variable 'modle' has no value"):
        interpolate('x{a=~"$modle"}', {"model": ["emoji"]}, step_s=15, scrape_s=15)
