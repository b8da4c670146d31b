"""The overlays as `kubectl kustomize` renders them, and ways to look at them."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu", "autoscaling")

OLDEST_KUSTOMIZE = (4, 0)
"""`kubectl` before 1.21 holds kustomize 2.0, which does not know `patches` with a target, nor `labels`."""

Manifest = dict[str, Any]


@functools.cache
def render(overlay: str) -> tuple[Manifest, ...]:
    """Return the objects of an overlay; skips where there is no kubectl that can render it."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed (Debian: apt-get install kubernetes-client)")
    version = subprocess.run(["kubectl", "version", "--client"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"Kustomize Version: v(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < OLDEST_KUSTOMIZE:
        pytest.skip(f"this kubectl is too old to render the overlays: {version.strip()}")
    command = ["kubectl", "kustomize", str(FOLDER / "overlays" / overlay)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not result.stderr, f"kustomize warns: {result.stderr}"
    return tuple(yaml.safe_load_all(result.stdout))


def one(overlay: str, kind: str, name: str = "diffusion") -> Manifest:
    """Return the one object of a kind and name."""
    (found,) = [item for item in render(overlay) if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    return found


def pod(overlay: str) -> Manifest:
    """Return the template of the pods."""
    template: Manifest = one(overlay, "Deployment")["spec"]["template"]
    return template


def container(overlay: str) -> Manifest:
    """Return the one container."""
    (found,) = pod(overlay)["spec"]["containers"]
    return found


def environment(overlay: str) -> dict[str, str]:
    """Return what the container is given."""
    return {entry["name"]: entry["value"] for entry in container(overlay)["env"]}


def argument(overlay: str, name: str) -> float:
    """Return a number among the launcher's arguments."""
    (found,) = [arg for arg in container(overlay)["args"] if arg.startswith(f"--{name}=")]
    return float(found.partition("=")[2])


_UNITS = {"": 1, "Mi": 2**20, "Gi": 2**30, "m": 1e-3}


def quantity(text: str) -> float:
    """Return a quantity of Kubernetes as a number."""
    match = re.fullmatch(r"([0-9.]+)(\w*)", text)
    assert match is not None, text
    return float(match[1]) * _UNITS[match[2]]
