"""Embeddings from the cache are, bit for bit, those that the pipeline makes; what cannot be cached goes past it."""

from __future__ import annotations

import contextlib
import gc
import math
import pickle
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from diffusion_backend.config import ModelConfig
from diffusion_backend.engine import DiffusionEngine, EngineConfig
from diffusion_backend.engine.executor import PromptCacheUse
from diffusion_backend.pipelines import loader
from diffusion_backend.pipelines.adapters import Adapters
from diffusion_backend.pipelines.arguments import call_arguments, signature_of
from diffusion_backend.pipelines.executor import PipelineExecutor
from diffusion_backend.pipelines.probe import prepare
from diffusion_backend.pipelines.prompt_cache import PromptCache
from diffusion_backend.pipelines.reference import own_copy, run_alone
from diffusion_backend.request import DiffusionRequest
from diffusion_backend.telemetry import MemorySink, Telemetry
from tests.pipelines.conftest import DEADLINE_S, Running, Served, assert_unlike
from tests.pipelines.test_adapters import make_lora
from tests.support import tiny
from tests.support.families import Case, all_cases
from tools.coverage.measure import request_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what diffusers' old pipelines say of themselves when they are imported
    CASES = {case.pipeline: case for case in all_cases()}

TENSOR = torch.arange(6.0).reshape(2, 3)


class Encoder:
    """The part of a pipeline that the cache sees: `encode` stands for whatever a class does in `encode_prompt`."""

    def __init__(self, encode: Callable[..., Any] = lambda own, *args, **kwargs: TENSOR.clone()) -> None:
        self.encode = encode
        self.calls: list[Any] = []  # the same list ever: a number would be taken for something noted on the copy

    @property
    def num_calls(self) -> int:
        return len(self.calls)

    def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(args)
        return self.encode(self, *args, **kwargs)


class Rig:
    """A cache, and requests that encode through it."""

    def __init__(self, encode: Any = None, max_bytes: int = 10_000) -> None:
        self.cache = PromptCache(max_bytes)
        self.encode = encode
        self.adapters: Any = ()

    def request(self, **state: Any) -> Encoder:
        own = Encoder() if self.encode is None else Encoder(self.encode)
        self.cache.attach(own, lambda: self.adapters)
        vars(own).update(state)  # what a pipeline's call notes on its copy
        return own

    def encoded(self, *args: Any) -> Any:
        """What a new request gets."""
        own = self.request()
        return own.encode_prompt(*args)

    def is_hit(self, *args: Any, **kwargs: Any) -> bool:
        own = self.request()
        own.encode_prompt(*args, **kwargs)
        return own.num_calls == 0


def test_the_second_call_with_the_same_arguments_is_a_hit() -> None:
    rig = Rig()
    assert not rig.is_hit("a dog", num=1)
    assert rig.is_hit("a dog", num=1)
    assert rig.cache.take_use() == PromptCacheUse(hits=1, misses=1, bytes_added=24)
    assert rig.cache.take_use() is None


PLAIN = [None, True, 1, 1.0, 0.0, -0.0, 2, "1", b"1", ["1"], ("1",), {"1": 1}, {"1": 1.0}, torch.device("cpu"), [["1"]]]


def test_arguments_that_differ_in_value_or_type_are_different_calls() -> None:
    rig = Rig()
    assert [rig.is_hit("a dog", value) for value in PLAIN] == [False] * len(PLAIN)
    assert [rig.is_hit("a dog", value) for value in PLAIN] == [True] * len(PLAIN)
    assert not rig.is_hit("a dog", name=1)
    assert not rig.is_hit(value := "a dog", other=value)


@pytest.mark.parametrize("value", [TENSOR, torch.Generator(), object(), np.float32(1), [TENSOR], {"image": object()}])
def test_arguments_that_are_not_plain_go_past_the_cache(value: Any) -> None:
    rig = Rig()
    assert not rig.is_hit("a dog", value)
    assert not rig.is_hit("a dog", value)
    assert rig.cache.num_bytes == 0
    assert rig.cache.take_use() == PromptCacheUse(hits=0, misses=2, bytes_added=0)


