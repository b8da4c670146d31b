"""The answers to one request of the streaming model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from ..media import OutputFormat
from ..request import DiffusionOutput, DiffusionResult, Event, EventKind
from .errors import to_triton
from .room import NoRoomError, is_tight, size_of

log = logging.getLogger(__name__)


class ResponseStream:
    """Sends events as responses; exactly one has the FINAL flag, whatever happens.

    The engine calls `on_event` and `finalize` from its delivery threads; `fail` is for the thread of `execute`, for a
    request that was never submitted.

    Args:
        sender: Triton's response sender of the request.
        requested: names of the outputs that the client asked for; empty for all.
        abort: gives the request up, when its client is found to be gone.
        name_code: whether the text of an error begins with its code's name.
    """

    def __init__(
        self,
        sender: Any,
        *,
        output_format: OutputFormat,
        progress: bool,
        requested: frozenset[str],
        abort: Callable[[], None],
        name_code: bool,
    ) -> None:
        self._sender = sender
        self._format = output_format
        self._progress = progress
        self._requested = requested
        self._abort = abort
        self._name_code = name_code

    def finalize(self, output: DiffusionOutput) -> list[bytes] | None:
        """Encode the output; the engine counts this as postprocessing."""
        return None if self._format.is_raw else self._format.encode(output)

    def on_event(self, event: Event) -> None:
        """Send what the client is to know of an event."""
        if event.kind is EventKind.FINISHED:
            assert event.result is not None
            self._finish(event, event.result)
        elif event.kind.is_final:
            assert event.error is not None
            fail(self._sender, event.error, name_code=self._name_code)
        elif event.kind is EventKind.STEP:
            # Triton tells of a cancelled request only when asked; once a step is what an abort can act on.
            if self._sender.is_cancelled():
                self._abort()
            elif self._progress:
                self._send(_event_tensors(event))
        elif event.kind is EventKind.PREVIEW:
            assert event.preview is not None
            self._send(_event_tensors(event) + self._preview_tensors(event.preview))

    def _finish(self, event: Event, result: DiffusionResult) -> None:
        try:
            tensors = self._final_tensors(event, result)
            size = sum(size_of(tensor.as_numpy()) for tensor in tensors)
            if is_tight(size):
                self._finish_with_care(tensors, size)
            else:
                self._send(tensors, final=True)
        except Exception as error:
            # The result could not be handed over: the client is told, not left waiting.
            fail(self._sender, error, name_code=self._name_code)

    def _finish_with_care(self, tensors: list[Any], size: int) -> None:
        """Send a result that may not fit into the shared memory, and the final flag by itself.

        Triton closes a sender when it is given the final response, even if that cannot be sent; then the client could
        not even be told.

        Raises:
            NoRoomError: it does not fit.
        """
        try:
            self._send(tensors)
        except Exception as error:
            raise NoRoomError(size) from error
        self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _final_tensors(self, event: Event, result: DiffusionResult) -> list[Any]:
        output = result.output
        tensors = _event_tensors(event)
        for name, value in (("images", output.images), ("video", output.video), ("audio", output.audio)):
            if value is not None and (self._format.is_raw or name in self._requested):
                tensors.append(pb_utils.Tensor(name, value))
        if output.frame_rate is not None:
            tensors.append(pb_utils.Tensor("frame_rate", np.array([output.frame_rate], dtype=np.float32)))
        if output.sample_rate is not None:
            tensors.append(pb_utils.Tensor("sample_rate", np.array([output.sample_rate], dtype=np.int32)))
        if result.payload is not None:
            tensors.append(_encoded(result.payload))
        tensors.append(pb_utils.Tensor("seeds", np.array(result.seeds, dtype=np.int64)))
        tensors.append(_text("metrics", json.dumps(result.record.as_dict())))
        return tensors

    def _preview_tensors(self, images: NDArray[np.uint8]) -> list[Any]:
        """Return a preview in the format asked for."""
        if self._format.is_raw:
            return [pb_utils.Tensor("images", images)]
        return [_encoded(self._format.encode_images(images))]

    def _send(self, tensors: list[Any], *, final: bool = False) -> None:
        response = pb_utils.InferenceResponse(output_tensors=tensors)
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)


def fail(sender: Any, error: Exception, *, name_code: bool = False) -> None:
    """Send an error as the final response."""
    response = pb_utils.InferenceResponse(output_tensors=[], error=to_triton(error, name_code=name_code))
    try:
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    except Exception:
        log.exception("an error could not be sent")


def _event_tensors(event: Event) -> list[Any]:
    tensors = [_text("event", event.kind.value)]
    if event.num_steps:
        tensors.append(pb_utils.Tensor("step", np.array([event.step], dtype=np.int32)))
        tensors.append(pb_utils.Tensor("num_steps", np.array([event.num_steps], dtype=np.int32)))
    return tensors


def _encoded(files: list[bytes]) -> Any:
    return pb_utils.Tensor("encoded", np.array(files, dtype=np.object_))


def _text(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_))
