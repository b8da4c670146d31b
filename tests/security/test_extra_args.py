"""What `extra_args` must not reach: functions, files, addresses, format texts, memory and time without end."""

from __future__ import annotations

import inspect
import json
import re
import time
from typing import Any, NoReturn

import diffusers
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from diffusion_backend.errors import InvalidArgumentError
from diffusion_backend.pipelines.extra_args import RESERVED, Limits, check_extra_args
from tests.support.client import Served

LIMITS = Limits(max_steps=100, max_side=1024, max_outputs=8, max_frames=64, max_duration_s=30.0, max_prompt_bytes=50)
SMALL = {"prompt": "red apple", "num_inference_steps": 1, "height": 16, "width": 16}
DEEP = 400


def refuse(field: str, problem: str) -> NoReturn:
    raise InvalidArgumentError(field, problem)


def check(name: str, value: Any) -> None:
    """Check one argument of a pipeline that has it."""
    check_extra_args({name: value}, {name}, "APipeline", LIMITS, refuse)


# -- through the server --------------------------------------------------------------------------------------------

ATTACKS = {
    # what is sent as extra_args, and what the refusal must say
    "nan": ('{"eta": NaN}', "NaN is no number of JSON"),
    "infinity": ('{"eta": -Infinity}', "-Infinity is no number of JSON"),
    "too large for a float": ('{"eta": 1e999}', "the number 1e999 is too large"),
    "too large for a tensor": ('{"eta": 99999999999999999999}', "'eta': 99999999999999999999 is not allowed"),
    "400 digits": ('{"eta": ' + "9" * 400 + "}", "has 400 digits; at most 20 are allowed"),
    "twice": ('{"eta": 0.1, "eta": 0.9}', "'eta' is there twice"),
    "twice, nested": ('{"cross_attention_kwargs": {"a": 1, "a": 2}}', "'a' is there twice"),
    "deep lists": ('{"eta": ' + "[" * DEEP + "]" * DEEP + "}", "nested 16 deep at most"),
    "deep objects": ('{"cross_attention_kwargs": ' + '{"a": ' * 99 + "1" + "}" * 99 + "}", "nested 16 deep at most"),
    "never closed": ("[" * 1999, "it is not JSON: (nested too deeply|.*char 1999)"),
    "too long": ('{"eta": ' + " " * 2000 + "1}", "bytes are too many; at most 2000 are allowed"),
    "no object": ('"eta"', "it must be a JSON object, not str"),
    "an attribute": ('{"__class__": 1}', "'__class__' is not an argument of StableDiffusionPipeline"),
    "an attribute within": ('{"cross_attention_kwargs": {"__class__": 1}}', "the key '__class__' cannot be set"),
    "itself": ('{"self": 1}', "'self' is not an argument"),
    "a callback": ('{"callback_on_step_end": "os.system"}', "'callback_on_step_end' cannot be set here"),
    "a generator": ('{"generator": 1}', "'generator' cannot be set here"),
    "an output type": ('{"output_type": "latent"}', "'output_type' cannot be set here"),
    "return_dict": ('{"return_dict": false}', "'return_dict' cannot be set here"),
    "latents": ('{"latents": [[[[0]]]]}', "'latents' cannot be set here"),
    "embeddings": ('{"prompt_embeds": [[0]]}', "'prompt_embeds' cannot be set here"),
    "an address": ('{"ip_adapter_image": "http://169.254.169.254/latest"}', "'ip_adapter_image' can only be a number"),
    "a file": ('{"ip_adapter_image": "/etc/passwd"}', "'ip_adapter_image' can only be a number here"),
    "files": ('{"ip_adapter_image": ["/etc/passwd"]}', "'ip_adapter_image' can only be a number here"),
    "a picture": ('{"image": "file:///etc/passwd"}', "'image' cannot be set here"),
    "a path within": ('{"cross_attention_kwargs": {"image": "/etc/passwd"}}', "'image' can only be a number here"),
    "a word with a slash": ('{"cross_attention_kwargs": {"a": "/etc/passwd"}}', "without slashes"),
    "many sigmas": ('{"sigmas": [' + "1," * 10**6 + "1]}", "bytes are too many; at most 2000 are allowed"),
    "a million steps": ('{"num_inference_steps": 1000000}', "'num_inference_steps' cannot be set here"),
    "a size": ('{"height": 100000}', "'height' cannot be set here"),
    "outputs": ('{"num_images_per_prompt": 10000}', "'num_images_per_prompt' cannot be set here"),
    "a NUL": ('{"eta\\u0000": 1}', r"'eta\\x00' is not an argument"),
    "half a character": ('{"cross_attention_kwargs": {"\\ud800": 1}}', "cannot be set in it"),
    "a line's end": ('{"a\\nE1130 forged": 1}', r"'a\\nE1130 forged' is not an argument"),
}


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_before_it_queues(served: Served, attack: str) -> None:
    """INVALID_ARG in words that say what is allowed, counted as rejected; the model draws on."""
    sent, words = ATTACKS[attack]
    before = served.metrics()
    with pytest.raises(InferenceServerException) as caught:
        served.infer(**SMALL, extra_args=sent)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT", caught.value
    message = caught.value.message()
    assert re.search(words, message), message
    assert message.startswith("extra_args: ")
    assert "Traceback" not in message
    assert "\n" not in message
    delta = served.metrics() - before
    assert delta.get("diffusion_requests_total", outcome="rejected") == 1
    assert delta.get("diffusion_steps_total") == 0


