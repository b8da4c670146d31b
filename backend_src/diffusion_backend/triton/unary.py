"""The unary twin: one request, one response, for clients that cannot stream (HTTP infer, `/generate`).

Triton refuses such calls to a decoupled model, so this ordinary model passes each request on to the streaming one over
gRPC on loopback, many at a time, from one asyncio thread. It holds nothing itself: queue, limits and metrics are the
streaming model's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from ..config import UnaryConfig
from ..errors import DiffusionError
from . import signature
from .errors import code_of, split_code
from .inputs import NAME_CODE, parameters_of, read_parameters, read_timeout
from .logs import configure_logging, leave_out_error_texts
from .responses import fail
from .room import NoRoomError, is_tight, size_of
from .trace_context import carrier_of

log = logging.getLogger(__name__)

CANCEL_CHECK_S = 0.2
"""How often Triton is asked which calls in flight were cancelled; it has no way to tell by itself."""

_MAX_MESSAGE_BYTES = 2**31 - 1

_CODES = {
    "StatusCode.INVALID_ARGUMENT": "INVALID_ARG",
    "StatusCode.UNAVAILABLE": "UNAVAILABLE",
    "StatusCode.CANCELLED": "CANCELLED",
    "StatusCode.NOT_FOUND": "NOT_FOUND",
    "StatusCode.UNIMPLEMENTED": "UNSUPPORTED",
}
"""Of what gRPC itself says, such as that nobody listens."""


class UnaryModel:
    """A default-mode `TritonPythonModel` that passes requests on to the streaming model of the same server."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Fill in what config.pbtxt leaves out; called by Triton in a process of its own."""
        return signature.complete(auto_complete_model_config, decoupled=False)

    def initialize(self, args: dict[str, str]) -> None:
        """Start the thread that holds the connection."""
        from .metrics import mark_twin  # not there yet while Triton completes the configuration

        configure_logging(pb_utils.Logger)
        model_config = json.loads(args["model_config"])
        self._input_names = tuple(entry["name"] for entry in model_config["input"])
        self._output_names = {entry["name"] for entry in model_config["output"]}
        parameters = model_config.get("parameters", {})
        try:
            config = UnaryConfig.from_parameters({name: entry["string_value"] for name, entry in parameters.items()})
        except DiffusionError as error:
            raise pb_utils.TritonModelException(error.message) from None
        self._stream_model = config.stream_model or args["model_name"].removesuffix("_unary")
        if self._stream_model == args["model_name"]:
            raise pb_utils.TritonModelException(
                "parameter 'stream_model' is missing: name the streaming model, or call this one NAME_unary"
            )
        endpoint = config.grpc_endpoint or os.environ.get("DIFFUSION_GRPC_ENDPOINT") or "127.0.0.1:8001"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="diffusion-unary", daemon=True)
        self._thread.start()
        self._forwarder = asyncio.run_coroutine_threadsafe(
            _Forwarder.make(endpoint, self._stream_model), self._loop
        ).result()
        leave_out_error_texts()
        self._mark = mark_twin(args["model_name"], self._stream_model)

    def execute(self, requests: list[Any]) -> None:
        """Hand the requests to the asyncio thread; the answers are sent from there."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                parameters = read_parameters(parameters_of(request), self._input_names)
                # Copied: they are read after Triton has taken the request's memory back.
                tensors = {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}
                wanted = list(request.requested_output_names())
                if self._output_names <= set(wanted):
                    wanted = []  # Triton names all for a client that named none
                # Given to Triton, so that the input acts in its queue, too.
                timeout_s = read_timeout(request.timeout(), parameters.timeout_us, tensors)
                timeout_us = 0 if timeout_s is None else max(1, round(timeout_s * 1e6))
                call = _Call(request.request_id(), tensors, wanted, timeout_us, carrier_of(request))
                work = self._forwarder.forward(sender, call)
                asyncio.run_coroutine_threadsafe(work, self._loop)
            except Exception as error:
                fail(sender, error)

    def finalize(self) -> None:
        """Close the connection and end the thread."""
        if hasattr(self, "_forwarder"):
            asyncio.run_coroutine_threadsafe(self._forwarder.close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


@dataclass(frozen=True, slots=True)
class _Call:
    """What is passed on of one request: see `DiffusionRequest` and `carrier_of`."""

    request_id: str
    tensors: dict[str, NDArray[Any]]
    wanted: list[str]
    timeout_us: int
    trace_context: dict[str, str]


class _Forwarder:
    """Passes calls on; lives on the asyncio thread."""

    def __init__(self, client: Any, model: str) -> None:
        self._client = client
        self._model = model
        self._in_flight: dict[asyncio.Task[None], Any] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._largest = 0  # bytes of the largest answer so far

    @classmethod
    async def make(cls, endpoint: str, model: str) -> _Forwarder:
        """Open the connection; made on the loop that it is used on."""
        import tritonclient.grpc.aio as grpc

        options: list[tuple[str, Any]] = [
            ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ]
        credentials = _credentials()
        if credentials is not None:
            options.append(("grpc.ssl_target_name_override", os.environ["DIFFUSION_GRPC_TLS_NAME"]))
        return cls(grpc.InferenceServerClient(endpoint, creds=credentials, channel_args=options), model)

    async def close(self) -> None:
        """Give up what is in flight and close the connection."""
        tasks = [*self._in_flight, *self._sending]
        for task in list(self._in_flight):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def forward(self, sender: Any, call: _Call) -> None:
        """Pass one call on and send its one response."""
        task = asyncio.current_task()
        assert task is not None
        self._in_flight[task] = sender
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        try:
            outputs = await self._call(call)
            self._check_room(outputs)
            response = pb_utils.InferenceResponse(output_tensors=outputs)
        except asyncio.CancelledError:
            response = _error_response("CANCELLED", "the request was cancelled")
        except Exception as error:
            response = _error_response(*_explain(error))
        # From here on nobody may ask whether the call was cancelled: with the final response Triton frees what the
        # question is about. And nothing may come between: exactly one final response is sent.
        del self._in_flight[task]
        self._sending.add(task)
        try:
            await asyncio.shield(asyncio.to_thread(_send, sender, response))
        finally:
            self._sending.discard(task)

    def _check_room(self, outputs: list[Any]) -> None:
        """Refuse to send what the shared memory may have no room for: after a send that failed, none can be answered.

        What was sent before has its room already: the memory of this process only grows.

        Raises:
            NoRoomError: this is larger than all before, and than what is free.
        """
        size = sum(size_of(tensor.as_numpy()) for tensor in outputs)
        if size > self._largest and is_tight(size):
            raise NoRoomError(size)
        self._largest = max(self._largest, size)

    async def _call(self, call: _Call) -> list[Any]:
        import tritonclient.grpc.aio as grpc
        from tritonclient.utils import np_to_triton_dtype

        rows = next((len(value) for value in call.tensors.values()), 1)
        inputs = []
        for name, value in {**call.tensors, "progress": np.zeros((rows, 1), dtype=bool)}.items():
            tensor = grpc.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
            tensor.set_data_from_numpy(value)
            inputs.append(tensor)
        message = {
            "model_name": self._model,
            "inputs": inputs,
            "outputs": [grpc.InferRequestedOutput(name) for name in call.wanted] or None,
            "request_id": call.request_id,
            "timeout": call.timeout_us or None,
            "parameters": {NAME_CODE: True, **call.trace_context},
        }

        async def one() -> Any:
            yield message

        # Headers are what Triton itself reads, where it traces.
        stream = self._client.stream_infer(one(), headers=call.trace_context)
        outputs: list[Any] = []
        refused: Exception | None = None
        try:
            # To the end of the stream: the server leaks a request that it refused (queue full, say) on a stream that
            # is then cancelled, and does not exit any more.
            async for result, error in stream:
                if error is not None:
                    refused = error
                    continue
                outputs = [
                    pb_utils.Tensor(output.name, result.as_numpy(output.name))
                    for output in result.get_response().outputs
                    if output.name in _UNARY_OUTPUTS
                ]
        finally:
            stream.cancel()  # no effect on one that has ended
        if refused is not None:
            raise refused
        return outputs

    async def _watch(self) -> None:
        """Ask which calls were cancelled while there are any in flight."""
        try:
            while self._in_flight:
                await asyncio.sleep(CANCEL_CHECK_S)
                for task, sender in list(self._in_flight.items()):
                    if _is_cancelled(sender):
                        task.cancel()
        finally:
            self._watching = None


def _is_cancelled(sender: Any) -> bool:
    try:
        return bool(sender.is_cancelled())
    except Exception as error:  # the other calls are watched all the same
        log.debug("it cannot be told whether a call was cancelled: %r", error)
        return False


def _credentials() -> Any:
    """Return what a call to a server with TLS needs; None where the environment names no certificate.

    The launcher sets the environment: `DIFFUSION_GRPC_TLS_CERT` (PEM file of the server's certificate, the one that is
    trusted), `DIFFUSION_GRPC_TLS_NAME` (a name in it) and, where the server wants one of its clients, too,
    `DIFFUSION_GRPC_TLS_KEY` (PEM file of its key: the twin shows the server's own certificate).
    """
    import grpc

    cert = os.environ.get("DIFFUSION_GRPC_TLS_CERT")
    if cert is None:
        return None
    chain = Path(cert).read_bytes()
    key = os.environ.get("DIFFUSION_GRPC_TLS_KEY")
    if key is None:
        return grpc.ssl_channel_credentials(chain)
    return grpc.ssl_channel_credentials(chain, Path(key).read_bytes(), chain)


_UNARY_OUTPUTS = frozenset(spec.name for spec in signature.OUTPUTS)


def _explain(error: Exception) -> tuple[str, str]:
    """Return the code and the text of an error that the streaming model answered with."""
    if isinstance(error, NoRoomError):
        return code_of(error), error.message
    message = getattr(error, "message", None)
    if callable(message):  # the client's: a text that came on the stream
        return split_code(str(message()))
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    if callable(code) and callable(details):  # gRPC's: the stream broke
        return _CODES.get(str(code()), "INTERNAL"), str(details())
    log.error("a call could not be passed on", exc_info=error)
    return "INTERNAL", f"internal error ({type(error).__name__}); the server's log has the details"


def _error_response(code: str, message: str) -> Any:
    error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
    return pb_utils.InferenceResponse(output_tensors=[], error=error)


def _send(sender: Any, response: Any) -> None:
    """Send a final response; one that cannot be sent is replaced by an error."""
    try:
        sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    except Exception as error:
        fail(sender, error)
