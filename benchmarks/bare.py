"""The bare `diffusers` pipeline, in a process of its own: the baseline, and the parts that the limit is made of.

The child (`python -m benchmarks.bare`) answers one JSON line with one JSON line; between commands it sleeps, so that it
takes nothing from the other arms. It imports nothing of the engine or of Triton.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.workload import Job

ROOT = Path(__file__).resolve().parents[1]
_WARM_FORWARDS = 3


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
            [sys.executable, "-m", "benchmarks.bare", str(model.resolve())],
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


# ---- the child ----


class _Timer:
    """Stands in for the denoiser's `forward`; adds up its time and keeps the arguments of its last call."""

    def __init__(self, denoiser: Any) -> None:
        self.original = denoiser.forward
        self.seconds = 0.0
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        denoiser.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.call = (args, kwargs)
        begin = time.perf_counter()
        output = self.original(*args, **kwargs)
        self.seconds += time.perf_counter() - begin
        return output


def _draw(pipeline: Any, job: Job) -> NDArray[np.uint8]:
    """Draw one job as a user of the pipeline does, to a picture on the host: uint8 (H, W, 3)."""
    import torch

    images = pipeline(
        job.prompt,
        num_inference_steps=job.steps,
        guidance_scale=job.guidance,
        generator=torch.Generator("cpu").manual_seed(job.seed),
        output_type="pt",
    ).images
    picture: NDArray[np.uint8] = (images[0] * 255).round().to(torch.uint8).movedim(0, -1).contiguous().numpy()
    return picture


def _run(pipeline: Any, timer: _Timer, jobs: Sequence[Job], *, images: bool) -> dict[str, Any]:
    latencies, denoiser, pictures = [], [], []
    begin = time.perf_counter()
    for job in jobs:
        timer.seconds = 0.0
        started = time.perf_counter()
        picture = _draw(pipeline, job)
        latencies.append(time.perf_counter() - started)
        denoiser.append(timer.seconds)
        pictures.append(picture)
    seconds = time.perf_counter() - begin
    encoded = [(base64.b64encode(p.tobytes()).decode(), p.shape) for p in pictures] if images else []
    return {"seconds": seconds, "latencies_s": latencies, "denoiser_s": denoiser, "images": encoded}


def _forwards(timer: _Timer, rows: Sequence[int], repeats: int) -> dict[str, Any]:
    """Time forwards with the arguments of the last real call, its rows repeated, and a timestep for each row.

    The row counts take turns, so that a disturbance from outside hits all of them.
    """
    import torch

    args, kwargs = timer.call
    own = args[0].shape[0]

    def widen(value: Any, count: int) -> Any:
        if isinstance(value, torch.Tensor):
            if value.ndim == 0:
                return value.expand(count).clone()
            if value.shape[0] == own:
                return value.repeat(-(-count // own), *[1] * (value.ndim - 1))[:count].clone()
        return value

    calls = {
        count: ([widen(value, count) for value in args], {name: widen(value, count) for name, value in kwargs.items()})
        for count in rows
    }
    seconds: dict[int, list[float]] = {count: [] for count in rows}
    for turn in range(_WARM_FORWARDS + repeats):
        for count, (wide_args, wide_kwargs) in calls.items():
            begin = time.perf_counter()
            timer.original(*wide_args, **wide_kwargs)
            if turn >= _WARM_FORWARDS:
                seconds[count].append(time.perf_counter() - begin)
    return {"forwards": seconds}


@contextmanager
def _clean_stdout() -> Iterator[Any]:
    """Yield the real standard output, and send whatever libraries print to the standard error."""
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)
        yield stdout


def _serve(model: str) -> None:
    """Load the pipeline and answer commands until the input ends."""
    import torch
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(model).to(torch.float32)  # as it is served
    pipeline.set_progress_bar_config(disable=True)
    timer = _Timer(pipeline.unet)
    with _clean_stdout() as stdout, torch.inference_mode():
        _draw(pipeline, Job("", 2, 3.0, 0))
        settings = {"torch_num_threads": torch.get_num_threads(), "dtype": str(pipeline.unet.dtype)}
        print(json.dumps(settings), file=stdout, flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "run":
                jobs = [Job(**job) for job in command["jobs"]]
                answer = _run(pipeline, timer, jobs, images=command["images"])
            else:
                answer = _forwards(timer, command["rows"], command["repeats"])
            print(json.dumps(answer), file=stdout, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
