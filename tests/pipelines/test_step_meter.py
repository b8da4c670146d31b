"""The step meter counts on the request's own scheduler, and pipelines do not notice it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler

from diffusion_backend.pipelines.step_meter import StepMeter


def metered(scheduler: Any, *, keep_sample: bool = True) -> tuple[StepMeter, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []
    return StepMeter(scheduler, lambda m: seen.append((m.step, m.num_steps)), keep_sample=keep_sample), seen


def run(scheduler: Any, timesteps: torch.Tensor, **kwargs: Any) -> Any:
    sample = torch.ones(1, 1, 2, 2)
    output = None
    for t in timesteps:
        output = scheduler.step(torch.zeros_like(sample), t, sample, **kwargs)
    return output


@pytest.mark.parametrize("cls", [DDIMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler])
def test_every_step_is_counted_and_the_total_is_known_from_the_first(cls: type) -> None:
    scheduler = cls()
    scheduler.set_timesteps(5)
    _, seen = metered(scheduler)
    run(scheduler, scheduler.timesteps)
    assert seen == [(i, 5) for i in range(1, 6)]


def test_a_start_in_the_middle_counts_what_follows() -> None:
    """Image-to-image begins at a later timestep, told by `set_begin_index` or by the timestep itself."""
    euler = EulerDiscreteScheduler()
    euler.set_timesteps(10)
    euler.set_begin_index(6)
    _, seen = metered(euler)
    run(euler, euler.timesteps[6:])
    assert seen == [(i, 4) for i in range(1, 5)]
    ddim = DDIMScheduler()
    ddim.set_timesteps(10)
    _, seen = metered(ddim)
    run(ddim, ddim.timesteps[7:])
    assert seen == [(i, 3) for i in range(1, 4)]


@pytest.mark.parametrize("cls", [DDIMScheduler, FlowMatchEulerDiscreteScheduler])
def test_pipelines_find_the_signature_that_they_ask_for(cls: type) -> None:
    scheduler = cls()
    expected = list(inspect.signature(scheduler.step).parameters)
    metered(scheduler)
    assert list(inspect.signature(scheduler.step).parameters) == expected
    assert scheduler.step.__name__ == "step"


@pytest.mark.parametrize("return_dict", [True, False])
def test_the_sample_is_the_predicted_clean_one(return_dict: bool) -> None:
    scheduler = DDIMScheduler(clip_sample=False)
    scheduler.set_timesteps(2)
    meter, _ = metered(scheduler)
    output = run(scheduler, scheduler.timesteps[:1], return_dict=return_dict)
    clean = output.pred_original_sample if return_dict else output[1]
    noisy = output.prev_sample if return_dict else output[0]
    assert meter.sample is not None
    assert torch.equal(meter.sample, clean)
    assert not torch.equal(clean, noisy)


def test_a_scheduler_that_tells_no_clean_sample_gives_the_noisy_one() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(3)
    meter, _ = metered(scheduler)
    output = run(scheduler, scheduler.timesteps[:1], return_dict=False)
    assert meter.sample is output[0]


def test_no_sample_is_kept_where_none_is_wanted() -> None:
    """Latents of a video are large; without previews nothing must hold on to them."""
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(2)
    meter, _ = metered(scheduler, keep_sample=False)
    run(scheduler, scheduler.timesteps)
    assert meter.step == 2
    assert meter.sample is None