@pytest.mark.usefixtures("settled")
def test_plain_values_still_work(served: Served) -> None:
    sent = {"eta": 0.5, "guidance_rescale": 0.1, "clip_skip": None, "cross_attention_kwargs": {}}
    assert served.infer(**SMALL, extra_args=sent).images.shape == (1, 16, 16, 3)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("name", ["output_format", "lora"])
def test_a_text_of_megabytes_is_refused_in_a_short_answer(served: Served, name: str) -> None:
    """An answer that repeats it would be larger than gRPC carries, and be lost with its stream."""
    began = time.monotonic()
    with pytest.raises(InferenceServerException) as caught:
        served.infer(**SMALL, **{name: np.array([[b"x" * 5_000_000]], dtype=np.object_)})
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert caught.value.message() == f"{name}: 5000000 bytes are too many; at most 4096 are allowed"
    assert time.monotonic() - began < 60


@pytest.mark.usefixtures("settled")
def test_an_error_that_repeats_what_was_sent_is_cut(served: Served) -> None:
    """The longest name that is read, of letters that take three bytes in a gRPC status."""
    name = "ä" * 900
    with pytest.raises(InferenceServerException) as caught:
        served.infer(**SMALL, extra_args=json.dumps({name: 1}, ensure_ascii=False))
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert len(caught.value.message().encode()) <= 4100


