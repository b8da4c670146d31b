"""Which metrics and labels a query names, and which there are."""

from __future__ import annotations

import re

from diffusion_backend.telemetry import METRICS, UNARY_TWIN

_GPU = {
    "nv_gpu_utilization": {"gpu_uuid"},
    "nv_gpu_memory_used_bytes": {"gpu_uuid"},
    "nv_gpu_memory_total_bytes": {"gpu_uuid"},
}
"""Triton's metrics that only a machine with a GPU has: https://github.com/triton-inference-server/server/blob/main/docs/user_guide/metrics.md"""

_HAPROXY = {"haproxy_backend_active_servers": {"proxy"}}
"""Shown by test_balancer.py."""

_PROMETHEUS = {"up": set(), "ALERTS": {"alertname", "alertstate"}}

_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


def metrics_of(page: str) -> dict[str, set[str]]:
    """Return the labels of every metric: ours by the contract, Triton's as they are on a page, and a few more."""
    known = {**_GPU, **_HAPROXY, **_PROMETHEUS, **triton_metrics(page)}
    for spec in (*METRICS, UNARY_TWIN):
        for suffix in _SUFFIXES[spec.kind]:
            known[spec.name + suffix] = {"model", *spec.labels, *({"le"} if suffix == "_bucket" else ())}
    return known


def triton_metrics(page: str) -> dict[str, set[str]]:
    """Return the labels of the `nv_` metrics on a page."""
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(nv_\w+)(?:\{(.*)\})? ", page, flags=re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def labels_of(expr: str) -> dict[str, set[str]]:
    """Return the raw metrics in a query, each with the labels that its selectors match on."""
    found: dict[str, set[str]] = {}
    selector = r"(?<![:\w])(diffusion_\w+|nv_\w+|haproxy_\w+|up|ALERTS)\b(?!:)(?:\{([^}]*)\})?"
    for name, matchers in re.findall(selector, expr):
        found.setdefault(name, set()).update(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
    return found
