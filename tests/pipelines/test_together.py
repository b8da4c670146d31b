"""The promise of the backend: among any neighbours, a request gives what it gives alone."""

from __future__ import annotations

import copy
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffusion_backend.config import ModelConfig
from diffusion_backend.errors import InvalidArgumentError, PipelineError, RequestCancelledError
from diffusion_backend.pipelines import loader
from diffusion_backend.pipelines.reference import run_alone
from diffusion_backend.request import DiffusionRequest, Event, EventKind
from tests.pipelines.conftest import DEADLINE_S, Served, assert_alike, assert_unlike
from tests.support import tiny
from tests.support.fakes import Recorder

EMOJI = Path(__file__).parents[2] / "models" / "emoji"


def make(prompt: Any, seed: int | None = None, **params: Any) -> DiffusionRequest:
    return DiffusionRequest.make(prompt, seed=seed, **params)


SD_REQUESTS = [
    make("a red apple", 1, num_inference_steps=4),
    make("a blue whale", 2, num_inference_steps=7, guidance_scale=3.0, negative_prompt=("a table",)),
    make("a green dog", 3, num_inference_steps=5, guidance_scale=1.0),
    make("a big cat", 4, num_inference_steps=6, scheduler="EulerDiscreteScheduler"),
    make("a small cat", 5, num_inference_steps=3, scheduler="DPMSolverMultistepScheduler"),
    make("an ancestor", 6, num_inference_steps=5, scheduler="EulerAncestralDiscreteScheduler"),
    make(("a river", "a table", "a dog"), 7, num_inference_steps=4, num_outputs_per_prompt=2),
    make("a large picture", 8, num_inference_steps=3, height=32, width=24),
    make("another large one", 9, num_inference_steps=4, height=32, width=24, guidance_scale=2.0),
]
SD3_REQUESTS = [
    make("a red apple", 1, num_inference_steps=4),
    make("a blue whale", 2, num_inference_steps=6, guidance_scale=3.0, negative_prompt=("a table",)),
    make("a green dog", 3, num_inference_steps=5, guidance_scale=1.0),
    make(("a river", "a table"), 4, num_inference_steps=3, num_outputs_per_prompt=2),
    make("a large picture", 5, num_inference_steps=3, height=32, width=16),
    make("another large one", 6, num_inference_steps=4, height=32, width=16),
]
SHORT = {"height": 16, "width": 16, "extra_args": {"max_sequence_length": 32}}
FLUX_REQUESTS = [
    make("a red apple", 1, num_inference_steps=4, **SHORT),
    make("a blue whale", 2, num_inference_steps=6, guidance_scale=7.0, **SHORT),
    make("a green dog", 3, num_inference_steps=3, guidance_scale=1.0, **SHORT),
    make(("a river", "a table"), 4, num_inference_steps=3, num_outputs_per_prompt=2, **SHORT),
    make("a large picture", 5, num_inference_steps=3, **{**SHORT, "height": 24}),
    make("another large one", 6, num_inference_steps=4, **{**SHORT, "height": 24}),
]


@pytest.mark.parametrize(
    ("family", "requests", "most_alone"),
    [("sd", SD_REQUESTS, 12), ("sd3", SD3_REQUESTS, 8), ("flux", FLUX_REQUESTS, 4)],
)
def test_a_mix_of_requests_gives_what_each_gives_alone(
    request: pytest.FixtureRequest, family: str, requests: list[DiffusionRequest], most_alone: int
) -> None:
    """Steps, guidance, schedulers, sizes, prompts and outputs all mixed, in joint forwards."""
    served: Served = request.getfixturevalue(family)
    assert set(served.capabilities.joint.values()) == {None}, "its self-check failed: nothing is batched"
    expected = [served.alone(r) for r in requests]
    with served.running(max_batch_rows=64) as running:
        results = running.results(requests)
    for result, images in zip(results, expected, strict=True):
        assert_alike(result.output.images, images)
    for i, first in enumerate(expected):
        for second in expected[i + 1 :]:
            if first[0].shape == second[0].shape:
                assert_unlike(first[0], second[0])
    assert max(running.rows) > most_alone, "no forward was joint"
    assert running.solo_calls() == {}
    steps = sum(r.num_inference_steps or 0 for r in requests)
    assert running.sink.values["diffusion_steps_total", ()] == steps
    assert len(running.rows) < steps
    assert running.sink.values["diffusion_outputs_total", ("image",)] == sum(r.num_outputs for r in requests)


