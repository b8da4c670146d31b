"""Each setting for memory and speed reaches diffusers, and what the installed version does not know is refused."""

from __future__ import annotations

import json
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffusion_backend.config import ModelConfig
from diffusion_backend.engine import DiffusionEngine
from diffusion_backend.errors import ConfigurationError, ModelLoadError
from diffusion_backend.pipelines import loader, memory
from diffusion_backend.pipelines.executor import PipelineExecutor
from diffusion_backend.pipelines.probe import prepare
from diffusion_backend.pipelines.prompt_cache import PromptCache
from diffusion_backend.pipelines.reference import own_copy, run_alone
from diffusion_backend.request import DiffusionRequest
from tests.pipelines.conftest import assert_alike
from tests.support import tiny


def config(**parameters: str) -> ModelConfig:
    return ModelConfig.from_parameters({"model": "m", **parameters})


@pytest.mark.parametrize(("name", "flag"), [("vae_tiling", "use_tiling"), ("vae_slicing", "use_slicing")])
def test_the_decoder_is_told(name: str, flag: str) -> None:
    pipeline = tiny.stable_diffusion()
    memory.place(pipeline, config(), "cpu")
    assert not getattr(pipeline.vae, flag)
    memory.place(pipeline, config(**{name: "true"}), "cpu")
    assert getattr(pipeline.vae, flag)


def test_a_decoder_that_has_no_tiles_is_an_error() -> None:
    pipeline = tiny.stable_diffusion()
    pipeline.vae = None
    with pytest.raises(
        ConfigurationError, match="parameter 'vae_tiling': the decoder of StableDiffusionPipeline has no"
    ):
        memory.place(pipeline, config(vae_tiling="true"), "cpu")


def test_offloading_needs_a_gpu_and_is_handed_on_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = tiny.stable_diffusion()
    with pytest.raises(ConfigurationError, match="it needs a GPU; this instance is on the CPU"):
        memory.place(pipeline, config(enable_model_cpu_offload="true"), "cpu")
    told: list[Any] = []
    # A stand-in, as there may be no GPU here: it proves the call, not what accelerate makes of it.
    monkeypatch.setattr(type(pipeline), "enable_model_cpu_offload", lambda self, device: told.append(device))
    memory.place(pipeline, config(enable_model_cpu_offload="true"), "cuda:1")
    assert told == ["cuda:1"]


def test_offloaded_modules_serve_joint_forwards() -> None:
    """accelerate's real hooks, with the CPU as the device to work on: they move nothing, but run when they would."""
    pipeline = tiny.stable_diffusion()
    memory.place(pipeline, config(enable_model_cpu_offload="true"), "cpu:0")
    used: list[str] = []

    def noted(name: str, pre_forward: Any, *args: Any, **kwargs: Any) -> Any:
        used.append(name)
        return pre_forward(*args, **kwargs)

    for name in ("text_encoder", "unet", "vae"):
        hook = getattr(pipeline, name)._hf_hook
        hook.pre_forward = partial(noted, name, hook.pre_forward)
    capabilities, _, output_type = prepare(pipeline)
    assert capabilities.joint == {"unet": None}
    cache = PromptCache(1_000_000)
    engine = DiffusionEngine(PipelineExecutor(pipeline, capabilities, output_type=output_type, prompt_cache=cache))
    requests = [DiffusionRequest.make("a dog", seed=seed, num_inference_steps=3) for seed in range(3)]
    used.clear()
    engine.start()
    try:
        results = [handle.result(120) for handle in [engine.submit(request) for request in requests]]
    finally:
        engine.shutdown()
    assert used.count("text_encoder") == 2  # the prompt and the negative one, for the first request only
    assert 3 <= used.count("unet") < 9, "no forward was shared"
    assert used.count("vae") == 3
    for request, result in zip(requests, results, strict=True):
        expected = run_alone(tiny.stable_diffusion(), request, output_type=output_type).images
        assert expected is not None
        assert_alike(result.output.images, expected)


def test_the_end_of_one_request_does_not_take_the_offloading_hooks_from_the_others() -> None:
    pipeline = tiny.stable_diffusion()
    freed: list[str] = []
    pipeline.maybe_free_model_hooks = lambda: freed.append("shared")
    own_copy(pipeline, None).maybe_free_model_hooks()
    assert freed == []


def test_the_attention_backend_reaches_the_transformer() -> None:
    pipeline = tiny.flux()
    memory.place(pipeline, config(attention_backend="_native_math"), "cpu")
    backends = {
        str(part.processor._attention_backend.value)
        for part in pipeline.transformer.modules()
        if hasattr(getattr(part, "processor", None), "_attention_backend")
    }
    assert backends == {"_native_math"}


