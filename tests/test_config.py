"""Every parameter of config.pbtxt is read, and a wrong one fails the load readably."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from diffusion_backend.config import ModelConfig, UnaryConfig
from diffusion_backend.engine import EngineConfig
from diffusion_backend.errors import ConfigurationError
from diffusion_backend.faults import Fault
from diffusion_backend.pipelines.arguments import Limits

# name: (text that is not the default, what it becomes, default)
PARAMETERS: dict[str, tuple[str, Any, Any]] = {
    "pipeline_class": ("FluxPipeline", "FluxPipeline", None),
    "loras": ("ink = a/b.safetensors,wash-2=owner/name", (("ink", "a/b.safetensors"), ("wash-2", "owner/name")), ()),
    "lora_root": ("loras", "loras", None),
    "dtype": ("bfloat16", "bfloat16", "float32"),
    "step_batching": ("require", "require", "auto"),
    "deterministic": ("True", True, False),
    "self_check_tolerance": ("1e-3", 1e-3, None),
    "enable_model_cpu_offload": ("true", True, False),
    "vae_tiling": ("true", True, False),
    "vae_slicing": ("true", True, False),
    "attention_backend": ("native", "native", None),
    "quantization": ('{"quant_backend": "x"}', '{"quant_backend": "x"}', None),
    "compile": ("max-autotune", "max-autotune", None),
    "prompt_cache_bytes": ("0", 0, 2**28),
    "warmup_timeout_s": ("60", 60.0, 600.0),
    "watchdog_timeout_s": ("2.5", 2.5, None),
    "faults": ('[{"fault": "raise", "seed": 7}]', (Fault(fault="raise", seed=7),), ()),
    "log_requests": ("false", False, True),
    "log_prompts": ("true", True, False),
    "max_num_seqs": ("3", 3, 16),
    "max_batch_rows": ("8", 8, 32),
    "max_waiting": ("7", 7, 4096),
    "max_steps": ("50", 50, 1000),
    "max_side": ("2048", 2048, 4096),
    "max_outputs": ("4", 4, 64),
    "max_frames": ("81", 81, 1024),
    "max_duration_s": ("12.5", 12.5, 600.0),
    "default_num_inference_steps": ("20", 20, None),
    "default_guidance_scale": ("3.5", 3.5, None),
    "default_num_frames": ("17", 17, None),
    "default_height": ("64", 64, None),
    "default_width": ("96", 96, None),
    "max_prompt_bytes": ("100", 100, 16384),
    "max_extra_args_bytes": ("200", 200, 65536),
    "max_picture_bytes": ("1000", 1000, 2**25),
    "allow_pickle": ("true", True, False),
    "trust_remote_code": ("true", True, False),
    "warmup_sizes": ("512x512, 768x512 64x32", ((512, 512), (768, 512), (64, 32)), ()),
}

WHOLE = [name for name, (_, value, _) in PARAMETERS.items() if name.startswith("max_") and isinstance(value, int)]


def test_every_parameter_is_in_the_table_above() -> None:
    assert set(PARAMETERS) | {"model"} == {field.name for field in dataclasses.fields(ModelConfig)}
    for field in dataclasses.fields(ModelConfig):
        assert field.metadata["help"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_is_read_and_has_its_default(name: str) -> None:
    text, value, default = PARAMETERS[name]
    assert getattr(ModelConfig.from_parameters({"model": "m", name: f" {text} "}), name) == value
    assert getattr(ModelConfig.from_parameters({"model": "m"}), name) == default


def test_the_model_is_required() -> None:
    assert ModelConfig.from_parameters({"model": " owner/name "}).model == "owner/name"
    with pytest.raises(ConfigurationError, match="parameter 'model': it is missing; give a hub id or the path"):
        ModelConfig.from_parameters({})
    with pytest.raises(ConfigurationError, match="parameter 'model': it is empty"):
        ModelConfig.from_parameters({"model": "  "})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("max_num_seq", "max_num_seqs"), ("Dtype", "dtype"), ("default_heigth", "default_height"), ("models", "model")],
)
def test_an_unknown_parameter_names_the_nearest_known_one(name: str, nearest: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ModelConfig.from_parameters({"model": "m", name: "1"})
    assert caught.value.parameter == name
    assert str(caught.value).startswith(
        f"parameter {name!r}: there is no such parameter; did you mean {nearest!r}? (known are model, pipeline_class, "
    )


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("dtype", "float8", "'float8' is not one of float32, float16, bfloat16; did you mean"),
        ("step_batching", "on", "'on' is not one of auto, off, require"),
        ("deterministic", "yes", "'yes' is not true or false"),
        ("self_check_tolerance", "tight", "'tight' is not a number"),
        ("self_check_tolerance", "nan", "nan is not allowed; it must be finite"),
        ("self_check_tolerance", "-0.1", "-0.1 is not allowed; it must be at least 0 and less than 1"),
        ("self_check_tolerance", "1", "1.0 is not allowed; it must be at least 0 and less than 1"),
        *((name, "0", "0 is not allowed; it must be at least 1") for name in WHOLE),
        *((name, "many", "'many' is not an integer") for name in WHOLE),
        ("prompt_cache_bytes", "-1", "-1 is not allowed; it must be at least 0"),
        ("max_steps", "1_000", "'1_000' is not an integer"),
        ("max_duration_s", "0", "0.0 is not allowed; it must be more than 0"),
        ("max_duration_s", "long", "'long' is not a number"),
        ("default_guidance_scale", "-1", "-1.0 is not allowed; it must be at least 0"),
        ("warmup_sizes", "0x64", "'0x64' is not allowed; sizes are at least 1"),
        ("watchdog_timeout_s", "0", "0.0 is not allowed; it must be more than 0"),
        ("faults", "raise", "it is not JSON: "),
        ("max_num_seqs", "2.5", "'2.5' is not an integer"),
        ("max_num_seqs", "", "'' is not an integer"),
        ("default_num_inference_steps", "-1", "-1 is not allowed; it must be at least 1"),
        ("default_height", "0", "0 is not allowed; it must be at least 1"),
        ("default_width", "wide", "'wide' is not an integer"),
        ("default_guidance_scale", "inf", "inf is not allowed; it must be finite"),
        ("default_guidance_scale", "high", "'high' is not a number"),
        ("warmup_sizes", "512", "'512' is not a size; write heights and widths as '512x512, 768x512'"),
        ("warmup_sizes", "512x512x3", "'512x512x3' is not a size"),
        ("loras", "ink", "'ink' is not of the form name=path; write 'name=path, name2=path2'"),
        ("loras", "a/b=c", "'a/b=c' is not of the form name=path"),
        ("loras", "ink=", "'ink=' is not of the form name=path"),
        ("loras", "ink=a, ink=b", "the name 'ink' is there twice"),
        ("lora_root", "", "it is empty"),
        ("warmup_sizes", "512x512, big", "'big' is not a size"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(name: str, text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ModelConfig.from_parameters({"model": "m", name: text})
    assert str(caught.value).startswith(f"parameter {name!r}: {problem}")
    assert caught.value.parameter == name


def test_defaults_are_those_that_are_given() -> None:
    assert ModelConfig(model="m").defaults == {}
    config = ModelConfig(model="m", default_num_inference_steps=20, default_guidance_scale=0.0, default_width=64)
    assert config.defaults == {"num_inference_steps": 20, "guidance_scale": 0.0, "width": 64}


@pytest.mark.parametrize("other", [Limits, EngineConfig])
def test_the_same_limit_has_the_same_default_everywhere(other: type) -> None:
    """Two defaults of one name would let the engine and the configuration tell different limits."""
    config = ModelConfig(model="m")
    shared = {f.name for f in dataclasses.fields(other)} & {f.name for f in dataclasses.fields(ModelConfig)}
    assert shared
    for name in shared:
        assert getattr(config, name) == getattr(other(), name), name


def test_the_docs_table_has_every_parameter() -> None:
    table = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert {field.name for field in dataclasses.fields(ModelConfig)} <= set(documented)


def test_the_twins_parameters_are_read_too() -> None:
    assert UnaryConfig.from_parameters({}) == UnaryConfig(stream_model=None, grpc_endpoint=None)
    assert UnaryConfig.from_parameters({"stream_model": "emoji", "grpc_endpoint": "127.0.0.1:9001"}) == UnaryConfig(
        stream_model="emoji", grpc_endpoint="127.0.0.1:9001"
    )
    with pytest.raises(ConfigurationError, match="'stream_mode': there is no such parameter; did you mean 'stream_mod"):
        UnaryConfig.from_parameters({"stream_mode": "emoji"})
    with pytest.raises(ConfigurationError, match="'grpc_endpoint': it is empty"):
        UnaryConfig.from_parameters({"grpc_endpoint": ""})
