"""Settings that trade memory for time, handed to `diffusers`; each is a parameter of the model's configuration."""

from __future__ import annotations

import json
from typing import Any

import torch

from ..config import ModelConfig
from ..errors import ConfigurationError, did_you_mean
from .reference import components_of


def quantization_config(text: str | None) -> Any:
    """Return what `from_pretrained` takes as `quantization_config`, or None.

    Args:
        text: JSON object of the arguments of `diffusers.PipelineQuantizationConfig`, such as
            `{"quant_backend": "bitsandbytes_8bit", "components_to_quantize": ["transformer"]}`. With the backend
            `torchao`, `quant_type` is the name of a class of `torchao.quantization`, such as `Int8WeightOnlyConfig`.

    Raises:
        ConfigurationError: it is no such object, or the installed version does not know the quantizer.
    """
    if text is None:
        return None
    import diffusers

    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise ConfigurationError("quantization", f"it is not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ConfigurationError("quantization", f"it must be a JSON object, not {type(arguments).__name__}")
    if arguments.get("quant_backend") == "torchao":
        return _torchao_config(arguments)
    try:
        return diffusers.PipelineQuantizationConfig(**arguments)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigurationError("quantization", f"diffusers {diffusers.__version__} refuses it: {error}") from error


def _torchao_config(arguments: dict[str, Any]) -> Any:
    """Return a configuration of torchao for each component, as `diffusers` has none for a whole pipeline.

    Raises:
        ConfigurationError: the components or the type are missing or unknown, or torchao is not installed.
    """
    import diffusers
    import transformers

    components, options = arguments.get("components_to_quantize"), arguments.get("quant_kwargs")
    if not (isinstance(components, list) and isinstance(options, dict)):
        problem = "torchao needs components_to_quantize, a list of names, and quant_kwargs, an object with quant_type"
        raise ConfigurationError("quantization", problem)
    kind = _torchao_type(options.get("quant_type"))
    return diffusers.PipelineQuantizationConfig(
        quant_mapping={
            name: (transformers if name.startswith("text_encoder") else diffusers).TorchAoConfig(kind)
            for name in components
        }
    )


def _torchao_type(name: Any) -> Any:
    """Return what torchao is told a type with: an object, which JSON cannot hold."""
    try:
        from torchao import quantization
        from torchao.core.config import AOBaseConfig
    except ImportError:
        raise ConfigurationError("quantization", "torchao is not installed") from None
    known = {
        key: value
        for key, value in vars(quantization).items()
        if isinstance(value, type) and issubclass(value, AOBaseConfig) and value is not AOBaseConfig
    }
    if name not in known:
        problem = f"quant_type {name!r} is not one of {', '.join(known)}{did_you_mean(str(name), known)}"
        raise ConfigurationError("quantization", problem)
    try:
        return known[name]()
    except TypeError as error:
        raise ConfigurationError("quantization", f"quant_type {name!r} needs arguments of its own: {error}") from None


def place(pipeline: Any, config: ModelConfig, device: str) -> None:
    """Put a loaded pipeline on its device, with the settings of its configuration; called before the probe.

    Raises:
        ConfigurationError: a setting has no effect on this pipeline, or is unknown to the installed version.
    """
    if config.enable_model_cpu_offload:
        if device == "cpu":
            raise ConfigurationError("enable_model_cpu_offload", "it needs a GPU; this instance is on the CPU")
        pipeline.enable_model_cpu_offload(device=device)
    else:
        pipeline.to(device)
    for name, method in (("vae_tiling", "enable_tiling"), ("vae_slicing", "enable_slicing")):
        if getattr(config, name):
            enable = getattr(getattr(pipeline, "vae", None), method, None)
            if enable is None:
                raise ConfigurationError(name, f"the decoder of {type(pipeline).__name__} has no {method}")
            enable()
    if config.attention_backend is not None:
        _set_attention_backend(pipeline, config.attention_backend)


def _set_attention_backend(pipeline: Any, name: str) -> None:
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_dispatch import AttentionBackendName

    known = [backend.value for backend in AttentionBackendName]
    if name not in known:
        raise ConfigurationError(
            "attention_backend", f"{name!r} is not one of {', '.join(known)}{did_you_mean(name, known)}"
        )
    touched = [
        module
        for module in components_of(pipeline).values()
        if isinstance(module, torch.nn.Module)
        and hasattr(module, "set_attention_backend")
        and any(isinstance(part, AttentionModuleMixin) for part in module.modules())
    ]
    if not touched:
        raise ConfigurationError(
            "attention_backend", f"{type(pipeline).__name__} has no module whose attention can be chosen"
        )
    for module in touched:
        choose: Any = module.set_attention_backend
        try:
            choose(name)
        except Exception as error:  # a kernel that is not installed, or not for this device
            raise ConfigurationError("attention_backend", f"{name!r} does not work here: {error}") from error
