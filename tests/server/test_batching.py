"""Who shares a forward does not show in anybody's picture; seeds make everything again."""

from __future__ import annotations

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.server.conftest import pending, same
from tests.server.test_replies import PROMPTS, at_once
from tests.support.client import DTYPES, eventually

MIDDLE = {"num_inference_steps": 6, "height": 32, "width": 32}


def test_two_sizes_at_once_10(served, alone):
    """Case 10, of text-to-image: rows of two sizes cannot share a forward, and both are right."""
    values = [{**MIDDLE, "prompt": PROMPTS[k], "seed": k, "width": (32, 48)[k % 2]} for k in range(6)]
    expected = [alone(**value).images for value in values]
    answers = at_once(6, lambda k: served.infer(**values[k]))
    assert [answer.images.shape for answer in answers] == [(1, 32, (32, 48)[k % 2], 3) for k in range(6)]
    assert all(same(answer.images, image) for answer, image in zip(answers, expected, strict=True))


def test_only_the_offenders_fail_11(served, alone):
    """Case 11: under load, NaN guidance, a wrong type, a wrong rank, extra arguments that are no JSON."""
    good = [{**MIDDLE, "prompt": PROMPTS[k], "seed": k, "num_inference_steps": 10} for k in range(4)]
    expected = [alone(**value).images for value in good]
    bad = [
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"seed": np.array([[1.5]], dtype=np.float32)}, "seed"),
        ({"num_inference_steps": np.array([4], dtype=np.int32)}, "num_inference_steps"),
        ({"prompt": np.array([[[b"a"]]], dtype=np.object_)}, "prompt"),
        ({"extra_args": "{"}, "extra_args"),
    ]

    def call(k: int):
        if k < len(good):
            return served.infer(**good[k])
        try:
            served.infer(**{"prompt": "a", **MIDDLE, **bad[k - len(good)][0]})
        except InferenceServerException as error:
            return error
        return None

    answers = at_once(len(good) + len(bad), call)
    assert all(same(answer.images, image) for answer, image in zip(answers[:4], expected, strict=True))
    for answer, (_, name) in zip(answers[4:], bad, strict=True):
        assert isinstance(answer, InferenceServerException), name
        assert answer.status() == "StatusCode.INVALID_ARGUMENT", answer
        assert name in answer.message()


@pytest.mark.parametrize("neighbours", [1, 3, 7])
def test_neighbours_do_not_show_12(served, alone, neighbours):
    """Case 12: seed 7 alone and with neighbours of other step counts, guidance and schedulers."""
    value = {**MIDDLE, "prompt": "red apple", "seed": 7}
    expected = alone(**value).images
    others = [
        {
            **MIDDLE,
            "prompt": PROMPTS[k],
            "num_inference_steps": 3 + k,
            "guidance_scale": (1.0, 3.0, 7.5)[k % 3],
            "extra_args": {"scheduler": ("DDIMScheduler", "EulerDiscreteScheduler")[k % 2]},
        }
        for k in range(neighbours)
    ]
    before = served.metrics()
    answers = at_once(neighbours + 1, lambda k: served.infer(**[value, *others][k]))
    assert same(answers[0].images, expected)
    delta = served.metrics() - before
    if neighbours == 7:  # one or three may come when the first has ended, on a busy machine
        assert delta.get("diffusion_batch_rows_count") < delta.get("diffusion_steps_total"), "nothing ran together"


def test_unseeded_neighbours_do_not_show_13(served, alone):
    """Case 13: seed 42 with unseeded neighbours, ten times: equal."""
    value = {**MIDDLE, "prompt": "red apple", "seed": 42}
    expected = alone(**value).images
    for _ in range(10):
        answers = at_once(3, lambda k: served.infer(**({**value, "seed": None if k else 42})))
        assert same(answers[0].images, expected)
        assert answers[0].seeds == [42]


def test_a_seeded_call_repeats_14(served):
    """Case 14: the same seeded call three times with a different one between, steps omitted: equal."""
    images = []
    for k in range(3):
        answer = served.infer(prompt="red apple", seed=5)
        assert answer.metrics["param_num_inference_steps"] == 20
        images.append(answer.images)
        served.infer(**MIDDLE, prompt=PROMPTS[k], seed=6)
    assert np.array_equal(images[0], images[1])
    assert np.array_equal(images[0], images[2])