def test_adapters_and_what_the_call_noted_on_its_copy_are_part_of_the_key() -> None:
    rig = Rig()
    assert not rig.is_hit("a dog")
    rig.adapters = (("ink", 0.5),)
    assert not rig.is_hit("a dog")
    assert rig.is_hit("a dog")
    rig.adapters = (("ink", 0.6),)
    assert not rig.is_hit("a dog")
    for scale, calls in ((3.0, 1), (7.5, 1), (3.0, 0)):
        own = rig.request(_guidance_scale=scale)
        own.encode_prompt("a dog")
        assert own.num_calls == calls, scale
    own = rig.request(_image=object())
    own.encode_prompt("a dog")
    own.encode_prompt("a dog")
    assert own.num_calls == 2


@pytest.mark.parametrize(
    "result",
    [
        TENSOR,
        (TENSOR, None, TENSOR[:, 1]),
        [TENSOR.to(torch.bfloat16), (torch.tensor(3), "text")],
        {"embeds": TENSOR.t(), "mask": TENSOR > 2, "lengths": [1, 2]},
        (TENSOR.new_empty(0, 3), TENSOR, math.nan),
    ],
)
def test_a_result_keeps_its_structure_types_strides_and_bits(result: Any) -> None:
    rig = Rig(lambda own, prompt: result)
    rig.encoded("a dog")
    own = rig.request()
    assert_same(own.encode_prompt("a dog"), result)
    assert own.num_calls == 0


