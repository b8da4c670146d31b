"""Reads a repository of models as far as it concerns this backend: what is there, and what is wrong with it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from ..config import ModelConfig, UnaryConfig
from ..errors import ConfigurationError, did_you_mean
from .console import CommandError


class Kind(StrEnum):
    """What a folder of a repository is."""

    STREAMING = "streaming"
    UNARY = "unary"
    OTHER = "other"
    """A model of another backend, or with a `model.py` that is not ours."""
    BROKEN = "broken"


_KINDS = {"StreamingModel": Kind.STREAMING, "UnaryModel": Kind.UNARY}


@dataclass(frozen=True, slots=True)
class Model:
    """One folder of a repository.

    Attributes:
        folder: of the model.
        kind: what it is.
        problem: why it would not load, in one line; empty unless the kind is BROKEN.
        config: the parameters of a streaming model.
        stream_model: the model that a unary one passes requests on to.
        far: whether a unary model passes them on to another server.
    """

    folder: Path
    kind: Kind
    problem: str = ""
    config: ModelConfig | None = None
    stream_model: str = ""
    far: bool = field(default=False, repr=False)

    @property
    def name(self) -> str:
        """Of the model, which is that of its folder."""
        return self.folder.name


def read_repository(repository: Path) -> list[Model]:
    """Return the models of a repository, by name.

    Raises:
        CommandError: it is no folder.
    """
    if not repository.is_dir():
        raise CommandError(
            f"there is no repository of models at {repository}; name one with --repository, or make it with "
            "`diffusion-backend add`"
        )
    folders = [path for path in sorted(repository.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    models = [read_model(folder) for folder in folders]
    names = {model.name for model in models if model.kind is Kind.STREAMING}
    return [_with_lost_stream(model, names) for model in models]


def find_model(repository: Path, name: str) -> Model:
    """Return a streaming model that can be loaded.

    Raises:
        CommandError: there is none of this name, or it is broken.
    """
    models = {model.name: model for model in read_repository(repository)}
    if name not in models:
        known = f" (there are {', '.join(models)})" if models else ""
        raise CommandError(f"there is no model {name!r} in {repository}{did_you_mean(name, models)}{known}")
    model = models[name]
    if model.kind is Kind.BROKEN:
        raise CommandError(f"{name}: {model.problem}")
    if model.kind is Kind.UNARY:
        raise CommandError(
            f"{name} only passes requests on to {model.stream_model}; "
            f"try `diffusion-backend check {model.stream_model}`"
        )
    if model.kind is Kind.OTHER:
        raise CommandError(f"{name} is no model of this backend, so there is nothing to check")
    return model


def read_model(folder: Path) -> Model:
    """Return what a folder holds; never raises for what is wrong with it."""
    try:
        return _read(folder)
    except ConfigurationError as error:
        return Model(folder, Kind.BROKEN, error.message)
    except (OSError, ValueError, text_format.ParseError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Model(folder, Kind.BROKEN, f"its config.pbtxt cannot be read: {reason}")


def _read(folder: Path) -> Model:
    path = folder / "config.pbtxt"
    if not path.is_file():
        return Model(folder, Kind.BROKEN, "it has no config.pbtxt")
    config = _parse(path.read_text(encoding="utf-8"))
    if config.name and config.name != folder.name:
        return Model(folder, Kind.BROKEN, f"its config.pbtxt names it {config.name!r}, which must be its folder's name")
    if config.backend != "python":
        return Model(folder, Kind.OTHER)
    versions = [int(entry.name) for entry in folder.iterdir() if entry.is_dir() and entry.name.isdecimal()]
    if not versions:
        return Model(folder, Kind.BROKEN, "it has no version folder such as '1'")
    script = folder / str(max(versions)) / (config.default_model_filename or "model.py")
    if not script.is_file():
        return Model(folder, Kind.BROKEN, f"it has no {script.relative_to(folder)}")
    # Read, not run: what it imports may exist only inside the server.
    named = re.search(r"\b(StreamingModel|UnaryModel)\b", script.read_text(encoding="utf-8"))
    kind = _KINDS[named[1]] if named else Kind.OTHER
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    if kind is Kind.STREAMING:
        return _streaming(folder, ModelConfig.from_parameters(parameters))
    if kind is Kind.UNARY:
        unary = UnaryConfig.from_parameters(parameters)
        stream_model = unary.stream_model or folder.name.removesuffix("_unary")
        if stream_model == folder.name:
            return Model(
                folder,
                Kind.BROKEN,
                "parameter 'stream_model' is missing: name the streaming model, or call it NAME_unary",
            )
        return Model(folder, kind, stream_model=stream_model, far=unary.grpc_endpoint is not None)
    return Model(folder, kind)


def _streaming(folder: Path, config: ModelConfig) -> Model:
    """Return a streaming model, broken if the folder of its pipeline is not there."""
    path = Path(config.model).expanduser()
    if not (folder / path).is_dir() and (config.model.startswith((".", "/", "~")) or config.model.count("/") != 1):
        return Model(folder, Kind.BROKEN, f"its pipeline is missing: there is no folder {config.model}", config)
    return Model(folder, Kind.STREAMING, config=config)


def _with_lost_stream(model: Model, names: set[str]) -> Model:
    """Return a unary model as broken if the one that it passes requests on to is not there."""
    if model.kind is not Kind.UNARY or model.far or model.stream_model in names:
        return model
    problem = f"the model {model.stream_model!r}, which it passes requests on to, is missing or broken"
    return replace(model, kind=Kind.BROKEN, problem=problem + did_you_mean(model.stream_model, names))


def _parse(text: str) -> Any:
    """Return a config.pbtxt as Triton reads it."""
    from tritonclient.grpc import model_config_pb2

    return text_format.Parse(text, model_config_pb2.ModelConfig())
