"""A small client of the models that are under test: build inputs, call in every way that Triton offers, collect events.

Everything goes through `tritonclient`, but for `/generate`, `/generate_stream` and `/metrics`, which it does not speak.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from diffusion_backend.serve import Access, TritonServer

DEADLINE_S = 120.0
"""For whatever must happen; generous, since other work may share the machine."""

DTYPES: dict[str, type] = {
    "prompt": np.object_,
    "negative_prompt": np.object_,
    "num_inference_steps": np.int32,
    "guidance_scale": np.float32,
    "height": np.int32,
    "width": np.int32,
    "num_frames": np.int32,
    "strength": np.float32,
    "frame_rate": np.float32,
    "duration_s": np.float32,
    "num_outputs_per_prompt": np.int32,
    "seed": np.int64,
    "output_format": np.object_,
    "extra_args": np.object_,
    "lora": np.object_,
    "preview_interval": np.int32,
    "progress": np.bool_,
}


def tensors(**values: Any) -> dict[str, NDArray[Any]]:
    """Return inputs of shape (B, 1) for B prompts, from scalars, or lists of one value a prompt.

    Arrays are taken as they are, so that a wrong type or shape can be sent; `extra_args` may be a dictionary.
    """
    rows = len(values["prompt"]) if isinstance(values.get("prompt"), list) else 1
    return {name: _tensor(name, value, rows) for name, value in values.items() if value is not None}


def _tensor(name: str, value: Any, rows: int) -> NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    if name == "extra_args" and isinstance(value, dict):
        value = json.dumps(value)
    column = value if isinstance(value, list) else [value] * rows
    encoded = [item.encode() if isinstance(item, str) else item for item in column]
    return np.array(encoded, dtype=DTYPES[name]).reshape(-1, 1)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names)), f"a key is there twice: {names}"
    return dict(pairs)


@dataclass(frozen=True)
class Answer:
    """One response.

    Attributes:
        outputs: the tensors in it, by name.
        request_id: as the server sent it back.
        final: whether it carried the final flag (of gRPC streams).
        at: when it came, by `time.monotonic()`.
    """

    outputs: Mapping[str, NDArray[Any]]
    request_id: str = ""
    final: bool = False
    at: float = field(default_factory=time.monotonic)

    @property
    def event(self) -> str:
        """The kind of event, "" where the response has none."""
        return self.outputs["event"][0].decode() if "event" in self.outputs else ""

    @property
    def step(self) -> int:
        return int(self.outputs["step"][0])

    @property
    def num_steps(self) -> int:
        return int(self.outputs["num_steps"][0])

    @property
    def images(self) -> NDArray[np.uint8]:
        return self.outputs["images"]

    @property
    def image(self) -> NDArray[np.uint8]:
        """The one picture of the answer."""
        (image,) = self.images
        return image

    @property
    def seeds(self) -> list[int]:
        return self.outputs["seeds"].tolist()

    @property
    def encoded(self) -> list[bytes]:
        return self.outputs["encoded"].tolist()

    @property
    def metrics(self) -> dict[str, Any]:
        """The record of the request; a key that is there twice fails."""
        (text,) = self.outputs["metrics"]
        return json.loads(text, object_pairs_hook=_unique)


class HttpError(Exception):
    """A status that is not 200."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body

    def message(self) -> str:
        return json.loads(self.body.removeprefix("data:"))["error"]


