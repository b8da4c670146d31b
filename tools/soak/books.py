"""Compares the server's metrics with what the client counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tests.support.client import Metrics

from .calls import Told

OUTCOMES = {
    "finished": "completed",
    "failed": "failed",
    "late": "failed",
    "rejected": "rejected",
    "cancelled": "cancelled",
}
"""What the server counts a request as, by how it ended for its client."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the books.

    Attributes:
        name: the metric and the model.
        client: what the client counted; for a range, its lower end.
        server: by how much the metric grew.
        highest: upper end of what is right; equal to `client` where the count is exact.
    """

    name: str
    client: float
    server: float
    highest: float

    @property
    def balances(self) -> bool:
        """Whether the two agree, sums of times within a thousandth."""
        slack = 1e-3 * abs(self.client) + 1e-3 if "seconds_sum" in self.name else 0.0
        return self.client - slack <= self.server <= self.highest + slack


def balance(told: Iterable[Told], grown: Metrics) -> list[Line]:
    """Return the books of a run.

    Args:
        told: every request that was sent.
        grown: the metrics at the end, less those at the beginning.
    """
    lines = []
    by_model: dict[str, list[Told]] = {}
    for one in told:
        by_model.setdefault(one.plan.model, []).append(one)
    for model, requests in sorted(by_model.items()):
        counted = Counter(OUTCOMES[one.ended] for one in requests if one.ended in OUTCOMES)
        # The client of these cannot know whether the server had begun; if it had, it counts a cancelled one.
        unknown = sum(one.ended == "gone" for one in requests)
        for outcome in ("completed", "failed", "rejected", "cancelled"):
            found = grown.get("diffusion_requests_total", model, outcome=outcome)
            highest = counted[outcome] + (unknown if outcome == "cancelled" else 0)
            lines.append(Line(f"diffusion_requests_total {outcome}, {model}", counted[outcome], found, highest))
        finished = [one for one in requests if one.ended == "finished"]
        exact = {
            "diffusion_outputs_total": sum(one.num_outputs for one in finished),
            "diffusion_request_duration_seconds_count": len(finished),
            "diffusion_request_duration_seconds_sum": sum(one.total_ms for one in finished) / 1e3,
        }
        lines += [Line(f"{name}, {model}", value, grown.get(name, model), value) for name, value in exact.items()]
        # Those that were cut off did some steps too, which nobody saw.
        steps = sum(one.num_steps for one in finished)
        lines.append(
            Line(f"diffusion_steps_total, {model}", steps, grown.get("diffusion_steps_total", model), float("inf"))
        )
    return lines
