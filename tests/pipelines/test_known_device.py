"""The device that a pipeline works on is found once, at load, and is the one that `diffusers` would find."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffusion_backend.pipelines.known_device import KnownDevices
from diffusion_backend.pipelines.reference import own_copy
from tests.pipelines.conftest import DEADLINE_S, Served
from tests.pipelines.test_together import make
from tests.support import tiny
from tests.support.families import kandinsky


def copies(pipeline: Any) -> list[Any]:
    own = own_copy(pipeline, None)
    KnownDevices(pipeline).tell(own)
    return [own, *(value for name, value in vars(own).items() if name in ("prior_pipe", "decoder_pipe"))]


@pytest.mark.filterwarnings("ignore")  # what diffusers' old pipelines say of themselves
@pytest.mark.parametrize("name", ["tiny", "KandinskyV22CombinedPipeline"])
def test_a_copy_and_what_is_inside_it_know_the_device_and_are_of_the_same_kind(name: str) -> None:
    case = next((case for case in kandinsky.CASES if case.pipeline == name), None)
    pipeline = tiny.stable_diffusion() if case is None else case.build()
    copied = copies(pipeline)
    assert len(copied) == (1 if case is None else 3)
    for own in copied:
        assert own._execution_device == torch.device("cpu")
        base = type(own).__mro__[1]
        assert (type(own).__name__, type(own).__module__) == (base.__name__, base.__module__)
    assert isinstance(copied[0], type(pipeline))
    assert type(pipeline) is not type(copied[0]), "the shared pipeline was changed"


def test_the_device_of_offloading_hooks_is_the_one_that_is_known() -> None:
    """With offloading, the modules' own device is not where they work."""
    pipeline = tiny.stable_diffusion()
    for component in (pipeline.text_encoder, pipeline.unet, pipeline.vae):
        component._hf_hook = type("Hook", (), {"execution_device": "meta"})()
    assert copies(pipeline)[0]._execution_device == torch.device("meta")


def test_requests_do_not_look_through_the_modules_again(sd: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    cls = type(sd.pipeline)
    found = cls._execution_device.fget

    def look(self: Any) -> torch.device:
        looked.append("")
        device: torch.device = found(self)
        return device

    monkeypatch.setattr(cls, "_execution_device", property(look))
    with sd.running() as running:
        assert looked == [""]  # when the executor was made
        running.engine.submit(make("a dog", 1, num_inference_steps=2)).result(DEADLINE_S)
    assert looked == [""]
