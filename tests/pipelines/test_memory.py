"""Each setting for memory and speed reaches diffusers, and what the installed version does not know is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusion_backend.config import ModelConfig
from diffusion_backend.errors import ConfigurationError, ModelLoadError
from diffusion_backend.pipelines import loader, memory
from diffusion_backend.pipelines.probe import prepare
from diffusion_backend.pipelines.reference import own_copy
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


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "it is not JSON"),
        ("[]", "it must be a JSON object, not list"),
        ('{"quant_backend": "no_such"}', "refuses it"),
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
