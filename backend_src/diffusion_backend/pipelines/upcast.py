"""Decoders that overflow in half precision, made safe for requests that take turns.

Pipelines turn such a decoder (`force_upcast` in its configuration) to float32 before they call it and back after. In
between, another request could call it, or turn it back. Here the decoder turns itself, within one call; pipelines are
told that they need not.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def upcast_within_calls(module: Any) -> None:
    """Let `encode` and `decode` of a half-precision decoder with `force_upcast` turn it to float32 and back."""
    config = getattr(module, "config", None)
    if not (isinstance(module, torch.nn.Module) and getattr(config, "force_upcast", False)):
        return
    if getattr(module, "dtype", None) != torch.float16:
        return
    module.register_to_config(force_upcast=False)  # type: ignore[operator]
    for name in ("encode", "decode"):
        if hasattr(module, name):
            setattr(module, name, _upcasting(module, getattr(module, name)))


def _upcasting(module: torch.nn.Module, function: Any) -> Any:
    @functools.wraps(function)
    def run(sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        module.to(torch.float32)
        try:
            return function(sample.float(), *args, **kwargs)
        finally:
            module.to(torch.float16)

    return run
