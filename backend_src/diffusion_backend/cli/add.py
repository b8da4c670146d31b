"""Writes the folders of a model: all of them, or none."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..config import ModelConfig
from .console import CommandError
from .preview import Preview, preview
from .repository import read_model
from .source import Source, find
from .template import FILES, streaming_files, unary_files

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
UNARY = "_unary"


@dataclass(frozen=True, slots=True)
class Added:
    """What was added.

    Attributes:
        name: of the streaming model.
        source: the pipeline.
        written: how the configuration names the pipeline.
        preview: what it takes and gives.
        folders: that were written.
    """

    name: str
    source: Source
    written: str
    preview: Preview
    folders: list[Path]


def add(
    given: str, *, name: str | None, repository: Path, parameters: Mapping[str, str], unary: bool, force: bool
) -> Added:
    """Add a pipeline to a repository of models, after checking all that can be checked without its weights.

    Args:
        given: a folder's path or a hub id.
        name: of the model; made from `given` by default.
        repository: folder of the models; made if it is missing.
        parameters: further parameters for config.pbtxt, by name.
        unary: whether the unary twin is written, too.
        force: whether models of these names are replaced.

    Raises:
        CommandError, ConfigurationError: with the reason; nothing was written then.
    """
    name = check_name(name) if name is not None else derive_name(given)
    names = [name, f"{name}{UNARY}"] if unary else [name]
    check_places(repository, names, force=force)
    source = find(given)
    # The class that the model is loaded with, if it is to be another than that of its weights.
    own = {"_class_name": parameters["pipeline_class"]} if "pipeline_class" in parameters else {}
    seen = preview({**source.index, **own})
    written = source.from_folder(repository, name)
    ModelConfig.from_parameters({"model": written, **parameters})
    files = {name: streaming_files(seen.pipeline, {"model": written, **parameters})}
    if unary:
        files[f"{name}{UNARY}"] = unary_files(seen.pipeline, name)
    try:
        folders = write(repository, files)
    except OSError as error:
        raise CommandError(f"{repository} cannot be written to: {error.strerror or error}") from None
    return Added(name, source, written, seen, folders)


def check_name(name: str) -> str:
    """Return a model's name if Triton allows it.

    Raises:
        CommandError: it does not, or the name is one of a twin.
    """
    if not _NAME.fullmatch(name):
        raise CommandError(
            f"--name: {name!r} is not allowed; use letters, digits, '_', '.' and '-', "
            "and begin with none of the last two"
        )
    if name.endswith(UNARY):
        raise CommandError(f"--name: {name!r} is not allowed; names that end in {UNARY} are those of unary twins")
    return name


def derive_name(given: str) -> str:
    """Return a name made from the last part of a path or a hub id."""
    last = Path(given).expanduser().resolve().name if given.startswith((".", "/", "~")) else given.split("/")[-1]
    name = re.sub(r"[^A-Za-z0-9_.\-]+", "_", last or Path(given).name).lstrip(".-").removesuffix(UNARY)
    if not name.strip("_"):
        raise CommandError(f"no name can be made from {given!r}; give one with --name")
    return check_name(name)


def check_places(repository: Path, names: list[str], *, force: bool) -> None:
    """Refuse names that are taken, and with `force` those whose folders hold more than a model's files.

    Raises:
        CommandError: naming the folder and the way out.
    """
    if repository.exists() and not repository.is_dir():
        raise CommandError(f"--repository: {repository} is not a folder")
    for name in names:
        folder = repository / name
        if not (folder.exists() or folder.is_symlink()):
            continue
        if not force:
            raise CommandError(f"{folder} exists; choose another --name, or replace it with --force")
        others = _other_files(folder)
        if others:
            raise CommandError(
                f"{folder} holds more than a model's files ({', '.join(others[:3])}), which --force would delete; "
                "move them away first"
            )


def _other_files(folder: Path) -> list[str]:
    if not folder.is_dir() or folder.is_symlink():
        return [folder.name]
    files = [path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()]
    names = [path.relative_to(folder) for path in files if path.parent.name != "__pycache__"]
    return sorted(str(name) for name in names if name.as_posix() not in FILES)


def write(repository: Path, models: Mapping[str, Mapping[str, str]]) -> list[Path]:
    """Put models into a repository, in the place of those of the same names.

    They are written aside and moved into place by renaming; if that fails, what was moved is moved back.

    Args:
        repository: made if it is missing.
        models: the files of each model by their paths in its folder, by the model's name.

    Raises:
        OSError: they cannot be written.
    """
    repository.mkdir(parents=True, exist_ok=True)
    # Inside the repository: renaming works within one file system only.
    with tempfile.TemporaryDirectory(prefix=".adding-", dir=repository) as aside:
        for name, files in models.items():
            for path, text in files.items():
                target = Path(aside, "new", name, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
            model = read_model(Path(aside, "new", name))
            assert not model.problem or "pipeline is missing" in model.problem, model.problem
        Path(aside, "old").mkdir()
        moved: list[tuple[Path, Path]] = []
        try:
            for name in models:
                place = repository / name
                if place.exists():
                    moved.append((place, place.rename(Path(aside, "old", name))))
                made = Path(aside, "new", name)
                moved.append((made, made.rename(place)))
        except BaseException:
            for origin, now in reversed(moved):
                now.rename(origin)
            raise
    return [repository / name for name in models]
