"""What a run was measured on: enough to judge and to repeat it, and nothing that names the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("torch", "diffusers", "transformers", "numpy", "greenlet", "nvidia-pytriton", "tritonclient", "grpcio")
_LOAD_SECONDS = 2.0


def cores() -> int:
    """Return the physical cores that this process may use."""
    allowed = len(os.sched_getaffinity(0))
    return min(psutil.cpu_count(logical=False) or allowed, allowed)


def describe_machine() -> dict[str, Any]:
    """Return the processor, the memory and the versions."""
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "threads": len(os.sched_getaffinity(0)),
        "gpus": gpus(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def gpus() -> list[str]:
    """Return the names of the GPUs, by their driver's tool; none where that is missing."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return done.stdout.split("\n")[:-1]


def other_load() -> float:
    """Return how busy the processors are with other work, in percent of all of them, over two seconds."""
    return float(psutil.cpu_percent(interval=_LOAD_SECONDS))


def describe_commit() -> str:
    """Return the commit that was measured, with `-dirty` if the checkout differs from it; `unknown` outside of git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def thread_environment(threads: int, wait_policy: str) -> dict[str, str]:
    """Return the environment variables that set the threads of PyTorch, for every arm alike.

    Args:
        threads: of one forward.
        wait_policy: how they wait for each other: `PASSIVE` sleeps, `ACTIVE` spins.
    """
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": wait_policy}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