class StreamCall:
    """One request on a gRPC stream of its own; its answers are collected as they come.

    Args:
        url: the gRPC endpoint.
        outputs: names of the wanted outputs, all if empty.
        timeout_s: the request's time-out, in Triton's queue and after.
        name_code: whether the text of an error is to begin with its code's name. (The header `triton_grpc_error`, which
            ends a stream with the status, crashes the server of release 24.10 within a few hundred errors.)
        headers: further gRPC metadata.
    """

    def __init__(
        self,
        url: str,
        model: str,
        inputs: Mapping[str, NDArray[Any]],
        *,
        outputs: Sequence[str] = (),
        request_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        name_code: bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.answers: list[Answer] = []
        self.error: InferenceServerException | None = None
        self.sent_at = 0.0
        self.ended_at = 0.0
        self.num_finals = 0
        self._changed = threading.Condition()
        self._client = tritonclient.grpc.InferenceServerClient(url)
        self._client.start_stream(self._collect, headers=headers)
        self.sent_at = time.monotonic()
        self._client.async_stream_infer(
            model,
            grpc_inputs(inputs),
            outputs=[tritonclient.grpc.InferRequestedOutput(name) for name in outputs] or None,
            request_id=request_id,
            priority=priority,
            timeout=None if timeout_s is None else round(timeout_s * 1e6),
            enable_empty_final_response=True,
            parameters={"error_codes": True} if name_code else None,
        )

    def _collect(self, result: Any, error: InferenceServerException | None) -> None:
        answer = None if result is None else _grpc_answer(result)
        with self._changed:
            if answer is not None:
                if answer.outputs:
                    self.answers.append(answer)
                self.num_finals += answer.final
            elif self.error is None:
                self.error = _with_status(error)
            if self.done:
                self.ended_at = self.ended_at or time.monotonic()
            self._changed.notify_all()

    @property
    def done(self) -> bool:
        """Whether the final answer or an error has come."""
        return self.num_finals > 0 or self.error is not None

    @property
    def seconds(self) -> float:
        """From sending to the end."""
        return self.ended_at - self.sent_at

    def events(self, kind: str) -> list[Answer]:
        """Return the answers of one kind that have come so far."""
        with self._changed:
            return [answer for answer in self.answers if answer.event == kind]

    def wait_step(self, step: int = 1) -> Self:
        """Wait until so many steps are done."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: self.done or any(a.event == "step" and a.step >= step for a in self.answers), DEADLINE_S
            )
        assert came, f"step {step} did not come"
        assert self.error is None, self.error
        return self

    def wait(self, deadline_s: float = DEADLINE_S) -> Self:
        """Wait until it has ended, in whatever way."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.done, deadline_s), f"not ended within {deadline_s} s"
        return self

    def result(self, deadline_s: float = DEADLINE_S) -> Answer:
        """Wait for the final answer and return it; raise the error if it ended with one."""
        self.wait(deadline_s)
        self.close()
        if self.error is not None:
            raise self.error
        assert self.num_finals == 1, f"{self.num_finals} final flags"
        return self.answers[-1]

    def cancel(self) -> None:
        """Cancel the request; nothing is heard of it any more."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def close(self) -> None:
        """Wait until the server has nothing more to say, and close the stream."""
        self._client.stop_stream()
        self._client.close()


class Served:
    """A running server, and all the ways to talk to it.

    Args:
        http_url, grpc_url, metrics_url: `host:port` of each endpoint.
        access: the server's; `admin` is what a call of a restricted endpoint takes as `headers`.
    """

    def __init__(self, http_url: str, grpc_url: str, metrics_url: str, access: Access | None = None) -> None:
        self.http_url = http_url
        self.grpc_url = grpc_url
        self.metrics_url = metrics_url
        self.admin = {} if access is None else access.grpc_metadata
        self._http_headers = {"Connection": "close", **({} if access is None else access.http_headers)}
        self.grpc = tritonclient.grpc.InferenceServerClient(grpc_url)

    @classmethod
    def of(cls, server: TritonServer, access: Access | None = None) -> Self:
        """Return the client of a server of this process."""
        return cls(server.address_http, server.url_grpc, server.url_metrics.split("/")[2], access)

    def close(self) -> None:
        self.grpc.close()

    # -- calls --------------------------------------------------------------------------------------------------

    def infer(
        self,
        model: str = "emoji_unary",
        *,
        outputs: Sequence[str] = (),
        request_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        client_timeout_s: float | None = None,
        **values: Any,
    ) -> Answer:
        """Call a twin by gRPC; any thread may."""
        result = self.grpc.infer(
            model,
            grpc_inputs(tensors(**values)),
            outputs=[tritonclient.grpc.InferRequestedOutput(name) for name in outputs] or None,
            request_id=request_id,
            priority=priority,
            timeout=None if timeout_s is None else round(timeout_s * 1e6),
            client_timeout=client_timeout_s,
        )
        return _grpc_answer(result)

    def infer_http(
        self, model: str = "emoji_unary", *, outputs: Sequence[str] = (), binary: bool = True, **values: Any
    ) -> Answer:
        """Call a twin by HTTP, with a connection of its own.

        Args:
            binary: whether tensors travel as bytes instead of as JSON, both ways.
        """
        module = tritonclient.http
        with contextlib.closing(module.InferenceServerClient(self.http_url, network_timeout=DEADLINE_S)) as client:
            inputs = []
            for name, value in tensors(**values).items():
                tensor = module.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
                tensor.set_data_from_numpy(value, binary_data=binary)
                inputs.append(tensor)
            wanted = [module.InferRequestedOutput(name, binary_data=binary) for name in outputs] or None
            result = client.infer(model, inputs, outputs=wanted)
        names = [output["name"] for output in result.get_response()["outputs"]]
        return Answer({name: result.as_numpy(name) for name in names})

    def stream(self, model: str = "emoji", **options: Any) -> StreamCall:
        """Start a call of a streaming model; see `StreamCall` for the options, the other names are inputs."""
        names = ("outputs", "request_id", "priority", "timeout_s", "name_code", "headers")
        settings = {name: options.pop(name) for name in names if name in options}
        return StreamCall(self.grpc_url, model, tensors(**options), **settings)

    def generate(self, model: str = "emoji_unary", **body: Any) -> dict[str, Any]:
        """Call `/generate`.

        Raises:
            HttpError: the status is not 200.
        """
        return json.loads(self.request("POST", f"/v2/models/{model}/generate", body))

    def generate_stream(self, model: str = "emoji", **body: Any) -> Iterator[dict[str, Any]]:
        """Call `/generate_stream`; yield what each event holds, as they come.

        Raises:
            HttpError: the status is not 200.
        """
        with self.open("POST", f"/v2/models/{model}/generate_stream", body) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream"), response.headers
            for line in response:
                text = line.decode().strip()
                assert not text or text.startswith("data: "), f"no server-sent event: {text[:100]}"
                if text:
                    yield json.loads(text.removeprefix("data: "))

    @contextlib.contextmanager
    def open(self, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        """Send a request on a connection of its own; yield the response if its status is 200."""
        connection = http.client.HTTPConnection(self.http_url, timeout=DEADLINE_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), self._http_headers)
            with connection.getresponse() as response:
                if response.status != 200:
                    raise HttpError(response.status, response.read().decode())
                yield response
        finally:
            connection.close()

    def request(self, method: str, path: str, body: Any = None) -> bytes:
        """Return what the server answers."""
        with self.open(method, path, body) as response:
            return response.read()

    # -- metrics ------------------------------------------------------------------------------------------------

    def metrics(self) -> Metrics:
        """Scrape `/metrics`."""
        connection = http.client.HTTPConnection(self.metrics_url, timeout=DEADLINE_S)
        try:
            connection.request("GET", "/metrics", headers={"Connection": "close"})
            with connection.getresponse() as response:
                assert response.status == 200
                return Metrics.parse(response.read().decode())
        finally:
            connection.close()


class Metrics:
    """The samples of one scrape."""

    def __init__(self, values: dict[tuple[str, frozenset[tuple[str, str]]], float], kinds: dict[str, str]) -> None:
        self._values = values
        self.kinds = kinds

    @classmethod
    def parse(cls, text: str) -> Self:
        values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        kinds: dict[str, str] = {}
        for family in text_string_to_metric_families(text):
            kinds[family.name] = family.type
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in values, f"a sample is there twice: {key}"
                values[key] = sample.value
        return cls(values, kinds)

    def get(self, name: str, model: str = "emoji", **labels: str) -> float:
        """Return the sum of the samples of this name with at least these labels; 0 where there is none."""
        wanted = {"model": model, **labels}.items()
        return sum(value for (n, found), value in self._values.items() if n == name and wanted <= found)

    def labels(self, name: str, model: str = "emoji") -> list[dict[str, str]]:
        """Return the labels of each sample of this name and model, without the model's."""
        return [
            {key: value for key, value in found if key != "model"}
            for (n, found) in self._values
            if n == name and ("model", model) in found
        ]

    def __sub__(self, other: Metrics) -> Metrics:
        return Metrics({key: value - other._values.get(key, 0.0) for key, value in self._values.items()}, self.kinds)


def grpc_inputs(values: Mapping[str, NDArray[Any]]) -> list[tritonclient.grpc.InferInput]:
    """Return inputs for `tritonclient.grpc`."""
    inputs = []
    for name, value in values.items():
        tensor = tritonclient.grpc.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    return inputs


_STATUS = {"INVALID_ARG": "INVALID_ARGUMENT"}


def _with_status(error: InferenceServerException) -> InferenceServerException:
    """Return an error of a stream with the status that its text begins with, where it does."""
    match = re.match(r"\[([A-Z_]+)\] ", error.message())
    if match is None:
        return error
    return InferenceServerException(error.message()[match.end() :], f"StatusCode.{_STATUS.get(match[1], match[1])}")


def _grpc_answer(result: tritonclient.grpc.InferResult) -> Answer:
    response = result.get_response()
    outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
    final = response.parameters["triton_final_response"].bool_param if response.parameters else False
    return Answer(outputs, response.id, final)


def eventually(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Ask again and again until `condition()` is true, and return what it gave; fail at the deadline.

    For what the server tells only when asked, such as a metric.
    """
    pause = threading.Event()
    deadline = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {deadline_s:.0f} s: {what}"
        pause.wait(0.05)
    return value
