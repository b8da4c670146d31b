"""The command line as a user calls it, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import diffusers  # noqa: F401 - before a call, whose stderr its handlers of logs would keep
import pytest
import transformers
import typer.testing
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from diffusion_backend.cli.app import app

ROOT = Path(__file__).parents[2]
EMOJI = (ROOT / "models" / "emoji").resolve()

Call = Callable[..., typer.testing.Result]


@pytest.fixture(autouse=True)
def _no_warnings_of_imports() -> Iterator[None]:
    """Do what `main` does through the environment."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    yield
    transformers.utils.logging.set_verbosity(before)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of models that is not there yet; the commands use it unless told otherwise."""
    place = tmp_path / "tree" / "repository"
    monkeypatch.setenv("MODEL_REPOSITORY", str(place))
    return place


@pytest.fixture
def call(repository: Path) -> Call:
    """Call the command line; what it raises beyond its own errors fails the test."""

    def run(*arguments: object) -> typer.testing.Result:
        result = typer.testing.CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
        print(f"$ diffusion-backend {' '.join(map(str, arguments))} -> {result.exit_code}\n{result.output}")
        return result

    return run


@pytest.fixture
def refused(call: Call, repository: Path) -> Callable[..., str]:
    """Call the command line, which must refuse in one line on stderr and leave the repository as it is."""

    def run(*arguments: object) -> str:
        before = snapshot(repository)
        result = call(*arguments)
        assert result.exit_code == 2
        lines = [line for line in result.stderr.splitlines() if not line.endswith("…")]
        assert len(lines) == 1
        assert lines[0].startswith("error ")
        assert result.stdout == ""
        assert snapshot(repository) == before
        return lines[0].removeprefix("error ")

    return run


def snapshot(folder: Path) -> dict[str, str]:
    """Return every file of a folder with its text."""
    return {str(path.relative_to(folder)): path.read_text() if path.is_file() else "" for path in folder.rglob("*")}


def make_pipeline(folder: Path, class_name: object = "StableDiffusionPipeline", **more: object) -> Path:
    """Write a folder that looks like a pipeline until its weights are loaded."""
    folder.mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": class_name, **more}))
    return folder


def parameters_of(folder: Path) -> dict[str, str]:
    """Return the parameters in a model's config.pbtxt, as Triton reads it."""
    config = text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    assert config.backend == "python"
    return {name: value.string_value for name, value in config.parameters.items()}
