"""Grafana's JSON of the dashboard, made with Grafana's own types for it (release 11.6; later ones read it too)."""

from __future__ import annotations

import itertools
import string
from collections.abc import Mapping
from typing import Any

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from .panels import ROWS, Panel, Query, Row

DATA_SOURCE = "diffusion-prometheus"
"""The uid of the data source, as `deploy/grafana/provisioning` names it."""

_COLUMNS = 24
_HEIGHTS = {"stat": 4, "timeseries": 8, "heatmap": 8, "table": 8}
_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")


def render() -> str:
    """Return the text of the dashboard's file."""
    return JSONEncoder(sort_keys=True, indent=2, ensure_ascii=False).encode(_dashboard().build()) + "\n"


def _dashboard() -> dashboards.Dashboard:
    dashboard = (
        dashboards.Dashboard("Diffusion on Triton")
        .uid("diffusion")
        .description("Requests, latency and step-level batching of the diffusion backend for Triton.")
        .tags(["diffusion", "triton"])
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .refresh("15s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(_source_variable())
        .with_variable(_variable("model", "Model", "label_values(diffusion_requests_running, model)"))
        .with_variable(
            _variable("instance", "Server", 'label_values(diffusion_requests_running{model=~"$model"}, instance)')
        )
    )
    ids = itertools.count(1)
    for row in ROWS:
        dashboard.with_row(dashboards.Row(row.title).id(next(ids)))
        for panel in row.panels:
            dashboard.with_panel(_panel(panel, row).id(next(ids)))
    return dashboard


def _source_variable() -> dashboards.DatasourceVariable:
    current = models.VariableOption(selected=True, text="Prometheus", value=DATA_SOURCE)
    return dashboards.DatasourceVariable("datasource").label("Data source").type("prometheus").current(current)


def _variable(name: str, label: str, query: str) -> dashboards.QueryVariable:
    """A variable of any number of values, all of them unless chosen otherwise."""
    return (
        dashboards.QueryVariable(name)
        .label(label)
        .datasource(_SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def _panel(panel: Panel, row: Row) -> Any:
    """Return the builder of a panel."""
    made = _KINDS[panel.kind](panel)
    made.title(panel.title).description(panel.description).unit(panel.unit).datasource(_SOURCE)
    made.span(_COLUMNS // row.across).height(_HEIGHTS[panel.kind])
    for ref, query in zip(string.ascii_uppercase, panel.queries, strict=False):
        made.with_target(_target(ref, query, panel))
    return made


def _target(ref: str, query: Query, panel: Panel) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(ref).datasource(_SOURCE).expr(query.expr).legend_format(query.legend)
    if panel.kind == "table":
        return target.instant().format(prometheus_models.PromQueryFormat.TABLE)
    if panel.kind == "heatmap":
        return target.range().format(prometheus_models.PromQueryFormat.HEATMAP)
    return target.range()


def _timeseries(panel: Panel) -> timeseries.Panel:
    legend = common_builders.VizLegendOptions().show_legend(True).placement(common.LegendPlacement.BOTTOM)
    made = timeseries.Panel().min(0).line_width(1).fill_opacity(15 if panel.stack else 0)
    made.legend(legend.display_mode(common.LegendDisplayMode.LIST))
    made.tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    if panel.limit is not None:
        made.max(panel.limit)
    if panel.stack:
        made.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    return made


def _stat(_panel: Panel) -> stat.Panel:
    reduce = common_builders.ReduceDataOptions().calcs(["lastNotNull"])
    return stat.Panel().reduce_options(reduce).graph_mode(common.BigValueGraphMode.AREA)


def _heatmap(panel: Panel) -> heatmap.Panel:
    made = heatmap.Panel().cell_values(heatmap.CellValues().unit(panel.unit))
    made.y_axis(heatmap.YAxisConfig().unit("none")).rows_frame(
        heatmap.RowsHeatmapOptions().layout(common.HeatmapCellLayout.LE).value("rows")
    )
    color = heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    return made.color(color)


def _table(_panel: Panel) -> table.Panel:
    hidden: Mapping[str, Any] = {"excludeByName": {"Time": True}}
    return table.Panel().with_transformation(models.DataTransformerConfig(id_val="organize", options=hidden))


_KINDS = {"timeseries": _timeseries, "stat": _stat, "heatmap": _heatmap, "table": _table}