def test_each_output_can_be_made_again_by_its_seed_15(served, alone):
    """Case 15: n = 4 with one seed, then n = 1 with the seed reported for each output."""
    answer = served.infer(**MIDDLE, prompt="red apple", seed=100, num_outputs_per_prompt=4)
    assert answer.seeds == [100, 101, 102, 103]
    assert answer.images.shape == (4, 32, 32, 3)
    for seed, image in zip(answer.seeds, answer.images, strict=True):
        assert same(alone(**MIDDLE, prompt="red apple", seed=seed).image, image)
    assert not same(answer.images[0], answer.images[1])


def test_unseeded_calls_differ_and_can_be_repeated_16(served, alone):
    """Case 16: 8 unseeded: 8 different; resending a reported seed repeats it."""
    answers = at_once(8, lambda k: served.infer(**MIDDLE, prompt="red apple"))
    assert len({answer.images.tobytes() for answer in answers}) == 8
    assert len({answer.seeds[0] for answer in answers}) == 8
    for answer in answers[:2]:
        assert same(alone(**MIDDLE, prompt="red apple", seed=answer.seeds[0]).images, answer.images)


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 1])
def test_every_allowed_seed_works_16(served, seed):
    """Case 16: the edges of the range."""
    answer = served.infer(**MIDDLE, prompt="a", seed=seed)
    assert answer.seeds == [seed]
    assert answer.metrics["param_seeds"] == [seed]


def test_the_seed_after_the_last_one_is_the_first_16(served, alone):
    """Case 16: the seeds of several outputs stay in the range."""
    answer = served.infer(**MIDDLE, prompt="a", seed=2**63 - 1, num_outputs_per_prompt=2)
    assert answer.seeds == [2**63 - 1, 0]
    assert same(alone(**MIDDLE, prompt="a", seed=0).image, answer.images[1])


def test_several_prompts_with_two_outputs_each_24(served, alone):
    """Case 24: three prompts in one request with two outputs each: six, in order, each as alone by its seed."""
    prompts = PROMPTS[:3]
    answer = served.infer(**MIDDLE, prompt=prompts, seed=[10, 20, 30], num_outputs_per_prompt=2)
    assert answer.seeds == [10, 11, 20, 21, 30, 31]
    assert answer.images.shape == (6, 32, 32, 3)
    for k, (seed, image) in enumerate(zip(answer.seeds, answer.images, strict=True)):
        assert same(alone(**MIDDLE, prompt=prompts[k // 2], seed=seed).image, image), (k, seed)


def test_several_prompts_have_a_negative_prompt_each_24(served, alone):
    """Case 24: what is given for each prompt goes with it."""
    answer = served.infer(**MIDDLE, prompt=PROMPTS[:2], negative_prompt=["green", "red"], seed=[1, 2])
    for k in range(2):
        single = alone(**MIDDLE, prompt=PROMPTS[k], negative_prompt=["green", "red"][k], seed=k + 1)
        assert same(single.image, answer.images[k])


@pytest.mark.parametrize("name", sorted(set(DTYPES) - {"prompt", "negative_prompt", "seed"}))
def test_what_holds_for_the_whole_request_must_be_given_once(served, name):
    """Two values of what cannot differ within a request are refused, by name."""
    values = {
        "output_format": ["raw", "png"],
        "extra_args": ['{"eta": 0.1}', "{}"],
        "progress": [True, False],
        "guidance_scale": [1.0, 2.0],
    }
    call = served.stream(**{**MIDDLE, "prompt": ["a", "b"], name: values.get(name, [8, 16])})
    with pytest.raises(InferenceServerException, match=f"{name}: it must be the same for all prompts") as caught:
        call.result()
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_cancelling_two_of_four_leaves_the_others_as_alone_30(served, alone):
    """Case 30: a batch of 4, cancel 2."""
    values = [{**MIDDLE, "prompt": PROMPTS[k], "seed": k, "num_inference_steps": 40} for k in range(2)]
    expected = [alone(**value).images for value in values]
    before = served.metrics()
    doomed = [served.stream(**{**MIDDLE, "num_inference_steps": 900}, prompt="a").wait_step() for _ in range(2)]
    calls = [served.stream(**value) for value in values]
    for call in calls:
        call.wait_step()
    for call in doomed:
        call.cancel()
    assert all(same(call.result().images, image) for call, image in zip(calls, expected, strict=True))
    eventually(lambda: pending(served) == {}, "idle")
    delta = served.metrics() - before
    assert delta.get("diffusion_requests_total", outcome="cancelled") == 2
    assert delta.get("diffusion_requests_total", outcome="completed") == 2
    assert delta.get("diffusion_batch_rows_count") < delta.get("diffusion_steps_total"), "nothing ran together"
