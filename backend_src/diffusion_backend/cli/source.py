"""Finds a pipeline, in a folder or on the hub, without its weights."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .console import CommandError

INDEX = "model_index.json"
_HUB_ID = re.compile(r"[\w.\-]+/[\w.\-]+")


@dataclass(frozen=True, slots=True)
class Source:
    """A pipeline that was found.

    Attributes:
        given: as the user wrote it.
        folder: where it lies; None for one on the hub.
        index: what its model_index.json says.
    """

    given: str
    folder: Path | None
    index: dict[str, Any]

    def from_folder(self, repository: Path, name: str) -> str:
        """Return how the model `name` of a repository is to name it.

        A hub id stays one. A folder beside the repository is named relative to the model's folder, so that both can be
        moved together; any other by its absolute path.
        """
        if self.folder is None:
            return self.given
        model = repository.resolve() / name
        tree = repository.resolve().parent
        # The root holds everything, which makes nothing a neighbour.
        if tree != tree.parent and self.folder.is_relative_to(tree):
            return os.path.relpath(self.folder, model)
        return str(self.folder)


def find(given: str) -> Source:
    """Find a pipeline by a folder's path or a hub id, and read its model_index.json.

    Raises:
        CommandError: it is not there or is no pipeline, with what to do.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        index = path / INDEX
        if not index.is_file():
            raise CommandError(
                f"the folder {given} holds no diffusers pipeline ({INDEX} is missing); "
                "give the folder that save_pretrained() wrote"
            )
        return Source(given, path.resolve(), _read(index, given))
    if path.exists():
        raise CommandError(
            f"{given} is a file, and a pipeline is a folder; write one with "
            "diffusers.DiffusionPipeline.from_single_file(...).save_pretrained(FOLDER)"
        )
    if given.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(given):
        raise CommandError(f"{given!r} is neither a folder that exists nor a hub id of the form owner/name")
    return Source(given, None, _read(_download(given), given))


def _read(path: Path, given: str) -> dict[str, Any]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"the {INDEX} of {given} cannot be read: {error}") from None
    if not isinstance(index, dict) or "_class_name" not in index:
        raise CommandError(f"the {INDEX} of {given} names no pipeline class, so it is no diffusers pipeline")
    return index


def _download(hub_id: str) -> Path:
    """Return the model_index.json of a hub id, from the ordinary cache or the hub, with the user's token."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    # Caught from the special to the general: a gated repository is also one that was not found.
    try:
        return Path(hf_hub_download(hub_id, INDEX))
    except GatedRepoError:
        problem = (
            f"{hub_id} is gated: ask for access at {constants.ENDPOINT}/{hub_id}, then log in with `hf auth login` "
            "(or set HF_TOKEN)"
        )
    except RepositoryNotFoundError:
        problem = (
            f"there is no {hub_id} on the hub, or it is private: check the name, or log in with `hf auth login` "
            "(or set HF_TOKEN)"
        )
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        problem = (
            f"{hub_id} is not in the cache of Hugging Face, and {offline}: "
            f"download it where there is a connection (`hf download {hub_id}`), or give the path of a folder"
        )
    except EntryNotFoundError:
        problem = f"{hub_id} is on the hub, but holds no diffusers pipeline ({INDEX} is missing)"
    except HFValidationError as error:
        problem = f"{hub_id!r} is no hub id: {error}"
    except (HfHubHTTPError, OSError) as error:
        problem = f"{hub_id} cannot be read from the hub: {type(error).__name__}: {error}"
    raise CommandError(problem)
