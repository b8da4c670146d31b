"""Checkpoints that survive a stop at any moment, and the record of the training."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write the whole file beside the old one, then put it in its place in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """Read a checkpoint onto the CPU; None when there is none yet."""
    if not path.is_file():
        return None
    return torch.load(path, map_location="cpu", weights_only=True)


def save_json(path: Path, value: Any) -> None:
    """Write a small JSON file in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def load_json(path: Path) -> Any:
    """Read a JSON file; None when there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
