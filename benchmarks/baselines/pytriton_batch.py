"""PyTriton with `@batch`, grouped by what the pipeline takes once a call: `python -m ... MODEL GRPC_PORT`."""

from __future__ import annotations

import sys

import numpy as np
import pytriton.triton
from numpy.typing import NDArray
from pytriton.decorators import batch, group_by_values
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from benchmarks.baselines.pipeline import MAX_BATCH, draw, load
from benchmarks.workload import Job

QUEUE_DELAY_US = 5_000
STARTUP_S = 300
_INPUTS = (
    Tensor(name="prompt", dtype=np.bytes_, shape=(1,)),
    Tensor(name="num_inference_steps", dtype=np.int32, shape=(1,)),
    Tensor(name="guidance_scale", dtype=np.float32, shape=(1,)),
    Tensor(name="height", dtype=np.int32, shape=(1,)),
    Tensor(name="width", dtype=np.int32, shape=(1,)),
    Tensor(name="seed", dtype=np.int64, shape=(1,)),
)


def main(model: str, grpc_port: int, http_port: int, metrics_port: int) -> None:
    """Serve until the process is ended."""
    pipeline = load(model)

    @batch
    @group_by_values("num_inference_steps", "guidance_scale", "height", "width")
    def infer(**inputs: NDArray) -> dict[str, NDArray]:
        rows = zip(*(inputs[tensor.name][:, 0].tolist() for tensor in _INPUTS), strict=True)
        jobs = [Job(prompt.decode(), steps, scale, seed, height) for prompt, steps, scale, height, _, seed in rows]
        return {"image": np.stack(draw(pipeline, jobs))}

    config = TritonConfig(
        grpc_port=grpc_port,
        grpc_address="127.0.0.1",
        http_port=http_port,
        http_address="127.0.0.1",
        metrics_port=metrics_port,
        metrics_address="127.0.0.1",
    )
    pytriton.triton.DEFAULT_TRITON_STARTUP_TIMEOUT_S = (
        STARTUP_S  # two minutes are too few where all servers start at once
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name="pytriton_batch",
            infer_func=infer,
            inputs=_INPUTS,
            outputs=[Tensor(name="image", dtype=np.uint8, shape=(-1, -1, 3))],
            config=ModelConfig(
                max_batch_size=MAX_BATCH, batcher=DynamicBatcher(max_queue_delay_microseconds=QUEUE_DELAY_US)
            ),
        )
        triton.serve()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