# -- any pipeline --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("prompt_template", {"template": "{:>999999999}"}, "cannot be set here"),
        ("prior_callback_on_step_end", "x", "cannot be set here"),
        ("fonts", ["/etc/passwd"], "cannot be set here"),
        ("messages", [{"type": "image", "url": "http://127.0.0.1/"}], "cannot be set here"),
        ("prompt_embeds_2", [[0.0]], "can only be a number"),
        ("prior_latents", [[0.0]], "can only be a number"),
        ("reference_audio", "/etc/passwd", "can only be a number"),
        ("pose_video", ["http://127.0.0.1/"], "can only be a number"),
        ("depth_map", "x", "can only be a number"),
        ("conditions", [{"image": "x"}], "can only be a number"),
        ("style", "/etc/passwd", "without slashes"),
        ("style", "http://127.0.0.1", "must be a word"),
        ("style", "x" * 201, "200 characters at most"),
        ("prompt_2", "x" * 51, "51 bytes are too many; at most 50"),
        ("prompt_2", ["x", "x" * 51], "51 bytes are too many; at most 50"),
        ("video_length", 65, "must be from -64 to 64"),
        ("base_num_frames", 10**6, "must be from -64 to 64"),
        ("ensemble_size", 9, "must be from -8 to 8"),
        ("decode_chunk_size", 10**6, "must be from -8 to 8"),
        ("processing_resolution", 10**6, "must be from -1024 to 1024"),
        ("original_size", [10**6, 4], "must be from -1024 to 1024"),
        ("max_area", 1024**2 + 1, "must be from -1048576 to 1048576"),
        ("max_sequence_length", 10**9, "must be from -4096 to 4096"),
        ("max_new_tokens", 10**9, "must be from -4096 to 4096"),
        ("prompt_enhancement_kwargs", {"max_new_tokens": 10**9}, "'max_new_tokens': 1000000000 is not allowed"),
        ("max_iter_to_alter", 101, "must be from -100 to 100"),
        ("prior_num_inference_steps", 101, "must be from 1 to 100"),
        ("prior_num_inference_steps", 0, "must be from 1 to 100"),
        ("prior_num_inference_steps", 2.5, "must be a whole number from 1 to 100"),
        ("source_seconds", 31.0, "must be from -30.0 to 30.0"),
        ("eta", float("inf"), "inf is not allowed"),
        ("eta", float("nan"), "nan is not allowed"),
        ("sigmas", [0.5] * 101, "has 101 entries; at most 100 are allowed"),
        ("guidance_rescale", object(), "must be a plain JSON value"),
        ("guidance_rescale", {1: 2}, "the key 1 cannot be set in it"),
    ],
)
def test_what_other_pipelines_have_is_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(words)):
        check(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_2", "a dog, https://example.com/{x}"),
        ("complex_human_instruction", ["Given a user prompt", "generate an enhanced one"]),
        ("timesteps", [999, 500, 1]),
        ("sigmas", [0.9, 0.5]),
        ("original_size", [1024, 1024]),
        ("crops_coords_top_left", [0, 0]),
        ("max_sequence_length", 512),
        ("motion_bucket_id", 127),
        ("video_length", 16),
        ("image_guidance_scale", 1.5),
        ("skip_guidance_layers", [7, 8]),
        ("keyscale", "C# minor"),
        ("task_type", "text2music"),
        ("cross_attention_kwargs", {"scale": 0.5}),
        ("prompt_enhancement_seed", 10**12),
        ("use_resolution_binning", False),
        ("clip_skip", None),
    ],
)
def test_what_pipelines_are_for_is_allowed(name: str, value: Any) -> None:
    check(name, value)


def call_arguments_of_diffusers() -> list[str]:
    """Return the names of all arguments of all pipelines that are installed."""
    names = set()
    for name in dir(diffusers):
        found = getattr(diffusers, name, None) if name.endswith("Pipeline") else None
        if isinstance(found, type) and "__call__" in vars(found):
            names |= {p.name for p in inspect.signature(found.__call__).parameters.values()}
    return sorted(names)


@pytest.mark.filterwarnings("ignore")  # of modules that are looked at, not used
def test_no_argument_of_any_pipeline_takes_a_path_an_address_or_a_function() -> None:
    """Of every pipeline of diffusers: but for texts that are prompts, no name opens the way to a file or a host."""
    names = call_arguments_of_diffusers()
    assert len(names) > 300
    texts = set()
    for name in names:
        for value in ("/etc/passwd", "http://169.254.169.254/", ["../../etc/passwd"], {"url": "http://127.0.0.1/x"}):
            try:
                check(name, value)
            except InvalidArgumentError:
                continue
            texts.add(name)
        if re.search("callback|generator|output_type|return_dict|embeds|latents", name):
            for value in ("x", [1.0], {"a": 1}):
                with pytest.raises(InvalidArgumentError):
                    check(name, value)
    assert "prompt_2" in texts
    for name in texts:
        assert re.search("prompt|phrases|lyrics|instruction|transcription|category", name), name


leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
nested = st.lists(leaf, max_size=4) | st.dictionaries(st.text(max_size=10), leaf, max_size=4)
plain = leaf | nested | st.lists(nested, max_size=4) | st.dictionaries(st.text(max_size=10), nested, max_size=4)


@settings(max_examples=500, deadline=None)
@given(name=st.sampled_from([*sorted(RESERVED)[:5], "eta", "image_embeds", "prompt_2", "num_x", "a"]), value=plain)
def test_any_json_is_taken_or_refused_in_words(name: str, value: Any) -> None:
    """Nothing else is ever raised."""
    try:
        check(name, value)
    except InvalidArgumentError as error:
        refused = error.field
    else:
        refused = "extra_args"
    assert refused == "extra_args"
