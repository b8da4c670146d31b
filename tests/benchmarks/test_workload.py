"""The requests and the instants at which they come."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workload import arrival_times, make_jobs


def test_jobs_are_always_the_same() -> None:
    jobs = make_jobs(48, (8, 20, 40))
    assert jobs == make_jobs(48, (8, 20, 40))
    assert [sum(job.steps == steps for job in jobs) for steps in (8, 20, 40)] == [16, 16, 16]
    assert [job.steps for job in jobs] != [8, 20, 40] * 16
    assert len({job.seed for job in jobs}) == 48
    assert {job.rows for job in jobs} == {2}
    assert {job.side for job in jobs} == {64}


def test_lengths_guidance_and_sizes_are_mixed_independently() -> None:
    jobs = make_jobs(48, (8, 20), guidances=(1.0, 3.0), sides=(64, 80))
    assert len({job.shape for job in jobs}) == 8
    assert sum(job.rows for job in jobs) == 24 * 1 + 24 * 2
    assert sum(job.side == 80 for job in jobs) == 24


def test_another_seed_gives_another_order() -> None:
    assert make_jobs(48, (8, 20, 40), shuffle_seed=1) != make_jobs(48, (8, 20, 40))


@given(st.integers(1, 50), st.floats(0.1, 100), st.integers(0, 2**32))
def test_arrivals(count: int, rate: float, seed: int) -> None:
    times = arrival_times(count, rate, seed)
    assert times[0] == 0.0
    assert len(times) == count
    assert times == sorted(times)
    assert arrival_times(count, 2 * rate, seed) == pytest.approx([at / 2 for at in times])


def test_the_gaps_are_those_of_a_poisson_process() -> None:
    times = arrival_times(20_000, 4.0, seed=0)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 4, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 4, rel=0.03)  # of an exponential distribution, as its mean
