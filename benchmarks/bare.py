"""The bare pipeline's process (`baselines/bare.py`), seen from the run: asked for work, and asleep in between."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.workload import Job

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class BareRun:
    """Requests, run one after another.

    Attributes:
        seconds: of all of them together.
        latencies_s: of each.
        denoiser_s: of each, the part inside the denoiser.
        images: of each, uint8 (H, W, 3), if they were asked for.
    """

    seconds: float
    latencies_s: list[float]
    denoiser_s: list[float]
    images: list[NDArray[np.uint8]]


class BarePipeline:
    """The parent's end: starts the child, and asks it.

    Args:
        model: folder of the pipeline.
        env: environment of the child; its thread settings are the arm's.
    """

    def __init__(self, model: Path, env: Mapping[str, str]) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  # a pipe that nobody reads would fill up
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.baselines.bare", str(model.resolve())],
            cwd=ROOT,
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.kill()
        self._child.communicate()
        self._said.close()

    def wait_ready(self) -> dict[str, Any]:
        """Wait until the pipeline is loaded; return its thread settings, as PyTorch tells them."""
        return self._read()

    def run(self, jobs: Sequence[Job], *, images: bool = False) -> BareRun:
        """Run the jobs one after another."""
        answer = self._ask({"do": "run", "jobs": [job.as_dict() for job in jobs], "images": images})
        pictures = [
            np.frombuffer(base64.b64decode(data), dtype=np.uint8).reshape(shape) for data, shape in answer["images"]
        ]
        return BareRun(answer["seconds"], answer["latencies_s"], answer["denoiser_s"], pictures)

    def measure_forwards(self, rows: Sequence[int], repeats: int) -> dict[int, list[float]]:
        """Return the seconds of `repeats` forwards of the denoiser for each number of rows."""
        answer = self._ask({"do": "forwards", "rows": list(rows), "repeats": repeats})
        return {int(count): seconds for count, seconds in answer["forwards"].items()}

    @property
    def pid(self) -> int:
        """The child."""
        return self._child.pid

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(command) + "\n")
        self._child.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            self._child.wait()
            self._said.seek(0)
            raise RuntimeError(f"the process of the bare pipeline ended:\n{self._said.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer
