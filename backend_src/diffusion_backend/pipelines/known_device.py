"""The device that a pipeline works on, found once and not anew in every request.

`diffusers` looks for it in the hooks of every module of every component: milliseconds of each request, in which nobody
else's step can run. It does not change after the load.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch


class KnownDevices:
    """The devices of a loaded pipeline and of those inside it.

    Args:
        pipeline: on its device, or with its offloading hooks.

    Attributes:
        device: where the outermost one works.
    """

    def __init__(self, pipeline: Any) -> None:
        self._classes: dict[type, type] = {}
        self.device = torch.device(self._learn(pipeline))

    def tell(self, own: Any) -> None:
        """Tell a request's own copy of the pipeline (`reference.own_copy`); called by the engine thread."""
        object.__setattr__(own, "__class__", self._classes[type(own)])
        for inner in _inside(own):
            self.tell(inner)

    def _learn(self, pipeline: Any) -> Any:
        cls, device = type(pipeline), pipeline._execution_device
        # `_execution_device` is a property, which only a class can replace.
        members = {"_execution_device": device, "__module__": cls.__module__, "__doc__": cls.__doc__}
        self._classes[cls] = type(cls.__name__, (cls,), members)
        for inner in _inside(pipeline):
            self._learn(inner)
        return device


def _inside(pipeline: Any) -> list[Any]:
    return [value for value in vars(pipeline).values() if isinstance(value, diffusers.DiffusionPipeline)]
