"""Metric values into Triton's custom metrics, on its own /metrics endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from ..telemetry import ERROR_REASONS, ERRORS_TOTAL, METRICS, OUTCOMES, REQUESTS_TOTAL, UNARY_TWIN, MetricSpec

_KINDS = {
    "counter": pb_utils.MetricFamily.COUNTER,
    "gauge": pb_utils.MetricFamily.GAUGE,
    "histogram": pb_utils.MetricFamily.HISTOGRAM,
}


def mark_twin(model: str, stream_model: str) -> Any:
    """Say on `/metrics` that a model is the unary twin of another one, for as long as the returned object is kept."""
    family = pb_utils.MetricFamily(name=UNARY_TWIN.name, description=UNARY_TWIN.help, kind=_KINDS[UNARY_TWIN.kind])
    metric = family.Metric(labels={"model": model, "stream_model": stream_model})
    metric.set(1)
    return family, metric


class TritonSink:
    """A `MetricSink` over Triton's metric families; every metric has the label `model`.

    Families of the same name are shared by all models of a server, and equal labels by all instances of a model.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._families = {
            spec.name: pb_utils.MetricFamily(name=spec.name, description=spec.help, kind=_KINDS[spec.kind])
            for spec in METRICS
        }
        self._metrics: dict[tuple[str, tuple[str, ...]], Any] = {}
        for spec in METRICS:  # so that a scrape shows zeros before the first request
            if not spec.labels:
                self._metric(spec, {})
        for outcome in OUTCOMES:
            self._metric(REQUESTS_TOTAL, {"outcome": outcome})
        for reason in ERROR_REASONS:
            self._metric(ERRORS_TOTAL, {"reason": reason})

    def add(self, spec: MetricSpec, labels: Mapping[str, str], amount: float) -> None:
        """See `telemetry.MetricSink.add`."""
        self._metric(spec, labels).increment(amount)

    def observe(self, spec: MetricSpec, labels: Mapping[str, str], value: float) -> None:
        """See `telemetry.MetricSink.observe`."""
        self._metric(spec, labels).observe(value)

    def _metric(self, spec: MetricSpec, labels: Mapping[str, str]) -> Any:
        known = (spec.name, tuple(labels.values()))
        if known not in self._metrics:
            options = {"buckets": list(spec.buckets)} if spec.buckets else {}
            self._metrics[known] = self._families[spec.name].Metric(labels={"model": self._model, **labels}, **options)
        return self._metrics[known]
