"""How much Hypothesis tries: always the same examples, or with SOAK=1 in the environment thousands of new ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FAST = settings(
    max_examples=150,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    deadline=None,  # other work may share the machine
    suppress_health_check=[HealthCheck.too_slow],
)
LONG = settings(FAST, max_examples=10_000, stateful_step_count=100, derandomize=False, print_blob=True)

EFFORT = LONG if os.environ.get("SOAK", "") not in ("", "0") else FAST
