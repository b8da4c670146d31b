"""The device to compute on, and the number format that is fastest there."""

from __future__ import annotations

import contextlib

import torch


def choose_device(name: str) -> torch.device:
    """Return the device of that name; `auto` takes a GPU when there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: no CUDA device is available")
    return torch.device(name)


def has_fast_bfloat16(device: torch.device) -> bool:
    """Tell whether the device multiplies bfloat16 natively."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capability = torch.backends.cpu.get_cpu_capability()
    return capability.startswith("AVX512") and torch.cpu._is_avx512_bf16_supported()


def mixed_precision(device: torch.device, enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Return the context that computes in bfloat16 while the weights stay in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)
