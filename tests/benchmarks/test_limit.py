"""The limit's schedule, on cases that can be worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.limit import Work, interpolate, row_counts, simulate


def fixed_and_per_row(rows: int) -> float:
    """A forward of r rows takes 10 s and 1 s a row."""
    return 10.0 + rows


def test_one_request_alone() -> None:
    ideal = simulate([Work(steps=3, rows=2, other_s=5.0)], 8, fixed_and_per_row)
    assert ideal.seconds == 3 * 12 + 5
    assert (ideal.forwards, ideal.mean_rows) == (3, 2.0)


def test_one_at_a_time_is_the_bare_pipeline() -> None:
    works = [Work(2, 2, 1.0), Work(4, 2, 3.0), Work(1, 1, 0.5)]
    ideal = simulate(works, 1, fixed_and_per_row)
    assert ideal.seconds == (2 + 4) * 12 + 1 * 11 + 4.5
    assert ideal.forwards == 7


def test_equal_requests_share_every_forward() -> None:
    ideal = simulate([Work(5, 2, 1.0)] * 4, 4, fixed_and_per_row)
    assert ideal.seconds == 5 * (10 + 8) + 4
    assert (ideal.forwards, ideal.mean_rows) == (5, 8.0)


def test_a_short_one_leaves_and_the_next_takes_its_place() -> None:
    #   forward    1  2  3  4  5
    #   a (3)      a  a  a
    #   b (1)      b
    #   c (3)         c  c  c
    #   d (2)               d  d
    #   rows       4  4  4  4  2
    works = [Work(3, 2, 0.0), Work(1, 2, 0.0), Work(3, 2, 0.0), Work(2, 2, 0.0)]
    ideal = simulate(works, 2, fixed_and_per_row)
    assert ideal.forwards == 5
    assert ideal.seconds == 4 * 14 + 12
    assert ideal.mean_rows == 18 / 5


def test_requests_of_different_rows_share_a_forward() -> None:
    ideal = simulate([Work(1, 1, 0.0), Work(2, 2, 0.0)], 2, fixed_and_per_row)
    assert ideal.seconds == (10 + 3) + (10 + 2)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 2)), min_size=1, max_size=12),
    st.integers(1, 6),
)
def test_rows_are_conserved(shapes: list[tuple[int, int]], concurrency: int) -> None:
    works = [Work(steps, rows, 0.25) for steps, rows in shapes]
    # Where a row costs the same in any company, batching changes nothing.
    ideal = simulate(works, concurrency, float)
    rows = sum(steps * rows for steps, rows in shapes)
    assert ideal.seconds == pytest.approx(rows + 0.25 * len(works))
    assert ideal.mean_rows * ideal.forwards == pytest.approx(rows)
    assert ideal.forwards >= max(steps for steps, _ in shapes)


def test_interpolate() -> None:
    measured = {2: 1.0, 4: 2.0, 8: 6.0}
    assert [interpolate(measured, rows) for rows in (2, 3, 4, 5, 8)] == [1.0, 1.5, 2.0, 3.0, 6.0]


@pytest.mark.parametrize("rows", [1, 9])
def test_interpolate_does_not_guess(rows: int) -> None:
    with pytest.raises(ValueError, match="were not measured"):
        interpolate({2: 1.0, 8: 6.0}, rows)


def test_interpolate_without_measurements() -> None:
    with pytest.raises(ValueError, match="were not measured"):
        interpolate({}, 2)


def test_row_counts_hold_both_ends() -> None:
    assert row_counts([2, 2], 4) == [2, 4, 6, 8]
    assert row_counts([2], 16) == [2, 4, 6, 8, 12, 16, 20, 24, 28, 32]
    assert row_counts([1, 2], 3) == [1, 2, 3, 4, 6]
    assert row_counts([2], 1) == [2]
