"""Where models and adapters come from: no pickle, no code of theirs, nothing outside the folders that are allowed."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tritonclient.utils import InferenceServerException

from diffusion_backend.errors import InvalidArgumentError, ModelLoadError
from diffusion_backend.pipelines.adapters import Adapters, select
from diffusion_backend.pipelines.loader import load_pipeline
from diffusion_backend.pipelines.roots import VARIABLE
from diffusion_backend.serve import TritonServer
from tests.security.conftest import MODEL, ask
from tests.support import tiny
from tests.support.client import Served

pytestmark = pytest.mark.filterwarnings("ignore:.torch_dtype. is deprecated:FutureWarning")


class Attack:
    """What runs code of whoever made it, when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self._proof}",))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny pipeline on disk."""
    path = tmp_path / "tiny"
    tiny.stable_diffusion().save_pretrained(path)
    return path


def pickled(model: Path, part: str, proof: Path) -> None:
    """Put a pickle that attacks in the place of a part's weights."""
    (weights,) = (model / part).glob("*.safetensors")
    weights.unlink()
    name = "pytorch_model.bin" if part == "text_encoder" else "diffusion_pytorch_model.bin"
    (model / part / name).write_bytes(pickle.dumps(Attack(proof)))


# -- pickles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
def test_a_pickle_is_not_even_read(model: Path, tmp_path: Path, part: str) -> None:
    """Of `diffusers`' parts and of `transformers`'; the error tells the parameter that would allow it."""
    proof = tmp_path / "proof"
    pickled(model, part, proof)
    with pytest.raises(ModelLoadError, match=r"only with allow_pickle: true") as caught:
        load_pipeline(str(model))
    assert "\n" not in str(caught.value)
    assert not proof.exists()


@pytest.mark.parametrize("part", ["unet", "text_encoder"])
def test_a_pickle_that_attacks_does_no_harm_even_where_pickles_are_allowed(
    model: Path, tmp_path: Path, part: str
) -> None:
    """torch reads tensors from it, and nothing else."""
    proof = tmp_path / "proof"
    pickled(model, part, proof)
    with pytest.raises(ModelLoadError):
        load_pipeline(str(model), allow_pickle=True)
    assert not proof.exists()


def test_pickled_weights_are_loaded_where_they_are_allowed(model: Path) -> None:
    weights = model / "unet" / "diffusion_pytorch_model.safetensors"
    state = load_file(weights)
    weights.unlink()
    torch.save(state, model / "unet" / "diffusion_pytorch_model.bin")
    with pytest.raises(ModelLoadError):
        load_pipeline(str(model))
    pipeline = load_pipeline(str(model), allow_pickle=True)
    assert torch.equal(pipeline.unet.conv_in.weight, state["conv_in.weight"])


# -- code that comes with a model ------------------------------------------------------------------------------------

CODE = """
import pathlib
pathlib.Path({proof!r}).touch()
from diffusers import DDIMScheduler, StableDiffusionPipeline

class Own(StableDiffusionPipeline):
    pass

class OwnScheduler(DDIMScheduler):
    pass
"""


def edit_index(model: Path, **entries: Any) -> None:
    path = model / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.mark.parametrize("trusted", [False, True])
