"""From a folder to an executor, and readable errors when there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diffusion_backend.config import ModelConfig
from diffusion_backend.errors import ConfigurationError, ModelLoadError
from diffusion_backend.pipelines import dummy, loader
from tests.support import tiny

pytestmark = pytest.mark.filterwarnings("ignore:.torch_dtype. is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pipeline on disk."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny.stable_diffusion().save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({}, None),
        ({"step_batching": "require"}, None),
        ({"step_batching": "off"}, "disabled"),
        ({"deterministic": "true"}, "deterministic"),
        ({"self_check_tolerance": "0"}, "self_check"),
    ],
)
def test_the_batching_that_the_parameters_ask_for(folder: Path, parameters: dict[str, str], reason: str | None) -> None:
    config = ModelConfig.from_parameters({"model": "tiny", **parameters})
    executor = loader.load(config, device="cpu", base=folder.parent)
    assert executor.capabilities.joint == {"unet": reason}
    assert executor._active == {}


def test_require_refuses_to_load_what_cannot_be_batched(folder: Path) -> None:
    config = ModelConfig(model=str(folder), step_batching="require", self_check_tolerance=0.0)
    with pytest.raises(ModelLoadError, match=r"step_batching is 'require', but unet cannot be batched \(self_check\)"):
        loader.load(config, device="cpu")


def test_warmup_sizes_are_run_at_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int | None, int | None]] = []
    monkeypatch.setattr(
        loader.PipelineExecutor, "_dummy_run", lambda self, height, width: sizes.append((height, width))
    )
    config = ModelConfig(model=str(folder), warmup_sizes=((16, 16), (24, 32), (32, 16)))
    loader.load(config, device="cpu")
    assert sizes == [(24, 32), (32, 16)]  # the first is the probe's


@pytest.mark.parametrize("name", ["StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"])
def test_a_pipeline_that_needs_pictures_is_warmed_up_with_some(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, int]] = []
    make = dummy.needed

    def needed(names: tuple[str, ...], height: int, width: int) -> dict[str, Any]:
        sizes.append((height, width))
        return make(names, height, width)

    monkeypatch.setattr(dummy, "needed", needed)
    config = ModelConfig(model=str(folder), pipeline_class=name, warmup_sizes=((16, 16), (24, 32)))
    executor = loader.load(config, device="cpu")
    assert executor._active == {}
    assert sizes == [(24, 32)]


def test_a_first_run_that_fails_blames_no_size_that_nobody_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(*_: object, **__: object) -> None:
        raise ModelLoadError("no such kernel")

    monkeypatch.setattr(loader, "prepare", prepare)
    with pytest.raises(ModelLoadError, match="was loaded, but a first run failed: no such kernel"):
        loader.load(ModelConfig(model=str(folder)), device="cpu")
    with pytest.raises(ModelLoadError, match=r"does not run at a size of warmup_sizes \(16x24\): no such kernel"):
        loader.load(ModelConfig(model=str(folder), warmup_sizes=((16, 24),)), device="cpu")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("./nowhere", "the model './nowhere' is neither a folder that exists nor a hub id of the form owner/name"),
        ("/nowhere/at/all", "is neither a folder that exists nor a hub id"),
        ("justaname", "is neither a folder that exists nor a hub id"),
        ("a/b/c", "is neither a folder that exists nor a hub id"),
        ("empty", "the folder 'empty' holds no diffusers pipeline \\(model_index.json is missing\\)"),
        ("unknown", "cannot load the pipeline 'unknown': "),
        ("broken", "cannot load the pipeline 'broken': "),
    ],
)
def test_a_model_that_is_not_there_or_broken_is_told_in_one_line(tmp_path: Path, model: str, text: str) -> None:
    for name in ("empty", "unknown", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "unknown" / "model_index.json").write_text('{"_class_name": "NoSuchPipeline"}')
    (tmp_path / "broken" / "model_index.json").write_text("{")
    with pytest.raises(ModelLoadError, match=text) as caught:
        loader.load_pipeline(model, base=tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_weights_are_told(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for weights in (copy / "unet").glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(ModelLoadError, match="cannot load the pipeline"):
        loader.load_pipeline(str(copy))


def test_an_unknown_dtype_is_told() -> None:
    with pytest.raises(ConfigurationError, match="parameter 'dtype': 'float8' is not one of"):
        loader.load_pipeline("owner/name", dtype="float8")
