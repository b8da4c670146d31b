"""What is refused before it queues, and what a pipeline's call is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

from diffusion_backend.engine.executor import Capabilities
from diffusion_backend.errors import InvalidArgumentError
from diffusion_backend.pipelines.arguments import Limits, call_arguments, defaults_of, signature_of, validate
from diffusion_backend.request import MAX_SEED, DiffusionRequest, resolve_seeds

NAMES = "prompt negative_prompt num_inference_steps guidance_scale height width num_images_per_prompt generator "
NAMES += "output_type return_dict eta clip_skip latents"
CAPABILITIES = Capabilities(
    pipeline_class="TinyPipeline",
    modalities=("image",),
    arguments=frozenset(NAMES.split()),
    defaults={},
    size_multiple=8,
    schedulers=("DDIMScheduler", "EulerDiscreteScheduler"),
    supports_previews=True,
    rows_per_output=2,
)
VIDEO = replace(CAPABILITIES, arguments=CAPABILITIES.arguments | {"num_frames"}, supports_previews=False)
BARE = replace(CAPABILITIES, arguments=frozenset({"prompt"}), schedulers=())
LIMITS = Limits(max_steps=100, max_side=1024, max_outputs=8, max_frames=64, max_prompt_bytes=20)


def make(prompt: Any = "a dog", **params: Any) -> DiffusionRequest:
    return DiffusionRequest.make(prompt, seed=1, request_id="r", **params)


def check(request: DiffusionRequest, capabilities: Capabilities = CAPABILITIES, rows: int = 32) -> None:
    validate(request, capabilities, LIMITS, rows)


def test_a_request_at_every_limit_is_allowed() -> None:
    check(
        make(
            "x" * 20,
            negative_prompt=("y" * 20,),
            num_inference_steps=100,
            height=1024,
            width=8,
            num_outputs_per_prompt=8,
            guidance_scale=1000.0,
            preview_interval=100,
            timeout_s=0.001,
            scheduler="EulerDiscreteScheduler",
            extra_args={"eta": 0.5, "clip_skip": None},
        )
    )
    check(make(num_inference_steps=1, guidance_scale=0.0, preview_interval=0))
    check(make(num_frames=64), VIDEO)
    check(make(), BARE)


@pytest.mark.parametrize(
    ("params", "capabilities", "message"),
    [
        ({"prompt": "x" * 21}, CAPABILITIES, "prompt: 21 bytes are too many; at most 20 are allowed"),
        ({"prompt": "🐳" * 6}, CAPABILITIES, "prompt: 24 bytes are too many; at most 20 are allowed"),
        ({"prompt": ("a", "x" * 30)}, CAPABILITIES, "prompt: 30 bytes are too many; at most 20 are allowed"),
        ({"negative_prompt": ("x" * 21,)}, CAPABILITIES, "negative_prompt: 21 bytes are too many; at most 20"),
        ({"num_inference_steps": 0}, CAPABILITIES, "num_inference_steps: 0 is not allowed; it must be from 1 to 100"),
        ({"num_inference_steps": -1}, CAPABILITIES, "num_inference_steps: -1 is not allowed; it must be from 1 to 100"),
        ({"num_inference_steps": 2**31 - 1}, CAPABILITIES, "num_inference_steps: 2147483647 is not allowed; it must"),
        ({"num_frames": 65}, VIDEO, "num_frames: 65 is not allowed; it must be from 1 to 64"),
        ({"num_frames": 0}, VIDEO, "num_frames: 0 is not allowed; it must be from 1 to 64"),
        (
            {"num_outputs_per_prompt": 9},
            CAPABILITIES,
            "num_outputs_per_prompt: 9 is not allowed; it must be from 1 to 8",
        ),
        ({"preview_interval": -1}, CAPABILITIES, "preview_interval: -1 is not allowed; it must be from 0 to 100"),
        ({"preview_interval": 101}, CAPABILITIES, "preview_interval: 101 is not allowed; it must be from 0 to 100"),
        ({"height": 0}, CAPABILITIES, "height: 0 is not allowed; it must be from 1 to 1024"),
        ({"width": -8}, CAPABILITIES, "width: -8 is not allowed; it must be from 1 to 1024"),
        ({"height": 1032}, CAPABILITIES, "height: 1032 is not allowed; it must be from 1 to 1024"),
        ({"width": 100}, CAPABILITIES, "width: 100 is not allowed; it must be a multiple of 8"),
        (
            {"guidance_scale": float("nan")},
            CAPABILITIES,
            "guidance_scale: nan is not allowed; it must be a number from 0",
        ),
        ({"guidance_scale": float("inf")}, CAPABILITIES, "guidance_scale: inf is not allowed"),
        ({"guidance_scale": -1.0}, CAPABILITIES, r"guidance_scale: -1\.0 is not allowed; .* from 0 to 1000"),
        ({"guidance_scale": 1001.0}, CAPABILITIES, r"guidance_scale: 1001\.0 is not allowed"),
        ({"timeout_s": 0.0}, CAPABILITIES, r"timeout: 0\.0 s is not allowed; it must be more than 0"),
        ({"timeout_s": float("nan")}, CAPABILITIES, "timeout: nan s is not allowed"),
        ({"preview_interval": 2}, VIDEO, "preview_interval: TinyPipeline has no previews; leave it out, or give 0"),
        (
            {"scheduler": "EulerDiscretScheduler"},
            CAPABILITIES,
            "scheduler: 'EulerDiscretScheduler' is not one of DDIMScheduler, EulerDiscreteScheduler; "
            "did you mean 'EulerDiscreteScheduler'",
        ),
        ({"scheduler": "os"}, BARE, "scheduler: 'os' is not one of none"),
        ({"num_frames": 4}, CAPABILITIES, "num_frames: TinyPipeline has no such argument; leave it out"),
        ({"guidance_scale": 2.0}, BARE, "guidance_scale: TinyPipeline has no such argument; leave it out"),
        ({"negative_prompt": ("a",)}, BARE, "negative_prompt: TinyPipeline has no such argument; leave it out"),
        ({"num_outputs_per_prompt": 2}, BARE, "num_outputs_per_prompt: TinyPipeline makes one output a prompt"),
        (
            {"extra_args": {"clip_skp": 1}},
            CAPABILITIES,
            r"extra_args: 'clip_skp' is not an argument of TinyPipeline; did you mean 'clip_skip'\? "
            r"\(allowed are clip_skip, eta\)",
        ),
        (
            {"extra_args": {"height": 8}},
            CAPABILITIES,
            "extra_args: 'height' cannot be set here; allowed are clip_skip, e",
        ),
        ({"extra_args": {"latents": [1]}}, CAPABILITIES, "extra_args: 'latents' cannot be set here"),
        ({"extra_args": {"eta": object()}}, CAPABILITIES, "extra_args: 'eta' must be a plain JSON value"),
        ({"extra_args": {"eta": [{"a": {1: 2}}]}}, CAPABILITIES, "extra_args: 'a' must be a plain JSON value"),
    ],
)
def test_each_rule_names_the_field_the_value_and_what_is_allowed(
    params: dict[str, Any], capabilities: Capabilities, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{message}") as caught:
        check(make(**params), capabilities)
    assert caught.value.request_id == "r"
    assert caught.value.field == message.split(":")[0]


def test_more_rows_than_a_forward_may_have_are_refused_with_how_many_outputs_fit() -> None:
    check(make(("a", "b"), num_outputs_per_prompt=4), rows=16)
    with pytest.raises(InvalidArgumentError, match="8 for 2 prompts are 16 outputs; at most 8 a request are allowed"):
        check(make(("a", "b"), num_outputs_per_prompt=8), rows=16)


# -- requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"prompt": (), "seeds": ()}, "prompt: at least one prompt is needed"),
        (
            {"prompt": ("a",), "seeds": (), "num_outputs_per_prompt": 0},
            "num_outputs_per_prompt: 0 is not allowed; it m",
        ),
        ({"prompt": ("a",), "seeds": (1, 2)}, "seed: 2 seeds for 1 outputs"),
        ({"prompt": ("a",), "seeds": (1,), "negative_prompt": ("b", "c")}, "negative_prompt: 2 given for 1 prompts"),
    ],
)
def test_a_request_that_is_no_request_cannot_be_made(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        DiffusionRequest(request_id="r", **params)


def test_seeds_follow_the_base_seed_of_each_prompt() -> None:
    assert resolve_seeds([5, 100], 3) == (5, 6, 7, 100, 101, 102)
    assert resolve_seeds([0, 2**32, MAX_SEED], 1) == (0, 2**32, MAX_SEED)
    assert resolve_seeds([MAX_SEED], 2) == (MAX_SEED, 0)
    drawn = resolve_seeds([None] * 8, 1)
    assert len(set(drawn)) == 8
    assert all(0 <= seed < 2**32 for seed in drawn)
    for seed in (-1, MAX_SEED + 1):
        with pytest.raises(InvalidArgumentError, match=f"seed: {seed} is not allowed; it must be from 0 to {MAX_SEED}"):
            resolve_seeds([seed], 1)


# -- the call ---------------------------------------------------------------------------------------------------


def test_a_call_of_one_prompt_and_output_is_written_as_a_person_would() -> None:
    call = call_arguments(make(negative_prompt=("b",), extra_args={"eta": 0.5}), CAPABILITIES.arguments, "pt")
    generator = call.pop("generator")
    assert call == {
        "prompt": "a dog",
        "negative_prompt": "b",
        "output_type": "pt",
        "return_dict": True,
        "eta": 0.5,
    }
    assert isinstance(generator, torch.Generator)
    assert generator.initial_seed() == 1


def test_a_call_of_several_has_lists_and_a_generator_each() -> None:
    call = call_arguments(
        make(("a", "b"), num_outputs_per_prompt=2, height=8, num_inference_steps=3), CAPABILITIES.arguments, "np"
    )
    assert call["prompt"] == ["a", "a", "b", "b"]
    assert [g.initial_seed() for g in call["generator"]] == [1, 2, 1, 2]
    assert (call["height"], call["num_inference_steps"]) == (8, 3)
    assert not {"num_images_per_prompt", "width"} & set(call)


@pytest.mark.parametrize(
    ("prompts", "count", "given", "called"),
    [
        (("a",), 2, "x", "x"),  # the pipeline repeats it, as it does the prompt
        (("a",), 2, ["x"], "x"),
        (("a", "b"), 1, ["x", "y"], ["x", "y"]),
        (("a", "b"), 2, ["x", "y"], ["x", "x", "y", "y"]),
        (("a", "b"), 2, "x", ["x"] * 4),
    ],
)
@pytest.mark.parametrize("name", ["prompt_2", "negative_prompt_3"])
def test_prompts_of_further_encoders_go_the_way_of_the_prompts(
    name: str, prompts: Any, count: int, given: Any, called: Any
) -> None:
    request = make(prompts, num_outputs_per_prompt=count, extra_args={name: given})
    assert call_arguments(request, CAPABILITIES.arguments | {name}, "pt")[name] == called


@pytest.mark.parametrize(
    "extra",
    [{"sigmas": [0.5, 0.1]}, {"system_prompt": "Draw:"}, {"phrases": ["a", "b"]}, {"original_size": [64, 64]}],
)
def test_other_lists_and_texts_are_handed_on_as_they_are(extra: dict[str, Any]) -> None:
    request = make(("a", "b"), num_outputs_per_prompt=2, extra_args=extra)
    call = call_arguments(request, CAPABILITIES.arguments | set(extra), "pt")
    assert {name: call[name] for name in extra} == extra


def test_further_prompts_that_belong_to_no_prompt_are_refused() -> None:
    capabilities = replace(CAPABILITIES, arguments=CAPABILITIES.arguments | {"prompt_2"})
    check(make(("a", "b"), extra_args={"prompt_2": ["x", "y"]}), capabilities)
    for texts in ([], ["x"], ["x", "y", "z"]):
        with pytest.raises(InvalidArgumentError) as caught:
            check(make(("a", "b"), extra_args={"prompt_2": texts}), capabilities)
        assert caught.value.field == "extra_args"
        assert f"'prompt_2' has {len(texts)} texts for 2 prompts; give one for each, or one text" in str(caught.value)


def test_the_other_side_is_filled_in_only_where_one_is_given() -> None:
    defaults = {"height": 512, "width": 768}
    one = call_arguments(make(height=8), CAPABILITIES.arguments, "pt", defaults)
    assert (one["height"], one["width"]) == (8, 768)
    none = call_arguments(make(), CAPABILITIES.arguments, "pt", defaults)
    assert not {"height", "width"} & none.keys()
    unknown = call_arguments(make(width=8), CAPABILITIES.arguments, "pt", {"height": None})
    assert "height" not in unknown


def test_a_pipeline_is_given_only_what_it_takes() -> None:
    assert call_arguments(make(), frozenset({"prompt"}), "pt") == {"prompt": "a dog"}
    assert call_arguments(make("", num_outputs_per_prompt=1), frozenset({"batch_size"}), "pt") == {"batch_size": 1}


def test_the_signature_leaves_out_self_and_variadics_and_tells_the_defaults() -> None:
    class Config:
        sample_size = 64

    class Denoiser:
        config = Config()

    class Pipeline:
        vae_scale_factor, unet = 8, Denoiser()

        def __call__(
            self, prompt: str, height: int | None = None, width: int = 96, guidance_scale=7.5, *a: Any, **k: Any
        ):
            """Draw."""

    assert list(signature_of(Pipeline())) == ["prompt", "height", "width", "guidance_scale"]
    assert defaults_of(Pipeline()) == {"height": 512, "width": 96, "guidance_scale": 7.5}


@pytest.mark.parametrize(("in_lists", "prompts"), [(True, ["a", "a", "a"]), (False, "a")])
def test_several_outputs_of_one_picture_are_spread_where_the_pipeline_takes_lists(in_lists: bool, prompts: Any) -> None:
    """LTX wants a picture for each generator, Wan refuses a list of pictures."""
    image = Image.new("RGB", (8, 8))
    request = DiffusionRequest.make("a", seed=3, num_outputs_per_prompt=3, image=(image,))
    arguments = frozenset({"prompt", "image", "generator", "num_videos_per_prompt"})
    call = call_arguments(request, arguments, "pt", pictures_in_lists=in_lists)
    assert call["prompt"] == prompts
    assert call["image"] == ([image] * 3 if in_lists else image)
    assert [generator.initial_seed() for generator in call["generator"]] == [3, 4, 5]
    assert call.get("num_videos_per_prompt") == (None if in_lists else 3)
