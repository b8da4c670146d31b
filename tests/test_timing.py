"""A request's record: the phases partition its life, whatever was reached."""

from __future__ import annotations

import random

import pytest

from diffusion_backend.timing import PHASES, RequestRecord, now


def record(*marks: float | None) -> RequestRecord:
    """A record with submitted, started, first_forward, last_step, finished."""
    submitted, started, first_forward, last_step, finished = marks
    assert submitted is not None
    return RequestRecord(
        submitted, started=started, first_forward=first_forward, last_step=last_step, finished=finished
    )


def test_each_phase_is_between_its_two_instants() -> None:
    assert record(1.0, 3.0, 3.5, 11.5, 12.0).seconds() == {
        "queue": 2.0,
        "preprocess": 0.5,
        "execute": 8.0,
        "postprocess": 0.5,
        "total": 11.0,
    }


@pytest.mark.parametrize(
    ("marks", "phases"),
    [
        ((1.0, None, None, None, 5.0), (4.0, 0.0, 0.0, 0.0)),  # cancelled while it waited
        ((1.0, 2.0, None, None, 5.0), (1.0, 3.0, 0.0, 0.0)),  # refused by the pipeline
        ((1.0, 2.0, 3.0, None, 5.0), (1.0, 1.0, 2.0, 0.0)),  # failed in its first forward
        ((1.0, 2.0, None, 4.0, 5.0), (1.0, 2.0, 0.0, 1.0)),  # a pipeline without a denoiser that is known
        ((1.0, 1.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_a_phase_that_was_not_reached_took_no_time(marks: tuple[float | None, ...], phases: tuple[float, ...]) -> None:
    seconds = record(*marks).seconds()
    assert tuple(seconds[phase] for phase in PHASES) == phases
    assert sum(phases) == seconds["total"]


def test_the_parts_add_up_to_the_total_whatever_is_missing() -> None:
    """Instants on a grid of 2^-10 s have exact differences, so the sum is asserted exactly."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(2000):
        marks: list[float | None] = sorted(rng.randrange(2**30) / 1024 for _ in range(5))  # type: ignore[assignment]
        for i in (1, 2, 3):
            if rng.random() < 0.3:
                marks[i] = None
        seconds = record(*marks).seconds()
        assert sum(seconds[phase] for phase in PHASES) == seconds["total"]
        assert all(seconds[phase] >= 0 for phase in PHASES)


def test_a_request_that_is_under_way_is_measured_up_to_now() -> None:
    begin = now()
    seconds = RequestRecord(begin - 10.0, started=begin - 4.0).seconds()
    assert seconds["queue"] == pytest.approx(6.0)
    assert 10.0 <= seconds["total"] <= 10.0 + (now() - begin) + 1e-9


def test_the_flat_record_has_milliseconds_and_parameters_and_no_name_twice() -> None:
    made = record(1.0, 3.0, 3.5, 11.5, 12.0)
    made.params = {"num_inference_steps": 20, "seeds": [7]}
    assert "time_to_first_step_ms" not in made.as_dict()
    made.first_step = 4.0
    assert made.time_to_first_step() == 3.0
    assert made.as_dict() == {
        "time_queue_ms": 2000.0,
        "time_preprocess_ms": 500.0,
        "time_execute_ms": 8000.0,
        "time_postprocess_ms": 500.0,
        "time_total_ms": 11000.0,
        "time_to_first_step_ms": 3000.0,
        "param_num_inference_steps": 20,
        "param_seeds": [7],
    }
