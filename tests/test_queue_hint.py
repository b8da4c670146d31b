"""Which queues in front of a streaming model let its requests wait for nothing."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

# By its file: the package around it needs a module that only the server's stub has.
SIGNATURE = Path(__file__).parents[1] / "backend_src" / "diffusion_backend" / "triton" / "signature.py"
MODULE = runpy.run_path(str(SIGNATURE), run_name="signature")
QUEUE, queue_hint = MODULE["QUEUE"], MODULE["queue_hint"]
POLICY = QUEUE["default_queue_policy"]


@pytest.mark.parametrize(
    "batching",
    [
        None,
        {},
        {"preferred_batch_size": [1]},
        QUEUE,
        {**QUEUE, "preferred_batch_size": [4]},
        {"max_queue_delay_microseconds": "1000", "default_queue_policy": {"max_queue_size": 5}},
    ],
)
def test_a_queue_that_hands_over_at_once_needs_no_hint(batching):
    assert queue_hint({} if batching is None else {"dynamic_batching": batching}) is None


@pytest.mark.parametrize(
    "batching",
    [
        {**QUEUE, "preferred_batch_size": [1]},
        {**QUEUE, "max_queue_delay_microseconds": 0},
        {"priority_levels": 2, "default_priority_level": 1},
        {"default_queue_policy": {"max_queue_size": 5}},
        {"default_queue_policy": {"allow_timeout_override": True}},
        {"default_queue_policy": {"default_timeout_microseconds": "1000"}},
        {"preferred_batch_size": [1], "default_queue_policy": POLICY, "max_queue_delay_microseconds": 1000},
    ],
)
def test_a_queue_with_a_policy_that_hands_over_one_by_one_is_told_what_to_set(batching):
    hint = queue_hint({"dynamic_batching": batching})
    assert hint is not None
    assert "max_queue_delay_microseconds: 1000 and no preferred_batch_size of 1" in hint