def test_an_unknown_attention_backend_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'nativ' is not one of .*; did you mean 'native'\?"):
        memory.place(tiny.flux(), config(attention_backend="nativ"), "cpu")


def test_quantization_becomes_the_configuration_of_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    import diffusers

    given: list[dict[str, Any]] = []
    # A stand-in: no quantizer is installed here, so this proves what is handed on, not its effect on weights.
    monkeypatch.setattr(diffusers, "PipelineQuantizationConfig", lambda **kwargs: given.append(kwargs) or "made")
    assert memory.quantization_config('{"quant_backend": "x", "components_to_quantize": ["unet"]}') == "made"
    assert given == [{"quant_backend": "x", "components_to_quantize": ["unet"]}]
    assert memory.quantization_config(None) is None


INT8 = {
    "quant_backend": "torchao",
    "quant_kwargs": {"quant_type": "Int8WeightOnlyConfig"},
    "components_to_quantize": ["unet"],
}


def test_weights_are_quantized_and_pictures_are_nearly_the_same(tmp_path: Path) -> None:
    """With a real quantizer, in joint forwards. (Not a dependency: importing it writes into everybody's log.)"""
    pytest.importorskip("torchao")
    tiny.stable_diffusion().save_pretrained(tmp_path)
    executor = loader.load(
        ModelConfig(model=str(tmp_path), quantization=json.dumps(INT8), step_batching="require"), device="cpu"
    )
    weights = {type(weight).__name__ for weight in executor.pipeline.unet.parameters()}
    assert "Int8Tensor" in weights
    assert {type(weight).__name__ for weight in executor.pipeline.vae.parameters()} == {"Parameter"}
    requests = [DiffusionRequest.make("a dog", seed=seed, num_inference_steps=3) for seed in range(3)]
    engine = DiffusionEngine(executor)
    engine.start()
    try:
        results = [handle.result(120) for handle in [engine.submit(request) for request in requests]]
    finally:
        engine.shutdown()
    for request, result in zip(requests, results, strict=True):
        exact = run_alone(tiny.stable_diffusion(), request).images
        assert exact is not None
        assert result.output.images is not None
        difference = np.abs(result.output.images.astype(int) - exact.astype(int)).max()
        assert 0 < difference <= 8


def test_a_type_that_torchao_does_not_have_is_refused() -> None:
    pytest.importorskip("torchao")
    text = json.dumps({**INT8, "quant_kwargs": {"quant_type": "Int8WeightOnly"}})
    with pytest.raises(ConfigurationError, match=r"'Int8WeightOnly' is not one of .*; did you mean 'Int8WeightOnlyCo"):
        memory.quantization_config(text)


def test_a_quantizer_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigurationError, match="parameter 'quantization': torchao is not installed"):
        memory.quantization_config(json.dumps(INT8))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "it is not JSON"),
        ("[]", "it must be a JSON object, not list"),
        ('{"quant_backend": "no_such"}', "refuses it"),
        ('{"quant_backend": "torchao"}', "torchao needs components_to_quantize, a list of names, and quant_kwargs"),
        ('{"backend": "x"}', "refuses it: .*unexpected keyword"),
    ],
)
def test_a_quantization_that_the_installed_version_does_not_know_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"parameter 'quantization': .*{problem}"):
        memory.quantization_config(text)


def test_what_is_compiled_is_the_denoisers_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = tiny.stable_diffusion()
    forward = pipeline.unet.forward
    compiled: list[Any] = []

    def compile_(function: Any, **options: Any) -> Any:
        # A stand-in for the compiler, which takes minutes: it notes each call.
        def run(*args: Any, **kwargs: Any) -> Any:
            compiled.append(options)
            return function(*args, **kwargs)

        assert function == forward
        return run

    monkeypatch.setattr(torch, "compile", compile_)
    capabilities, points, _ = prepare(pipeline, compile_mode="max-autotune")
    assert compiled[0] == {"mode": "max-autotune", "dynamic": True}
    assert capabilities.joint == {"unet": None}
    assert pipeline.unet.forward != points[0].original


def test_a_warm_up_that_hangs_fails_the_load_after_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny.stable_diffusion().save_pretrained(tmp_path)
    go_on = threading.Event()
    monkeypatch.setattr(loader, "prepare", lambda *args, **kwargs: go_on.wait())
    try:
        with pytest.raises(ModelLoadError, match=r"the first runs have not ended within 0\.2 s; set warmup_timeout_s"):
            loader.load(ModelConfig(model=str(tmp_path), warmup_timeout_s=0.2), device="cpu")
    finally:
        go_on.set()
