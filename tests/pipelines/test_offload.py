"""Results leave the device without holding up the engine's thread, and nobody reads them too early."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from diffusion_backend.errors import NotFiniteError
from diffusion_backend.pipelines.offload import CudaCopier, defer_output
from diffusion_backend.pipelines.outputs import is_finite, to_output


class FakeDevice:
    """A device whose copies are done only when they are waited for: until then the host's memory holds rubbish."""

    def __init__(self) -> None:
        self.copied: list[torch.dtype] = []
        self.waited = 0

    def copy(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        self.copied.append(tensor.dtype)
        host = torch.full_like(tensor, 77)

        def wait() -> None:
            self.waited += 1
            host.copy_(tensor)

        return host, wait


def pictures() -> torch.Tensor:
    return torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_what_is_read_is_what_was_made_and_not_what_lay_there_before() -> None:
    raw = SimpleNamespace(images=pictures())
    device = FakeDevice()
    deferred = defer_output(raw, sample_rate=None, frame_rate=None, copier=device)
    assert device.waited == 0, "the engine's thread waited for the copy"
    output = deferred.get()
    assert device.waited == 2, "for the pictures, and for whether they are finite"
    assert np.array_equal(output.images, to_output(raw).images)


def test_pictures_cross_as_bytes_and_sound_as_float32() -> None:
    raw = SimpleNamespace(frames=pictures()[None], audio=torch.zeros(1, 2, 4000, dtype=torch.float16))
    device = FakeDevice()
    output = defer_output(raw, sample_rate=16000, frame_rate=8.0, copier=device).get()
    assert sorted(map(str, device.copied)) == ["torch.bool", "torch.float32", "torch.uint8"]
    assert output.video.shape == (1, 2, 8, 8, 3)
    assert output.audio.shape == (1, 2, 4000)
    assert (output.sample_rate, output.frame_rate) == (16000, 8.0)


@pytest.mark.parametrize("copier", [FakeDevice, lambda: None])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["images", "frames", "audio"])
def test_what_is_not_finite_is_an_error_and_no_black_picture(copier: Callable[[], Any], bad: float, name: str) -> None:
    values = {"images": pictures(), "frames": pictures()[None], "audio": torch.zeros(1, 2, 100)}[name]
    values.view(-1)[5] = bad
    deferred = defer_output(SimpleNamespace(**{name: values}), sample_rate=8, frame_rate=8.0, copier=copier())
    with pytest.raises(NotFiniteError, match=f"not finite: {name} hold NaN or infinity"):
        deferred.get()


@pytest.mark.parametrize("wrap", [np.asarray, list, lambda array: [list(array)], np.ndarray.tolist])
def test_arrays_and_lists_are_looked_into_too(wrap: Callable[[Any], Any]) -> None:
    array = np.zeros((2, 8, 8, 3), dtype=np.float32)
    assert is_finite(wrap(array))
    array[1, 2, 3, 0] = np.nan
    assert not is_finite(wrap(array))


def test_on_the_cpu_nothing_is_copied() -> None:
    sound = torch.zeros(1, 2, 100)
    output = defer_output(SimpleNamespace(audios=sound), sample_rate=8000, frame_rate=None).get()
    assert output.audio.shape == (1, 2, 100)
    sound += 0.5  # the copy, if there were one before `get`, would not see this
    later = defer_output(SimpleNamespace(audios=sound), sample_rate=8000, frame_rate=None)
    sound += 0.25
    assert later.get().audio.max() == 0.75


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_copy_goes_into_pinned_memory() -> None:
    tensor = torch.rand(64, 64, 3, device="cuda")
    host, wait = CudaCopier().copy(tensor)
    assert host.is_pinned()
    wait()
    assert torch.equal(host, tensor.cpu())
