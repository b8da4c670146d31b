"""Where models and adapters may be loaded from, if the server's owner has said so.

`DIFFUSION_MODEL_ROOTS` lists folders, separated as in PATH; the word `hub` among them allows hub ids. What lies
elsewhere is refused then, also through `..` or a link. Unset, a model's configuration may name anything: whoever may
write it may run code on the server anyway, as a model is a Python file.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ModelLoadError

VARIABLE = "DIFFUSION_MODEL_ROOTS"
_HUB = "hub"


def check_path(path: Path, parameter: str, *, links: bool = True) -> None:
    """Refuse a file or folder outside the roots, or one that holds a link to what is outside.

    Args:
        path: an existing file or folder.
        parameter: of the model, for the error.
        links: whether links in the folder are looked at; not needed where each is before it is followed.

    Raises:
        ModelLoadError: naming the parameter and the remedy.
    """
    roots = _roots()
    if roots is None:
        return
    inside = path.rglob("*") if links and path.is_dir() else ()
    for each in (path, *inside):
        real = each.resolve()
        if not any(real.is_relative_to(root) for root in roots):
            what = "it" if each is path else f"{each.name!r} in it"
            raise ModelLoadError(
                f"{parameter}: {what} is outside the folders that {VARIABLE} allows; add its folder there"
            )


def check_hub(name: str, parameter: str) -> None:
    """Refuse a hub id where only folders are allowed.

    Raises:
        ModelLoadError: naming the parameter and the remedy.
    """
    if _roots() is not None and _HUB not in _entries():
        raise ModelLoadError(
            f"{parameter}: {name!r} is no folder, and {VARIABLE} allows no hub ids; add {_HUB!r} to it, or download "
            "the model into one of its folders"
        )


def _entries() -> list[str]:
    return [entry for entry in os.environ.get(VARIABLE, "").split(os.pathsep) if entry]


def _roots() -> list[Path] | None:
    entries = _entries()
    return [Path(entry).expanduser().resolve() for entry in entries if entry != _HUB] if entries else None
