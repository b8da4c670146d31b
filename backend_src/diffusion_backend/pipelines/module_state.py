"""Notices pipelines whose call changes the modules that all requests share.

Some pipelines put their own attention processors or hooks into the denoiser when they are called, and take them out
when they return (perturbed-attention guidance does). Two such calls cannot be interleaved: the first to end would
change the module under the other. They run one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .reference import components_of

Snapshot = dict[str, tuple[Any, ...]]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def snapshot(pipeline: Any) -> Snapshot:
    """Return what the behaviour of a pipeline's modules hangs on: their callables and hooks, not their numbers."""
    state: Snapshot = {}
    for component, module in components_of(pipeline).items():
        if not isinstance(module, torch.nn.Module):
            continue
        for name, part in module.named_modules():
            hooks = (len(vars(part).get(key, ())) for key in _HOOKS)
            # The objects themselves are kept, so that none of their identities can be used again meanwhile.
            state[f"{component}.{name}"] = (part, *_callables(part).values(), *hooks)
    return state


def differs(one: Snapshot, two: Snapshot) -> bool:
    """Whether a module was given other callables or hooks between two snapshots."""
    if one.keys() != two.keys():
        return True
    return any(
        len(a) != len(b) or any(x is not y and not (isinstance(x, int) and x == y) for x, y in zip(a, b, strict=True))
        for a, b in zip(one.values(), two.values(), strict=True)
    )


def restorer(pipeline: Any) -> Callable[[], None]:
    """Return a function that gives a pipeline's modules back the callables and hooks that they have now.

    A call that is aborted, or that fails, does not come to put back what it changed.
    """
    kept = [
        (part, _callables(part), {key: dict(vars(part).get(key, {})) for key in _HOOKS})
        for component in components_of(pipeline).values()
        if isinstance(component, torch.nn.Module)
        for part in component.modules()
    ]

    def restore() -> None:
        for part, callables, hooks in kept:
            for name in _callables(part).keys() - callables.keys():
                delattr(part, name)
            vars(part).update(callables)
            for key, entries in hooks.items():
                if key in vars(part):
                    vars(part)[key].clear()
                    vars(part)[key].update(entries)

    return restore


def _callables(part: torch.nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(part).items() if key[0] != "_" and callable(value)}