def test_every_row_is_computed_once(sd: Served) -> None:
    """The rows of all forwards are the rows of all steps: nothing is computed twice, nothing left out."""
    requests = [
        make("a dog", 1, num_inference_steps=5),  # 2 rows a step
        make("a cat", 2, num_inference_steps=3, guidance_scale=1.0),  # 1
        make("a cow", 3, num_inference_steps=4, num_outputs_per_prompt=3),  # 6
    ]
    with sd.running() as running:
        running.results(requests)
    assert sum(running.rows) == 5 * 2 + 3 * 1 + 4 * 6
    assert sorted(running.rows, reverse=True) == [9, 9, 9, 8, 2]


def test_max_batch_rows_is_kept_and_changes_nothing(sd: Served) -> None:
    requests = [make("a dog", seed, num_inference_steps=3) for seed in range(5)]
    with sd.running(max_batch_rows=4) as running:
        results = running.results(requests)
    assert max(running.rows) == 4
    for r, result in zip(requests, results, strict=True):
        assert_alike(result.output.images, sd.alone(r))


@pytest.mark.parametrize("neighbours", [0, 1, 3, 7])
def test_seed_7_is_the_same_among_any_number_of_neighbours(sd: Served, neighbours: int) -> None:
    request = make("a red apple", 7, num_inference_steps=5)
    with sd.running() as running:
        others = [make(f"a dog {i}", num_inference_steps=3 + i) for i in range(neighbours)]
        result = running.results([*others, request])[-1]
    assert_alike(result.output.images, sd.alone(request))


def test_a_repeated_request_is_the_same_and_leaves_no_trace(sd: Served) -> None:
    """The pipeline and its scheduler are shared: a request that wrote to them would change the next one."""
    before = copy.deepcopy(vars(sd.pipeline.scheduler))
    attributes = {name: id(value) for name, value in vars(sd.pipeline).items()}
    request = make("a red apple", 3)  # steps and all else omitted: 50 steps
    with sd.running() as running:
        first = running.results([request])[0]
        between = make("a whale", 4, num_inference_steps=2, guidance_scale=1.0, scheduler="EulerDiscreteScheduler")
        running.results([between])
        second = running.results([request])[0]
    assert first.output.images is not None
    assert np.array_equal(first.output.images, second.output.images)
    after = vars(sd.pipeline.scheduler)
    assert before.keys() == after.keys()
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name]
        assert same, f"scheduler.{name} was changed"
    assert {name: id(value) for name, value in vars(sd.pipeline).items()} == attributes
    assert "step" not in after, "the step meter was left on the shared scheduler"


# -- seeds and prompts ------------------------------------------------------------------------------------------


def test_output_k_of_several_is_the_output_of_its_reported_seed_alone(sd: Served) -> None:
    with sd.running() as running:
        four = running.results([make("a dog", 11, num_inference_steps=4, num_outputs_per_prompt=4)])[0]
        singles = running.results([make("a dog", seed, num_inference_steps=4) for seed in four.seeds])
    assert four.seeds == (11, 12, 13, 14)
    assert four.output.images is not None
    for k, single in enumerate(singles):
        assert_alike(single.output.images, four.output.images[k : k + 1])
    for k in range(3):
        assert_unlike(four.output.images[k], four.output.images[k + 1])


def test_unseeded_requests_differ_and_their_reported_seeds_repeat_them(sd: Served) -> None:
    with sd.running() as running:
        drawn = running.results([make("a dog", num_inference_steps=3) for _ in range(8)])
        again = running.results([make("a dog", result.seeds[0], num_inference_steps=3) for result in drawn])
    assert len({result.seeds for result in drawn}) == 8
    for i, (one, two) in enumerate(zip(drawn, again, strict=True)):
        assert one.output.images is not None
        assert_alike(two.output.images, one.output.images)
        for other in drawn[:i]:
            assert_unlike(one.output.images, other.output.images)


def test_outputs_come_prompt_by_prompt(sd: Served) -> None:
    """A, A, B, B, C, C; and a prompt of several gives what it gives by itself."""
    prompts = ("a dog", "a blue whale", "an apple on a table")
    with sd.running() as running:
        six = running.results([make(prompts, 5, num_inference_steps=3, num_outputs_per_prompt=2)])[0]
        pairs = running.results([make(p, 5, num_inference_steps=3, num_outputs_per_prompt=2) for p in prompts])
    assert six.seeds == (5, 6) * 3
    assert six.output.images is not None
    for i, pair in enumerate(pairs):
        assert_alike(pair.output.images, six.output.images[2 * i : 2 * i + 2])


def test_guidance_negative_prompt_steps_and_size_each_have_an_effect(sd: Served) -> None:
    base = {"num_inference_steps": 4, "guidance_scale": 7.5}
    changes: list[dict[str, Any]] = [
        {},
        {"guidance_scale": 1.0},
        {"negative_prompt": ("a table",)},
        {"num_inference_steps": 8},
        {"scheduler": "EulerAncestralDiscreteScheduler"},
    ]
    with sd.running() as running:
        results = running.results([make("a dog", 3, **{**base, **change}) for change in changes])
    images = [result.output.images for result in results]
    for i, one in enumerate(images):
        for two in images[:i]:
            assert one is not None
            assert two is not None
            assert np.abs(one.astype(int) - two.astype(int)).max() > 1


