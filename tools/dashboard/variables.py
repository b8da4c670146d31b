"""Variables in queries, replaced as Grafana does it before it asks Prometheus."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


def interpolate(expr: str, values: Mapping[str, Sequence[str]], *, step_s: float, scrape_s: float) -> str:
    """Return `expr` with its variables replaced.

    Args:
        values: of each variable of the dashboard, all that are chosen.
        step_s: distance of the points that are asked for, Grafana's `$__interval`.
        scrape_s: the data source's `timeInterval`.

    Raises:
        ValueError: a variable is unknown, or nothing is chosen.
    """
    # https://grafana.com/docs/grafana/latest/datasources/prometheus/template-variables/#use-__rate_interval
    window = max(step_s + scrape_s, 4 * scrape_s)

    def replace(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name == "__rate_interval":
            return f"{window:g}s"
        if not values.get(name):
            raise ValueError(f"variable {name!r} has no value in {expr!r}")
        chosen = [_escape(value) for value in values[name]]
        return chosen[0] if len(chosen) == 1 else f"({'|'.join(chosen)})"

    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", replace, expr)


def _escape(value: str) -> str:
    """Escape a value for a regular expression in a string of a query; so does Grafana for variables of many values."""
    return re.sub(r"[\\^$.*+?()[\]{}|]", lambda match: f"\\\\{match[0]}", value)
