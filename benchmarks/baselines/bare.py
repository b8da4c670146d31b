"""The bare `diffusers` pipeline in a loop: the first baseline, and the parts that the limit is made of.

`python -m benchmarks.baselines.bare MODEL` answers one JSON line with one JSON line; between commands it sleeps, so
that it takes nothing from the other arms. It knows neither the engine nor Triton.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.baselines.pipeline import DEVICE, draw, load, synchronize
from benchmarks.workload import Job

_WARM_FORWARDS = 3


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
        synchronize()
        self.seconds += time.perf_counter() - begin
        return output


def _run(pipeline: Any, timer: _Timer, jobs: Sequence[Job], *, images: bool) -> dict[str, Any]:
    latencies, denoiser, pictures = [], [], []
    begin = time.perf_counter()
    for job in jobs:
        timer.seconds = 0.0
        started = time.perf_counter()
        (picture,) = draw(pipeline, [job])
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
            synchronize()
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
    pipeline = load(model)
    timer = _Timer(pipeline.unet)
    with _clean_stdout() as stdout, torch.inference_mode():
        draw(pipeline, [Job("", 2, 3.0, 0)])
        settings = {"torch_num_threads": torch.get_num_threads(), "dtype": str(pipeline.unet.dtype), "device": DEVICE}
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