@pytest.mark.parametrize(("side", "shape"), [("height", (1, 32, 16, 3)), ("width", (1, 16, 32, 3))])
def test_one_side_alone_is_not_ignored(sd: Served, side: str, shape: tuple[int, ...]) -> None:
    """`StableDiffusionPipeline` takes its own size if either side is missing; the echo would then be a lie."""
    with sd.running() as running:
        result = running.results([make("a dog", 3, num_inference_steps=2, **{side: 32})])[0]
    assert result.output.images is not None
    assert result.output.images.shape == shape
    assert (result.record.params["height"], result.record.params["width"]) == shape[1:3]


def test_the_record_echoes_what_was_really_used(sd: Served) -> None:
    with sd.running() as running:
        given = make(
            "a dog",
            3,
            num_inference_steps=2,
            guidance_scale=2.5,
            scheduler="EulerDiscreteScheduler",
            height=16,
            width=24,
        )
        first, second = running.results([given, make("a dog", 4, num_outputs_per_prompt=2)])
    assert first.output.images is not None
    assert first.output.images.shape == (1, 16, 24, 3)
    assert first.record.params == {
        "num_inference_steps": 2,
        "guidance_scale": 2.5,
        "height": 16,
        "width": 24,
        "num_outputs_per_prompt": 1,
        "seeds": [3],
        "scheduler": "EulerDiscreteScheduler",
    }
    assert second.record.params == {
        "num_inference_steps": 50,
        "guidance_scale": 7.5,
        "height": 16,
        "width": 16,
        "num_outputs_per_prompt": 2,
        "seeds": [4, 5],
        "scheduler": "DDIMScheduler",
    }
    seconds = first.record.seconds()
    assert all(seconds[phase] > 0 for phase in ("queue", "preprocess", "execute", "postprocess"))


# -- what cannot be joined --------------------------------------------------------------------------------------


def test_rows_that_look_at_each_other_fail_the_self_check_and_run_solo_and_right(mixing: Served) -> None:
    assert mixing.capabilities.joint == {"unet": "self_check"}
    requests = [
        make("a dog", 1, num_inference_steps=3),
        make("a whale", 2, num_inference_steps=4, num_outputs_per_prompt=2),
        make("a cat", 3, num_inference_steps=2),
    ]
    expected = [mixing.alone(r) for r in requests]
    with mixing.running() as running:
        results = running.results(requests)
    for result, images in zip(results, expected, strict=True):
        assert_alike(result.output.images, images)
    assert running.solo_calls() == {"self_check": 3 + 4 + 2}
    assert len(running.rows) == 3 + 4 + 2


def test_a_pipeline_that_changes_its_shared_modules_runs_one_request_at_a_time_and_right(pag: Served) -> None:
    """PAG swaps the attention of the UNet within each call, and its attention splits the rows into thirds."""
    assert pag.capabilities.exclusive
    assert pag.capabilities.joint == {"unet": "module_state"}
    requests = [
        make("a dog", 1, num_inference_steps=3),
        make("a whale", 2, num_inference_steps=4, guidance_scale=1.0),
        make("a cat", 3, num_inference_steps=2, extra_args={"pag_scale": 0.0}),
    ]
    expected = [pag.alone(r) for r in requests]
    with pag.running() as running:
        handles = running.together(requests)
        results = [handle.result(DEADLINE_S) for handle in handles]
    for result, images in zip(results, expected, strict=True):
        assert_alike(result.output.images, images)
    lives = [(result.record.started, result.record.last_step) for result in results]
    for (_, ended), (started, _) in pairwise(lives):
        assert ended is not None
        assert started is not None
        assert started >= ended, "two requests ran at once"
    assert running.solo_calls() == {"module_state": 3 + 4 + 2}


