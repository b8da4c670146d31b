"""Clients of everything that is measured; each has one connection, and times the requests that it is given.

All instants are those of `time.monotonic()`, the clock that all processes of one machine share.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.workload import Job

_OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]  # or clients of one process would share a connection


@dataclass(slots=True)
class Answer:
    """What came back for one job.

    Attributes:
        picture: uint8 (H, W, 3); None if the job was cancelled.
        first_step: when the first step event came, if the client asked for events.
        step_times: when each step event came.
        times: the server's own `time_*_ms`, where it tells them.
        build_s, parse_s: the client's own work: making the request, and taking the answer apart.
    """

    picture: NDArray[np.uint8] | None = None
    step_times: list[float] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    build_s: float = 0.0
    parse_s: float = 0.0

    @property
    def first_step(self) -> float | None:
        """When the first step event came; None without events."""
        return self.step_times[0] if self.step_times else None


class Client(Protocol):
    """A connection to one server; used within one event loop."""

    async def open(self) -> None:
        """Connect, so that no request pays for it."""

    async def draw(self, job: Job, *, progress: bool = False, cancel_at: int | None = None) -> Answer:
        """Send a job and wait for its picture.

        Args:
            progress: whether to ask for an event at each step; servers without such events ignore it.
            cancel_at: the step after which the request is cancelled; servers without events ignore it.

        Raises:
            Exception: the request failed.
        """

    async def close(self) -> None:
        """Disconnect."""


def triton_inputs(job: Job) -> list[Any]:
    """Return the tensors of a job: one row each, with the names that our models and the baselines share."""
    import tritonclient.grpc.aio as triton

    values = {
        "prompt": ("BYTES", np.array([[job.prompt.encode()]], dtype=np.object_)),
        "num_inference_steps": ("INT32", np.array([[job.steps]], dtype=np.int32)),
        "guidance_scale": ("FP32", np.array([[job.guidance]], dtype=np.float32)),
        "height": ("INT32", np.array([[job.side]], dtype=np.int32)),
        "width": ("INT32", np.array([[job.side]], dtype=np.int32)),
        "seed": ("INT64", np.array([[job.seed]], dtype=np.int64)),
    }
    tensors = []
    for name, (datatype, value) in values.items():
        tensor = triton.InferInput(name, list(value.shape), datatype)
        tensor.set_data_from_numpy(value)
        tensors.append(tensor)
    return tensors


class StreamClient:
    """A client of our streaming model: one gRPC stream a request."""

    def __init__(self, url: str, model: str, output_format: str = "raw") -> None:
        import tritonclient.grpc.aio as triton

        self._triton = triton
        self._client = triton.InferenceServerClient(url, channel_args=_OWN_CONNECTION)
        self._model = model
        self._format = output_format

    async def open(self) -> None:
        """Connect, so that no request pays for it."""
        await self._client.is_model_ready(self._model)

    async def close(self) -> None:
        """Disconnect."""
        await self._client.close()

    async def draw(self, job: Job, *, progress: bool = False, cancel_at: int | None = None) -> Answer:
        """Send a job and take its events; see `Client`."""
        answer = Answer()
        responses = self._client.stream_infer(self._requests(job, answer, progress or cancel_at is not None))
        try:
            async for result, error in responses:
                came = time.monotonic()
                if error is not None:
                    raise error
                if (event := result.as_numpy("event")[0]) == b"step":
                    answer.step_times.append(came)
                    if cancel_at is not None and len(answer.step_times) >= cancel_at:
                        return answer
                elif event == b"finished":
                    answer.times = _times(result.as_numpy("metrics")[0])
                    raw = self._format == "raw"
                    answer.picture = result.as_numpy("images")[0] if raw else _decode(result.as_numpy("encoded")[0])
                    answer.parse_s = time.monotonic() - came
        finally:
            responses.cancel()  # of what has ended, this does nothing
        assert answer.picture is not None, "the stream ended without a picture"
        return answer

    async def _requests(self, job: Job, answer: Answer, progress: bool) -> AsyncIterator[dict[str, Any]]:
        begin = time.monotonic()
        inputs = triton_inputs(job)
        flag = self._triton.InferInput("progress", [1, 1], "BOOL")
        flag.set_data_from_numpy(np.array([[progress]]))
        form = self._triton.InferInput("output_format", [1, 1], "BYTES")
        form.set_data_from_numpy(np.array([[self._format.encode()]], dtype=np.object_))
        picture = "images" if self._format == "raw" else "encoded"
        outputs = [self._triton.InferRequestedOutput(name) for name in ("event", picture, "metrics")]
        answer.build_s = time.monotonic() - begin
        yield {"model_name": self._model, "inputs": [*inputs, flag, form], "outputs": outputs}


class UnaryClient:
    """A client of a baseline behind Triton: one `infer` call a request."""

    def __init__(self, url: str, model: str) -> None:
        import tritonclient.grpc.aio as triton

        self._client = triton.InferenceServerClient(url, channel_args=_OWN_CONNECTION)
        self._model = model

    async def open(self) -> None:
        """Connect, so that no request pays for it."""
        await self._client.is_model_ready(self._model)

    async def close(self) -> None:
        """Disconnect."""
        await self._client.close()

    async def draw(self, job: Job, *, progress: bool = False, cancel_at: int | None = None) -> Answer:  # noqa: ARG002
        """Send a job; see `Client`."""
        result = await self._client.infer(self._model, triton_inputs(job))
        return Answer(result.as_numpy("image")[0])


class HttpClient:
    """A client of a baseline behind HTTP: a JSON object in, a JSON object with the pixels in base64 out."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: Any = None

    async def open(self) -> None:
        """Connect, so that no request pays for it."""
        import aiohttp

        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )
        async with self._session.get(f"{self._url}/health") as response:
            response.raise_for_status()

    async def close(self) -> None:
        """Disconnect."""
        if self._session is not None:
            await self._session.close()

    async def draw(self, job: Job, *, progress: bool = False, cancel_at: int | None = None) -> Answer:  # noqa: ARG002
        """Send a job; see `Client`."""
        async with self._session.post(f"{self._url}/predict", json=job.as_dict()) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {await response.text()}")
            body = await response.json()
        return Answer(np.frombuffer(base64.b64decode(body["image"]), dtype=np.uint8).reshape(body["shape"]))


def _times(metrics: bytes) -> dict[str, float]:
    """Return the times of the server's record of a request."""
    return {name: value for name, value in json.loads(metrics).items() if name.startswith("time_")}


def _decode(data: bytes) -> NDArray[np.uint8]:
    import io

    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