def assert_same(one: Any, two: Any) -> None:
    assert type(one) is type(two)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.device, one.shape, one.stride()) == (two.dtype, two.device, two.shape, two.stride())
        assert torch.equal(one, two)
        assert one.numel() == 0 or one.data_ptr() != two.data_ptr()
    elif isinstance(one, dict):
        assert list(one) == list(two)
        for key in one:
            assert_same(one[key], two[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert_same(a, b)
    else:
        assert one == two or (one != one and two != two)


@pytest.mark.parametrize("result", [object(), TENSOR[:1].expand(5, 3), TENSOR.to_sparse(), torch.nn.Parameter(TENSOR)])
def test_a_result_that_cannot_be_copied_as_it_is_is_not_kept(result: Any) -> None:
    rig = Rig(lambda own, prompt: (TENSOR, result))
    for _ in range(2):
        own = rig.request()
        assert own.encode_prompt("a dog")[1] is result
        assert own.num_calls == 1


def test_one_tensor_that_is_there_twice_stays_one() -> None:
    rig = Rig(lambda own, prompt: (tensor := TENSOR.clone(), [tensor]))
    rig.encoded("a dog")
    one, (two,) = rig.encoded("a dog")
    assert one is two
    assert rig.cache.num_bytes == 24


def test_what_a_request_writes_into_its_embeddings_reaches_nobody_else() -> None:
    rig = Rig()
    first = rig.encoded("a dog")
    first.zero_()
    second = rig.encoded("a dog")
    assert torch.equal(second, TENSOR)
    second.zero_()
    assert torch.equal(rig.encoded("a dog"), TENSOR)


def test_what_encoding_notes_on_the_pipeline_is_noted_on_a_hit_too() -> None:
    def encode(own: Any, prompt: str, scale: Any) -> torch.Tensor:
        own._lora_scale = scale
        return TENSOR

    rig = Rig(encode)
    rig.encoded("a dog", 0.5)
    own = rig.request()
    own.encode_prompt("a dog", 0.5)
    assert (own._lora_scale, own.num_calls) == (0.5, 0)


def test_what_a_request_does_to_what_encoding_noted_reaches_nobody_else() -> None:
    def encode(own: Any, prompt: str) -> torch.Tensor:
        own._offsets = [0, {"scale": [torch.float32]}]
        return TENSOR

    rig = Rig(encode)
    for _ in range(3):
        own = rig.request()
        own.encode_prompt("a dog")
        assert own._offsets == [0, {"scale": [torch.float32]}]
        own._offsets[1]["scale"].append("mine")
    assert own.num_calls == 0


def test_an_encoding_that_notes_something_that_cannot_be_noted_again_is_not_kept() -> None:
    def encode(own: Any, prompt: str) -> torch.Tensor:
        own.cache = object()
        return TENSOR

    rig = Rig(encode)
    assert not rig.is_hit("a dog")
    assert not rig.is_hit("a dog")


def test_an_encoding_that_draws_random_numbers_is_not_kept() -> None:
    rig = Rig(lambda own, prompt: TENSOR + torch.rand(()))
    assert not rig.is_hit("a dog")
    assert not rig.is_hit("a dog")
    assert rig.cache.num_bytes == 0


def test_an_encoding_that_fails_fails_again_and_leaves_nothing() -> None:
    def encode(own: Any, prompt: str) -> torch.Tensor:
        raise ValueError("no such words")

    rig = Rig(encode)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such words"):
            rig.encoded("a dog")
    assert rig.cache.take_use() == PromptCacheUse(hits=0, misses=2, bytes_added=0)


def test_the_bound_holds_and_the_entry_not_used_for_longest_goes() -> None:
    rig = Rig(max_bytes=3 * 24)
    for prompt in "abc":
        assert not rig.is_hit(prompt)
    assert rig.is_hit("a")
    assert rig.cache.num_bytes == 72
    assert not rig.is_hit("d")
    assert rig.cache.num_bytes == 72
    assert rig.is_hit("a")
    assert not rig.is_hit("b")


def test_a_result_larger_than_the_bound_does_not_empty_the_cache() -> None:
    rig = Rig(lambda own, prompt: torch.zeros(len(prompt)), max_bytes=40)
    rig.is_hit("four")
    assert not rig.is_hit("eleven, or more")
    assert not rig.is_hit("eleven, or more")
    assert rig.is_hit("four")


def test_prompts_longer_than_their_embeddings_do_not_stay_in_memory() -> None:
    rig = Rig()
    prompt = "a dog" * 1000
    assert not rig.is_hit(prompt, options={"a": 1, "b": prompt})
    assert rig.is_hit(prompt, options={"b": prompt, "a": 1})
    assert not rig.is_hit(prompt, options={"a": 1, "b": f"{prompt}!"})
    assert not rig.is_hit("\ud800"), "half a character, which only JSON can spell"
    assert all(len(pickle.dumps(key)) < 100 for key in rig.cache._entries)


def test_a_result_without_tensors_is_not_kept_as_no_bound_would_hold_it() -> None:
    rig = Rig(lambda own, prompt: (None, prompt))
    assert not rig.is_hit("a dog")
    assert not rig.is_hit("a dog")


def test_a_view_counts_with_all_that_it_keeps_in_memory() -> None:
    rig = Rig(lambda own, prompt: torch.zeros(4, 8)[:, :1])
    rig.is_hit("a dog")
    assert rig.cache.num_bytes == (3 * 8 + 1) * 4


def test_two_requests_that_encode_one_prompt_in_turns_are_counted_once() -> None:
    """As with an encoder that is a meeting point: the second asks before the first has its embeddings."""

    def encode(own: Any, prompt: str) -> torch.Tensor:
        if len(order) < 2:
            order.append(own)
            rig.encoded(prompt)
        return TENSOR

    order: list[Any] = []
    rig = Rig(encode)
    rig.encoded("a dog")
    assert rig.cache.num_bytes == 24
    assert rig.is_hit("a dog")


def test_clear_drops_all() -> None:
    rig = Rig()
    rig.is_hit("a dog")
    rig.cache.take_use()
    rig.cache.clear()
    assert rig.cache.take_use() == PromptCacheUse(hits=0, misses=0, bytes_added=-24)
    assert not rig.is_hit("a dog")


def test_a_requests_copy_does_not_wait_for_the_garbage_collector() -> None:
    rig = Rig()
    own = rig.request()
    own.encode_prompt("a dog")
    gone = weakref.ref(own)
    gc.disable()
    try:
        del own
        assert gone() is None
    finally:
        gc.enable()


# -- with real pipelines ----------------------------------------------------------------------------------------


class _EncodedError(Exception):
    """Ends a pipeline's call once its first prompt is encoded."""


ENCODING = [name for name, case in CASES.items() if case.has_prompt]

READ_PICTURES = {
    "HunyuanVideoImageToVideoPipeline",
    "Kandinsky5I2IPipeline",
    "LongCatImageEditPipeline",
    "QwenImageEditInpaintPipeline",
    "QwenImageEditPipeline",
    "QwenImageEditPlusPipeline",
}
"""Pipelines whose text encoder is shown the request's picture."""

OTHER_METHODS = {
    "AmusedImg2ImgPipeline",
    "AmusedInpaintPipeline",
    "AmusedPipeline",
    "AudioLDMPipeline",
    "Cosmos3OmniPipeline",
    "JoyImageEditPipeline",
    "JoyImageEditPlusPipeline",
    "KandinskyCombinedPipeline",
    "KandinskyImg2ImgCombinedPipeline",
    "KandinskyImg2ImgPipeline",
    "KandinskyInpaintCombinedPipeline",
    "KandinskyInpaintPipeline",
    "KandinskyPipeline",
    "KandinskyV22CombinedPipeline",
    "KandinskyV22Img2ImgCombinedPipeline",
    "KandinskyV22InpaintCombinedPipeline",
    "LDMTextToImagePipeline",
    "MusicLDMPipeline",
    "OmniGenPipeline",
    "SemanticStableDiffusionPipeline",
    "ShapEPipeline",
    "StableDiffusionInstructPix2PixPipeline",
    "StableDiffusionPipelineSafe",
    "UnCLIPPipeline",
    "VQDiffusionPipeline",
}
"""Pipelines that take a prompt, and encode it in a method of another name."""


def encoded(pipeline: Any, case: Case, cache: PromptCache | None) -> list[Any]:
    """Run a request until its first prompt is encoded; return the embeddings, or nothing if it has no such method."""
    own = own_copy(pipeline, None)
    if cache is not None:
        cache.attach(own, lambda: ())
    results: list[Any] = []

    def stop(encode_prompt: Any, *args: Any, **kwargs: Any) -> None:
        results.append(encode_prompt(*args, **kwargs))
        raise _EncodedError

    for part in [own, *(value for value in vars(own).values() if isinstance(value, diffusers.DiffusionPipeline))]:
        if hasattr(part, "encode_prompt"):
            vars(part)["encode_prompt"] = partial(stop, part.encode_prompt)
    names = frozenset(signature_of(pipeline))
    with torch.no_grad(), contextlib.suppress(_EncodedError):
        own(**call_arguments(request_of(case, 0), names, "np"))
    return results


@pytest.mark.filterwarnings("ignore")  # what diffusers' old pipelines say of themselves when they run
@pytest.mark.parametrize("name", ENCODING)
def test_every_family_gets_the_embeddings_that_it_makes_itself(name: str) -> None:
    torch.manual_seed(0)
    pipeline = tiny.quiet(CASES[name].build())
    cache = PromptCache(2**30)
    alone = encoded(pipeline, CASES[name], None)
    missed = encoded(pipeline, CASES[name], cache)
    hit = encoded(pipeline, CASES[name], cache)
    assert_same(missed, alone)
    assert_same(hit, alone)
    use = cache.take_use()
    if name in READ_PICTURES:
        assert use == PromptCacheUse(hits=0, misses=2, bytes_added=0)
    elif name in OTHER_METHODS:
        assert alone == []
        assert use is None
    else:
        assert use is not None
        assert (use.hits, use.misses) == (1, 1)
        assert use.bytes_added > 0


def cached_engine(served: Served, max_bytes: int | None) -> tuple[DiffusionEngine, PipelineExecutor, MemorySink]:
    executor = PipelineExecutor(
        served.pipeline,
        served.capabilities,
        output_type=served.output_type,
        prompt_cache=None if max_bytes is None else PromptCache(max_bytes),
    )
    sink = MemorySink()
    engine = DiffusionEngine(executor, EngineConfig(max_batch_rows=64), Telemetry(sink))
    engine.start()
    return engine, executor, sink


def run(served: Served, requests: Sequence[DiffusionRequest], max_bytes: int | None) -> tuple[list[Any], MemorySink]:
    """Run requests together; return their pictures, and the metrics."""
    engine, executor, sink = cached_engine(served, max_bytes)
    try:
        results = Running(engine, executor, sink).results(requests)
    finally:
        engine.shutdown()
    return [result.output.images for result in results], sink


def fresh(*requests: DiffusionRequest) -> list[DiffusionRequest]:
    return [replace(request, request_id=f"{request.request_id}'") for request in requests]


def cache_values(sink: MemorySink) -> tuple[float, float, float]:
    names = ("hits_total", "misses_total", "bytes")
    hits, misses, num_bytes = (sink.values[f"diffusion_prompt_cache_{name}", ()] for name in names)
    return hits, misses, num_bytes


@pytest.mark.parametrize("family", ["sd", "sd3", "flux"])
def test_joint_forwards_give_the_same_bits_with_and_without(request: pytest.FixtureRequest, family: str) -> None:
    served: Served = request.getfixturevalue(family)
    extra = {"extra_args": {"max_sequence_length": 32}, "height": 16, "width": 16} if family == "flux" else {}
    negative = {} if family == "flux" else {"negative_prompt": ("a table",)}
    requests = [
        DiffusionRequest.make("a red apple", seed=1, num_inference_steps=4, **extra),
        DiffusionRequest.make("a red apple", seed=2, num_inference_steps=3, **extra),
        DiffusionRequest.make("a blue whale", seed=3, num_inference_steps=5, **negative, **extra),
        DiffusionRequest.make(
            ("a river", "a red apple"), seed=4, num_inference_steps=3, num_outputs_per_prompt=2, **extra
        ),
    ]
    twice = [*requests, *fresh(*requests)]
    without, plain_sink = run(served, twice, None)
    with_cache, sink = run(served, twice, 10_000_000)
    for one, two in zip(with_cache, without, strict=True):
        assert np.array_equal(one, two)
    assert_unlike(without[0], without[2])
    hits, misses, num_bytes = cache_values(sink)
    assert (hits, misses) == (5, 3)
    assert num_bytes > 0
    assert cache_values(plain_sink) == (0, 0, 0)
    assert sink.samples["diffusion_batch_rows", ()] == plain_sink.samples["diffusion_batch_rows", ()]


def test_requests_with_adapters_of_the_text_encoder_get_their_own_embeddings(tmp_path: Path) -> None:
    text = make_lora(tmp_path / "text", 33, text=True, unet=False)
    pipeline, bare = tiny.stable_diffusion(), tiny.stable_diffusion()
    adapters = Adapters(pipeline, {"text": str(text)})
    adapters.load_registered()
    bare_adapters = Adapters(bare, {"text": str(text)})
    bare_adapters.load_registered()
    capabilities, _, output_type = prepare(pipeline)
    executor = PipelineExecutor(
        pipeline, capabilities, output_type=output_type, adapters=adapters, prompt_cache=PromptCache(10_000_000)
    )
    requests = [
        DiffusionRequest.make("a dog", seed=1, num_inference_steps=3, lora=lora)
        for lora in ((), (("text", 1.0),), (("text", 0.5),), (), (("text", 1.0),))
    ]
    sink = MemorySink()
    engine = DiffusionEngine(executor, telemetry=Telemetry(sink))
    engine.start()
    try:
        results = [engine.submit(request).result(DEADLINE_S).output.images for request in requests]
    finally:
        engine.shutdown()
    for request, images in zip(requests, results, strict=True):
        expected = run_alone(bare, request, output_type=output_type, adapters=bare_adapters).images
        assert np.array_equal(images, expected)
    assert_unlike(results[0], results[1])
    assert cache_values(sink)[:2] == (2, 3)


def test_the_parameter_sets_the_bound_and_0_turns_the_cache_off(tmp_path: Path) -> None:
    tiny.stable_diffusion().save_pretrained(tmp_path)

    def load(**parameters: str) -> PipelineExecutor:
        config = ModelConfig.from_parameters({"model": str(tmp_path), **parameters})
        return loader.load(config, device="cpu")

    bounded = load(prompt_cache_bytes="4096").prompt_cache
    assert bounded is not None
    assert bounded.max_bytes == 4096
    assert load(prompt_cache_bytes="0").prompt_cache is None


def test_a_warm_up_leaves_nothing_in_the_cache_and_is_not_counted(sd: Served) -> None:
    engine, executor, sink = cached_engine(sd, 10_000_000)
    assert executor.prompt_cache is not None
    try:
        engine._dummy_run(16, 16)
        assert executor.prompt_cache.num_bytes == 0
        engine.submit(DiffusionRequest.make("", seed=1, num_inference_steps=1)).result(DEADLINE_S)
    finally:
        engine.shutdown()
    hits, misses, num_bytes = cache_values(sink)
    assert (hits, misses) == (0, 1)
    assert num_bytes == executor.prompt_cache.num_bytes > 0


def test_a_control_call_can_empty_the_cache(sd: Served) -> None:
    engine, executor, sink = cached_engine(sd, 10_000_000)
    request = DiffusionRequest.make("a dog", seed=1, num_inference_steps=2)
    try:
        engine.submit(request).result(DEADLINE_S)
        engine.collective_rpc("clear_prompt_cache")
        engine.submit(*fresh(request)).result(DEADLINE_S)
    finally:
        engine.shutdown()
    assert cache_values(sink)[:2] == (0, 2)
    assert executor.prompt_cache is not None
    assert cache_values(sink)[2] == executor.prompt_cache.num_bytes