@pytest.mark.parametrize("how", ["abort", "failure", "dummy_run"])
def test_what_interrupts_such_a_request_leaves_the_shared_modules_as_they_were(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An aborted call never comes to put the attention back; a warm-up puts it back under a call that goes on."""
    caplog.set_level(logging.CRITICAL)
    pag = Served.build(tiny.perturbed_attention)  # its own, as this may break it for others
    interrupted = make("a dog", 1, num_inference_steps=8, request_id="interrupted")
    plain = make("a cat", 3, num_inference_steps=2, extra_args={"pag_scale": 0.0})
    recorder = Recorder()
    expected = [pag.alone(r) for r in (interrupted, plain)]
    before = dict(pag.pipeline.unet.attn_processors)
    point = pag.points[0]
    original = point.original

    def fails_late(sample: torch.Tensor, timestep: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if timestep < 400:
            raise RuntimeError("late")
        return original(sample, timestep, *args, **kwargs)

    with pag.running() as running:

        def on_event(event: Event) -> None:
            recorder(event)
            if how == "abort" and event.kind is EventKind.STEP and event.step == 2:
                running.engine.abort("interrupted")

        if how == "failure":
            point.original = fails_late
        handle = running.together([interrupted], on_event)[0]
        if how == "dummy_run":
            recorder.wait_for("interrupted", EventKind.STEP, 2)
            running.engine._dummy_run()
            assert_alike(handle.result(DEADLINE_S).output.images, expected[0])
        else:
            with pytest.raises(RequestCancelledError if how == "abort" else PipelineError):
                handle.result(DEADLINE_S)
        point.original = original
        assert_alike(running.results([plain])[0].output.images, expected[1])
    after = pag.pipeline.unet.attn_processors
    assert {name: type(p) for name, p in before.items()} == {name: type(p) for name, p in after.items()}


def test_without_step_batching_every_call_runs_solo_and_the_bits_do_not_hang_on_neighbours() -> None:
    served = Served.build(tiny.stable_diffusion, disabled="deterministic")
    assert served.capabilities.joint == {"unet": "deterministic"}
    requests = [make("a dog", 1, num_inference_steps=3), make("a whale", 2, num_inference_steps=2)]
    with served.running() as running:
        results = running.results(requests)
    for r, result in zip(requests, results, strict=True):
        assert result.output.images is not None
        assert np.array_equal(result.output.images, served.alone(r))
    assert running.solo_calls() == {"deterministic": 5}


def test_a_tolerance_of_zero_is_what_the_self_check_goes_by() -> None:
    """`self_check_tolerance` has an effect: other row counts take other kernels, which differ in the last digits."""
    served = Served.build(tiny.stable_diffusion, tolerance=0.0)
    assert served.capabilities.joint == {"unet": "self_check"}


def test_what_the_pipeline_itself_refuses_is_the_callers_fault(sd: Served) -> None:
    beside = make("a cat", 2, num_inference_steps=3)
    with sd.running() as running:
        wrong = make("a dog", 1, extra_args={"timesteps": [9, 1], "sigmas": [1.0, 0.5]})
        refused, fine = running.together([wrong, beside])
        with pytest.raises(InvalidArgumentError, match="arguments: StableDiffusionPipeline refuses it: Only one of"):
            refused.result(DEADLINE_S)
        assert_alike(fine.result(DEADLINE_S).output.images, sd.alone(beside))


def test_capabilities_say_what_the_pipeline_is(sd: Served, sd3: Served, flux: Served) -> None:
    assert sd.capabilities.pipeline_class == "StableDiffusionPipeline"
    assert sd.capabilities.modalities == ("image",)
    assert sd.capabilities.defaults == {"num_inference_steps": 50, "guidance_scale": 7.5, "height": 16, "width": 16}
    assert [s.capabilities.size_multiple for s in (sd, sd3, flux)] == [2, 4, 4]
    assert [s.capabilities.rows_per_output for s in (sd, sd3, flux)] == [2, 2, 1]
    assert [s.capabilities.supports_previews for s in (sd, sd3, flux)] == [True, True, False]
    assert {"DDIMScheduler", "EulerDiscreteScheduler"} <= set(sd.capabilities.schedulers)
    assert not sd.capabilities.supports_audio_output


@pytest.mark.filterwarnings("ignore:.torch_dtype. is deprecated:FutureWarning")
def test_the_shipped_model_loads_and_its_requests_join() -> None:
    executor = loader.load(ModelConfig(model=str(EMOJI)), device="cpu")
    assert executor.capabilities.joint == {"unet": None}
    served = Served(
        loader.load_pipeline(str(EMOJI)), executor.pipeline, executor.capabilities, [], executor._output_type
    )
    requests = [
        make("red apple", 1, num_inference_steps=2),
        make("blue whale", 2, num_inference_steps=3, guidance_scale=1.0),
    ]
    with served.running() as running:
        results = running.results(requests)
    for r, result in zip(requests, results, strict=True):
        assert result.output.images is not None
        assert result.output.images.shape == (1, 64, 64, 3)
        assert_alike(result.output.images, served.alone(r))
    assert max(running.rows) == 3


def test_the_plain_loop_leaves_the_pipeline_as_it_was(sd: Served) -> None:
    before = (id(sd.bare.scheduler), sd.bare.scheduler.num_inference_steps)
    run_alone(sd.bare, make("a dog", 1, num_inference_steps=2, scheduler="EulerDiscreteScheduler"))
    assert (id(sd.bare.scheduler), sd.bare.scheduler.num_inference_steps) == before
