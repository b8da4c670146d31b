"""The streaming model: the engine behind Triton's queue."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from ..config import ModelConfig
from ..errors import ConfigurationError, DiffusionError, InvalidArgumentError
from ..request import DiffusionRequest
from . import signature
from .inputs import NAME_CODE, parse, read_parameters
from .logs import configure_logging
from .responses import ResponseStream, fail

log = logging.getLogger(__name__)


class StreamingModel:
    """A decoupled `TritonPythonModel` that serves one `diffusers` pipeline.

    Triton calls `initialize`, `execute` and `finalize` on one thread. `execute` submits each request to the engine and
    then waits until the engine has a free slot, so that whatever cannot run yet stays in Triton's own queue, where its
    size limit, priorities, timeouts and pending counts are right.
    """

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Fill in what config.pbtxt leaves out; called by Triton in a process of its own."""
        return signature.complete(auto_complete_model_config, decoupled=True)

    def initialize(self, args: dict[str, str]) -> None:
        """Load the pipeline onto the instance's device and start the engine."""
        configure_logging(pb_utils.Logger)
        try:
            self._load(args)
        except DiffusionError as error:
            # Triton shows what follows the exception's type: one readable line instead of a traceback.
            raise pb_utils.TritonModelException(error.message) from None

    def _load(self, args: dict[str, str]) -> None:
        model_config = json.loads(args["model_config"])
        parameters = model_config.get("parameters", {})
        config = ModelConfig.from_parameters({name: entry["string_value"] for name, entry in parameters.items()})

        # Late, so that neither completing the configuration nor refusing a wrong one waits for torch.
        from ..engine import DiffusionEngine, EngineConfig
        from ..pipelines.arguments import Limits
        from ..pipelines.loader import load
        from ..telemetry import Telemetry
        from .metrics import TritonSink

        on_gpu = args["model_instance_kind"] == "GPU"
        device = f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu"
        executor = load(config, device=device, base=Path(args["model_repository"]))
        self._config = config
        self._input_names = tuple(entry["name"] for entry in model_config["input"])
        self._output_names = frozenset(entry["name"] for entry in model_config["output"])
        self._limits = Limits(
            max_steps=config.max_steps,
            max_side=config.max_side,
            max_outputs=config.max_outputs,
            max_frames=config.max_frames,
            max_duration_s=config.max_duration_s,
            max_prompt_bytes=config.max_prompt_bytes,
        )
        self._ids = itertools.count()
        self._engine = DiffusionEngine(
            executor,
            EngineConfig(
                max_num_seqs=config.max_num_seqs,
                max_batch_rows=config.max_batch_rows,
                max_waiting=config.max_waiting,
            ),
            Telemetry(TritonSink(args["model_name"])),
        )
        self._check_defaults(config)
        self._engine.start()

    def _check_defaults(self, config: ModelConfig) -> None:
        """Refuse defaults that this pipeline, or the model's own limits, would refuse in every request.

        Raises:
            ConfigurationError: naming the parameter.
        """
        from ..pipelines.arguments import validate

        defaults: dict[str, Any] = dict(config.defaults)
        request = DiffusionRequest.make("", seed=0, **defaults)
        try:
            validate(request, self._engine.capabilities, self._limits, config.max_batch_rows)
        except InvalidArgumentError as error:
            if error.field in config.defaults:
                problem = error.message.removeprefix(f"{error.field}: ")
                raise ConfigurationError(f"default_{error.field}", problem) from None

    def execute(self, requests: list[Any]) -> None:
        """Submit the requests, then wait until one more could run."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._submit(request, sender)
            except Exception as error:
                # Everything is caught: what leaves `execute` is shown to clients with file paths in it.
                fail(sender, error, name_code=NAME_CODE in (request.parameters() or ""))
        self._engine.wait_for_slot()

    def finalize(self) -> None:
        """Stop the engine; Triton has waited for the running requests already."""
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.shutdown()

    def is_ready(self) -> bool:
        """Whether the engine takes requests; asked by Triton 26.03 and later."""
        return self._engine.is_ready

    def _submit(self, request: Any, sender: Any) -> None:
        from ..pipelines.arguments import validate

        # Triton's ids may be empty or repeated; ours are unique, and keep Triton's for the logs.
        request_id = f"{request.request_id() or 'request'}#{next(self._ids)}"
        # Copied: pictures are read by the pipeline, after Triton has taken the request's memory back.
        tensors = {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}
        try:
            parameters = read_parameters(request.parameters(), self._input_names)
            timeout_us = request.timeout() or parameters.timeout_us
            parsed = parse(
                request_id,
                tensors,
                defaults=self._config.defaults,
                timeout_s=timeout_us / 1e6 if timeout_us else None,
                max_outputs=self._config.max_outputs,
                max_side=self._config.max_side,
                arguments=self._engine.capabilities.arguments,
            )
            parsed.output_format.check(self._engine.capabilities.modalities)
            validate(parsed.request, self._engine.capabilities, self._limits, self._config.max_batch_rows)
        except DiffusionError:
            self._engine.reject()
            raise
        requested = frozenset(request.requested_output_names())  # Triton names all for a client that named none
        stream = ResponseStream(
            sender,
            output_format=parsed.output_format,
            progress=parsed.progress,
            requested=frozenset() if self._output_names <= requested else requested,
            abort=lambda: self._engine.abort(request_id),
            name_code=parameters.name_code,
        )
        self._engine.submit(parsed.request, on_event=stream.on_event, finalize=stream.finalize)
