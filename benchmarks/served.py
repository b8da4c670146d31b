"""The real server as an arm, and the load on it: closed loops of gRPC streams, without progress events.

A load generator is a coroutine that takes the server's gRPC address, the model and the jobs, and returns a `LoadRun`;
an open loop (arrivals at given times) would stand beside `closed_loop`.
"""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.workload import Job
from diffusion_backend.serve import TritonServer

READY_S = 900.0


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What a load generator saw.

    Attributes:
        seconds: from the first request sent to the last answer.
        latencies_s: of each job, from its sending to its whole answer.
        images: of each job, uint8 (H, W, 3).
    """

    seconds: float
    latencies_s: list[float]
    images: list[NDArray[np.uint8]]


@contextmanager
def serving(repository: Path, env: Mapping[str, str]) -> Iterator[TritonServer]:
    """Start the server on free ports of this machine; at the end, stop it.

    Args:
        repository: folder of models.
        env: environment of the server; its thread settings are the arm's.
    """
    with TritonServer(repository, env=env) as server:
        yield server


async def closed_loop(url: str, model: str, jobs: Sequence[Job], concurrency: int) -> LoadRun:
    """Send the jobs in their order, `concurrency` of them in flight: each answer is followed by the next request.

    Every one of the concurrent clients has a connection and a stream of its own, opened before the clock starts.

    Raises:
        InferenceServerException: a request was refused or failed; then the figures would mean nothing.
    """
    latencies: list[float] = [0.0] * len(jobs)
    images: list[Any] = [None] * len(jobs)
    upcoming = iter(range(len(jobs)))

    async def client(stream: _Stream) -> None:
        for index in upcoming:  # shared: the next free client takes the next job
            begin = time.perf_counter()
            images[index] = await stream.draw(jobs[index])
            latencies[index] = time.perf_counter() - begin

    streams = [_Stream(url, model) for _ in range(min(concurrency, len(jobs)))]
    try:
        await asyncio.gather(*(stream.open() for stream in streams))
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(client(stream))
        seconds = time.perf_counter() - begin
    finally:
        await asyncio.gather(*(stream.close() for stream in streams))
    return LoadRun(seconds, latencies, images)


def read_rows(url_metrics: str, model: str) -> tuple[float, float]:
    """Return the forwards that the model's engine has run since it was loaded, and the rows in them."""
    totals = {"diffusion_batch_rows_count": 0.0, "diffusion_batch_rows_sum": 0.0}
    with urllib.request.urlopen(url_metrics, timeout=30) as page:
        for line in page.read().decode().splitlines():
            name, _, labels = line.partition("{")
            if name in totals and f'model="{model}"' in labels:
                totals[name] += float(line.split()[-1])
    return totals["diffusion_batch_rows_count"], totals["diffusion_batch_rows_sum"]


class _Stream:
    """One client with one connection and one gRPC stream, which takes one request after another."""

    def __init__(self, url: str, model: str) -> None:
        import tritonclient.grpc.aio as triton

        self._triton = triton
        # The channel's own argument keeps clients from sharing one connection.
        self._client = triton.InferenceServerClient(url, channel_args=[("grpc.use_local_subchannel_pool", 1)])
        self._model = model
        self._requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._responses: Any = None

    async def open(self) -> None:
        """Connect."""
        await self._client.is_model_ready(self._model)
        self._responses = self._client.stream_infer(self._send())

    async def close(self) -> None:
        """End the stream and close the connection."""
        if self._responses is not None:
            self._responses.cancel()
        await self._client.close()

    async def draw(self, job: Job) -> NDArray[np.uint8]:
        """Send a job and return its picture."""
        self._requests.put_nowait(
            {
                "model_name": self._model,
                "inputs": [
                    self._input("prompt", "BYTES", np.array([[job.prompt.encode()]], dtype=np.object_)),
                    self._input("num_inference_steps", "INT32", np.array([[job.steps]], dtype=np.int32)),
                    self._input("guidance_scale", "FP32", np.array([[job.guidance]], dtype=np.float32)),
                    self._input("seed", "INT64", np.array([[job.seed]], dtype=np.int64)),
                    self._input("progress", "BOOL", np.array([[False]])),
                ],
                "outputs": [self._triton.InferRequestedOutput(name) for name in ("event", "images")],
            }
        )
        result, error = await anext(self._responses)
        if error is not None:
            raise error
        event = result.as_numpy("event")[0]
        assert event == b"finished", event
        picture: NDArray[np.uint8] = result.as_numpy("images")[0]
        return picture

    def _input(self, name: str, datatype: str, value: NDArray[Any]) -> Any:
        tensor = self._triton.InferInput(name, list(value.shape), datatype)
        tensor.set_data_from_numpy(value)
        return tensor

    async def _send(self) -> AsyncIterator[dict[str, Any]]:
        while (request := await self._requests.get()) is not None:
            yield request
