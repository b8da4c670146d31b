"""What the dashboard shows: each panel with its queries. `grafana.py` makes JSON of it, `picture.py` a picture.

The queries are of the raw metrics and not of the recording rules, so that the dashboard works without those, and at any
zoom. `$model` and `$instance` are the dashboard's variables. `$model` lists streaming models only: unary twins hand
their requests on to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["timeseries", "stat", "heatmap", "table"]


@dataclass(frozen=True)
class Query:
    """One query of a panel.

    Args:
        legend: of its series, in Grafana's form: `{{label}}` is a label's value.
    """

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel.

    Args:
        unit: by Grafana's name for it.
        stack: whether the series add up to something.
        limit: upper end of the axis, where there is a natural one.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    stack: bool = False
    limit: float | None = None


@dataclass(frozen=True)
class Row:
    """A heading and the panels below it; a line of the dashboard takes `across` of them."""

    title: str
    panels: tuple[Panel, ...]
    across: int = 3


OF = '{model=~"$model", instance=~"$instance"}'


def _rate(metric: str, by: str = "", matchers: str = "") -> str:
    """Return the sum of the rates of a counter over all its series but for the labels `by`."""
    selector = OF if not matchers else OF.replace("}", f", {matchers}}}")
    return f"sum{f' by ({by}) ' if by else ' '}(rate({metric}{selector}[$__rate_interval]))"


def _percentile(metric: str, percent: int) -> Query:
    return Query(f"histogram_quantile({percent / 100}, {_rate(metric + '_bucket', 'le')})", f"p{percent}")


def _mean(metric: str, legend: str) -> Query:
    return Query(f"{_rate(metric + '_sum')} / {_rate(metric + '_count')}", legend)


TRITON_QUEUE_MEAN = f"{_rate('nv_inference_queue_duration_us')} / 1e6 / {_rate('nv_inference_request_success')}"
HITS = _rate("diffusion_prompt_cache_hits_total")
WAITING = f"sum (nv_inference_pending_request_count{OF}) + sum (diffusion_requests_waiting{OF})"

NOW = Row(
    "Now",
    (
        Panel(
            "Servers up",
            "Triton servers that answered the last scrape.",
            "none",
            (Query('count (up{job=~".*triton.*", instance=~"$instance"} == 1)', ""),),
            "stat",
        ),
        Panel(
            "Alerts",
            "Alerts that fire now; docs/monitoring.md says what each means.",
            "none",
            (Query('count (ALERTS{alertname=~"Diffusion.+", alertstate="firing"}) or vector(0)', ""),),
            "stat",
        ),
        Panel(
            "Running",
            "Requests being worked on.",
            "none",
            (Query(f"sum (diffusion_requests_running{OF})", ""),),
            "stat",
        ),
        Panel(
            "Waiting",
            "Requests in Triton's queue and in the engine's.",
            "none",
            (Query(WAITING, ""),),
            "stat",
        ),
        Panel(
            "Outputs a second",
            "Pictures, videos and sounds made.",
            "ops",
            (Query(_rate("diffusion_outputs_total"), ""),),
            "stat",
        ),
        Panel(
            "p99 of the duration",
            "99 % of the completed requests took no longer, from entering the engine to the result.",
            "s",
            (Query(f"histogram_quantile(0.99, {_rate('diffusion_request_duration_seconds_bucket', 'le')})", ""),),
            "stat",
        ),
    ),
    across=6,
)

DEMAND = Row(
    "Demand",
    (
        Panel(
            "Requests by outcome",
            "Requests that ended, a second. Rejected: refused before they were queued.",
            "reqps",
            (Query(_rate("diffusion_requests_total", "outcome"), "{{outcome}}"),),
            stack=True,
        ),
        Panel(
            "Running and waiting",
            "Requests being worked on, and those in Triton's queue and the engine's. Where some wait, all slots "
            "(max_num_seqs) are taken.",
            "short",
            (Query(f"sum (diffusion_requests_running{OF})", "running"), Query(WAITING, "waiting")),
        ),
        Panel(
            "Errors by reason",
            "Requests that failed or were rejected, a second. argument and deadline are the callers' (or capacity's), "
            "queue_full and stopping pass; all others are the server's.",
            "reqps",
            (
                Query(_rate("diffusion_errors_total", "reason"), "{{reason}}"),
                Query(_rate("nv_inference_request_failure", "", 'reason="REJECTED"'), "deadline in Triton's queue"),
            ),
            stack=True,
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        Panel(
            "Duration",
            "Of completed requests, from entering the engine to the result. Triton's queue comes before that.",
            "s",
            tuple(_percentile("diffusion_request_duration_seconds", percent) for percent in (50, 95, 99)),
        ),
        Panel(
            "Time to the first step",
            "Of completed requests, from entering the engine to the end of the first denoising step.",
            "s",
            tuple(_percentile("diffusion_time_to_first_step_seconds", percent) for percent in (50, 95)),
        ),
        Panel(
            "Where the time goes",
            "Mean seconds of a request in each phase, one after the other.",
            "s",
            (
                Query(TRITON_QUEUE_MEAN, "Triton's queue"),
                *(
                    _mean(f"diffusion_request_{phase}_seconds", phase)
                    for phase in ("queue", "preprocess", "execute", "postprocess")
                ),
            ),
            stack=True,
        ),
    ),
)

BATCHING = Row(
    "Batching",
    (
        Panel(
            "Steps a second",
            "Denoising steps done, over all requests: the pace of the server.",
            "ops",
            (Query(_rate("diffusion_steps_total", "model"), "{{model}}"),),
        ),
        Panel(
            "Requests and rows in a forward",
            "Requests that share a forward of the denoiser (steps a forward), and its rows: guidance takes two rows an "
            "output.",
            "short",
            (
                Query(f"{_rate('diffusion_steps_total')} / {_rate('diffusion_batch_rows_count')}", "requests"),
                _mean("diffusion_batch_rows", "rows"),
            ),
        ),
        Panel(
            "Forwards by rows",
            "How many forwards a second had how many rows.",
            "ops",
            (Query(_rate("diffusion_batch_rows_bucket", "le"), "{{le}}"),),
            "heatmap",
        ),
        Panel(
            "Time of a forward",
            "One forward of the denoiser with the scheduler steps of the requests in it.",
            "s",
            tuple(_percentile("diffusion_step_seconds", percent) for percent in (50, 95)),
        ),
        Panel(
            "Solo calls by reason",
            "Denoiser calls a second that could not share a forward; docs/architecture.md has the reasons.",
            "ops",
            (Query(_rate("diffusion_solo_calls_total", "model, reason"), "{{model}}: {{reason}}"),),
        ),
        Panel(
            "Denoisers",
            "1: calls share forwards (summed over instances). 0: they run one by one, for the reason given.",
            "none",
            (Query(f"sum by (model, denoiser, reason) (diffusion_step_batching{OF})", "{{model}}: {{denoiser}}"),),
            "table",
        ),
    ),
)

CAPACITY = Row(
    "Capacity",
    (
        Panel(
            "Outputs by kind",
            "Pictures, videos and sounds made, a second.",
            "ops",
            (Query(_rate("diffusion_outputs_total", "modality"), "{{modality}}"),),
            stack=True,
        ),
        Panel(
            "Denoiser busy",
            "Share of the time in which a forward runs; the most is 1 for each instance of the model in the server.",
            "percentunit",
            (Query(_rate("diffusion_step_seconds_sum", "instance, model"), "{{model}} on {{instance}}"),),
        ),
        Panel(
            "Device",
            "Of the GPUs where Triton sees any, else of the CPU.",
            "percentunit",
            (
                Query(
                    'avg by (instance) (nv_gpu_utilization{instance=~"$instance"})'
                    ' or avg by (instance) (nv_cpu_utilization{instance=~"$instance"})',
                    "busy, {{instance}}",
                ),
                Query(
                    'sum by (instance) (nv_gpu_memory_used_bytes{instance=~"$instance"})'
                    ' / sum by (instance) (nv_gpu_memory_total_bytes{instance=~"$instance"})'
                    ' or sum by (instance) (nv_cpu_memory_used_bytes{instance=~"$instance"})'
                    ' / sum by (instance) (nv_cpu_memory_total_bytes{instance=~"$instance"})',
                    "memory, {{instance}}",
                ),
            ),
            limit=1.0,
        ),
        Panel(
            "Prompts from the cache",
            "Share of the prompts whose embeddings were in the cache, and were not encoded again.",
            "percentunit",
            (
                Query(
                    f"{HITS} / ({HITS} + {_rate('diffusion_prompt_cache_misses_total')})",
                    "found",
                ),
            ),
            limit=1.0,
        ),
    ),
    across=4,
)

ROWS = (NOW, DEMAND, LATENCY, BATCHING, CAPACITY)