def test_a_pipeline_of_its_own_code_is_run_only_if_trusted(
    model: Path, tmp_path: Path, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`_class_name: [module, class]` names a file beside the weights."""
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    proof = tmp_path / "proof"
    (model / "own.py").write_text(CODE.format(proof=str(proof)))
    edit_index(model, _class_name=["own", "Own"])
    if trusted:
        assert type(load_pipeline(str(model), trust_remote_code=True)).__name__ == "Own"
    else:
        with pytest.raises(ModelLoadError, match="trust_remote_code: true"):
            load_pipeline(str(model))
    assert proof.exists() is trusted


def test_a_part_of_its_own_code_is_not_run(model: Path, tmp_path: Path) -> None:
    """A part of the pipeline whose code lies in its folder."""
    proof = tmp_path / "proof"
    (model / "scheduler" / "own.py").write_text(CODE.format(proof=str(proof)))
    edit_index(model, scheduler=["own", "OwnScheduler"])
    with pytest.raises(ModelLoadError, match="trust_remote_code"):
        load_pipeline(str(model))
    assert not proof.exists()


@pytest.mark.parametrize("part", [["os", "system"], ["subprocess", "Popen"], ["this", "s"], ["antigravity", "x"]])
def test_a_part_cannot_name_any_module(model: Path, part: list[str]) -> None:
    """A module that was not imported before is not imported, so its code does not run."""
    known = part[0] in sys.modules
    edit_index(model, scheduler=part)
    with pytest.raises(ModelLoadError, match="cannot load the pipeline"):
        load_pipeline(str(model))
    assert (part[0] in sys.modules) == known


# -- roots ---------------------------------------------------------------------------------------------------------


def test_without_roots_the_configuration_may_name_any_folder(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert load_pipeline(str(model)).unet is not None


def test_a_model_within_the_roots_is_loaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"/nowhere:{model.parent}")
    assert load_pipeline("tiny", base=model.parent).unet is not None


def test_a_model_outside_the_roots_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an absolute path, by `..`, through a link, and by a link to a file within."""
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setenv(VARIABLE, str(root))
    (root / "link").symlink_to(model)
    for name in (str(model), "../tiny", "link", "./link/../tiny"):
        with pytest.raises(ModelLoadError, match=f"model: it is outside the folders that {VARIABLE} allows"):
            load_pipeline(name, base=root)
    weights = model / "unet" / "diffusion_pytorch_model.safetensors"
    (tmp_path / "elsewhere").mkdir()
    weights.rename(tmp_path / "elsewhere" / "x")
    weights.symlink_to(tmp_path / "elsewhere" / "x")
    monkeypatch.setenv(VARIABLE, str(model))
    with pytest.raises(ModelLoadError, match=r"'diffusion_pytorch_model\.safetensors' in it is outside"):
        load_pipeline(str(model))


def test_a_folder_whose_name_begins_like_a_root_is_outside(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(model.parent / "ti"))
    with pytest.raises(ModelLoadError, match="outside"):
        load_pipeline(str(model))


def test_hub_ids_are_refused_where_there_are_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless `hub` is one of them; nothing is asked of the network before that."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(ModelLoadError, match="allows no hub ids; add 'hub' to it"):
        load_pipeline("somebody/something")
    monkeypatch.setenv(VARIABLE, f"{tmp_path}:hub")
    with pytest.raises(ModelLoadError, match="cannot load the pipeline 'somebody/something'"):
        load_pipeline("somebody/something")


def test_adapters_are_confined_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = tiny.stable_diffusion()
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "a.safetensors").touch()
    monkeypatch.setenv(VARIABLE, str(root))
    with pytest.raises(ModelLoadError, match="lora_root: it is outside"):
        Adapters(pipeline, {}, root=str(outside), base=root)
    for source, words in (("../outside/a.safetensors", "loras: it is outside"), ("owner/name", "allows no hub ids")):
        with pytest.raises(ModelLoadError, match=words):
            Adapters(pipeline, {"a": source}, base=root).load_registered()


# -- adapters that requests name -------------------------------------------------------------------------------------

OUTSIDE = [
    "../secret.safetensors",
    "a/../../secret.safetensors",
    "{folder}/secret.safetensors",
    "link.safetensors",
    "folder",
    "./../loras/../secret.safetensors",
]


@pytest.fixture
def loras(tmp_path: Path) -> Path:
    """A folder of adapters, and a file beside it that links in it lead to."""
    root = tmp_path / "loras"
    root.mkdir()
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "pytorch_lora_weights.safetensors").write_bytes(b"secret")
    (root / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (root / "folder").symlink_to(tmp_path / "dir")
    (root / "a").mkdir()
    for name in ("x.bin", "x.pt", "x.ckpt", "x.pkl"):
        (root / name).write_bytes(b"pickle")
    return root.resolve()


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_request_cannot_name_a_file_outside(loras: Path, name: str) -> None:
    """Nor find out what is there: the answer is the same for a file that does not exist."""
    told = set()
    for there in (name, name.replace("secret", "nothing")):
        with pytest.raises(InvalidArgumentError) as caught:
            select([(there.format(folder=loras.parent), 1.0)], (), loras)
        told.add(str(caught.value).split("' ", 1)[1])
    assert len(told) == 1
    assert "is not under the folder of adapters" in told.pop()


@pytest.mark.parametrize("name", ["x.bin", "x.pt", "x.ckpt", "x.pkl", "a", ".", "", "a\0b", "x" * 5000, "~", "$HOME"])
def test_a_request_cannot_name_anything_but_safetensors(loras: Path, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"folder of adapters|no path that can be read"):
        select([(name, 1.0)], (), loras)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    "name", ["../../../../etc/passwd", "/etc/passwd", "link.safetensors", "owner/name", "https://127.0.0.1/x", "a\nb"]
)
def test_the_server_refuses_adapters_from_elsewhere(served: Served, name: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        served.stream("redraw", prompt="a", lora=np.array([[name.encode()]], dtype=np.object_)).result()
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    message = caught.value.message()
    assert message.startswith("lora: ")
    assert "\n" not in message
    assert str(MODEL) not in message


def test_the_server_does_not_load_what_is_not_allowed(drawing: TritonServer) -> None:
    """A folder outside the roots, and a hub id; the reason is in the list of models, which needs the key."""
    status, text = ask(drawing.address_http, "POST", "/v2/repository/index", {}, drawing.access.http_headers)
    assert status == 200
    models = {model["name"]: model for model in json.loads(text)}
    for name, words in (("outside", f"outside the folders that {VARIABLE} allows"), ("from_hub", "allows no hub ids")):
        assert models[name]["state"] == "UNAVAILABLE"
        assert words in models[name]["reason"].splitlines()[0]
    assert models["emoji"]["state"] == models["redraw"]["state"] == "READY"
