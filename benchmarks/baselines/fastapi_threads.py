"""FastAPI with a thread pool, after the guide "Create a server" of `diffusers`: a pipeline and scheduler a request.

`python -m benchmarks.baselines.fastapi_threads MODEL PORT`. The weights are shared. Beyond the guide, each request has
a tokenizer of its own, as tokenizers are not safe to share between threads.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI
from numpy.typing import NDArray

from benchmarks.baselines.pipeline import draw, load
from benchmarks.workload import Job

NUM_THREADS = 2
"""Calls at once: each of them has PyTorch's own threads, which fill the processors already."""


def make_app(model: str) -> FastAPI:
    """Return the application; the pipeline is loaded here."""
    shared = load(model)
    pool = ThreadPoolExecutor(NUM_THREADS)
    app = FastAPI()

    def draw_one(job: Job) -> NDArray[np.uint8]:
        own = type(shared)(
            **shared.components
            | {
                "scheduler": shared.scheduler.from_config(shared.scheduler.config),
                "tokenizer": copy.deepcopy(shared.tokenizer),
            },
        )
        own.set_progress_bar_config(disable=True)
        (picture,) = draw(own, [job])
        return picture

    @app.post("/predict")
    async def predict(job: dict[str, Any]) -> dict[str, Any]:
        picture = await asyncio.get_running_loop().run_in_executor(pool, draw_one, Job(**job))
        return {"shape": picture.shape, "image": base64.b64encode(picture.tobytes()).decode()}

    @app.get("/health")
    async def health() -> str:
        return "ok"

    return app


if __name__ == "__main__":
    uvicorn.run(make_app(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
