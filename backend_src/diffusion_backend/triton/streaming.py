"""The streaming model: the engine behind Triton's queue."""

from __future__ import annotations

import itertools
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from ..config import ModelConfig
from ..errors import ConfigurationError, DiffusionError, InvalidArgumentError
from ..request import DiffusionRequest, Event
from . import signature
from .inputs import asks_for_code, parameters_of, parse, read_parameters, read_timeout
from .logs import configure_logging, leave_out_error_texts, quiet_libraries
from .responses import ResponseStream, fail
from .stopping import on_stop
from .trace_context import carrier_of

if TYPE_CHECKING:
    from .accounts import Account

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
        from ..engine import DiffusionEngine, EngineConfig, Executor
        from ..pipelines.arguments import Limits
        from ..pipelines.loader import load
        from ..request_log import RequestLog
        from ..telemetry import Telemetry
        from ..tracing import Tracing
        from .accounts import Accounts
        from .hang import watch
        from .metrics import TritonSink

        on_gpu = args["model_instance_kind"] == "GPU"
        device = f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu"
        executor: Executor = load(config, device=device, base=Path(args["model_repository"]))
        quiet_libraries()
        if config.watchdog_timeout_s is not None:
            executor = watch(executor, config.watchdog_timeout_s, lambda: self._engine)
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
        self._accounts = Accounts(
            RequestLog(args["model_name"], texts=config.log_prompts) if config.log_requests else None,
            Tracing.from_environment(args["model_name"], os.environ),
            texts=config.log_prompts,
            fields=self._input_names,
        )
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
        hint = signature.queue_hint(model_config)
        if hint is not None:
            log.warning("%s", hint)
        if not config.log_prompts:
            leave_out_error_texts()  # until now they could quote the prompts of the probe only
        self._engine.start()
        on_stop(self._engine.turn_away)

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
            # Triton's ids may be empty or repeated; ours are unique, and keep Triton's for the logs.
            request_id = f"{request.request_id() or 'request'}#{next(self._ids)}"
            account = self._accounts.open(request_id, carrier_of(request))
            try:
                self._submit(request, request_id, sender, account)
            except Exception as error:
                # Everything is caught: what leaves `execute` is shown to clients with file paths in it.
                fail(sender, error, name_code=asks_for_code(request))
                account.refused(error)
        self._engine.wait_for_slot()

    def finalize(self) -> None:
        """Stop the engine; Triton has waited for the running requests already."""
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.shutdown()
            self._accounts.close()

    def is_ready(self) -> bool:
        """Whether the engine takes requests; asked by Triton 26.03 and later."""
        return self._engine.is_ready

    def _submit(self, request: Any, request_id: str, sender: Any, account: Account) -> None:
        from ..pipelines.arguments import validate

        # Copied: pictures are read by the pipeline, after Triton has taken the request's memory back.
        tensors = {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}
        try:
            parameters = read_parameters(parameters_of(request), self._input_names)
            parsed = parse(
                request_id,
                tensors,
                defaults=self._config.defaults,
                timeout_s=read_timeout(request.timeout(), parameters.timeout_us, tensors),
                max_outputs=self._config.max_outputs,
                max_side=self._config.max_side,
                max_picture_bytes=self._config.max_picture_bytes,
                max_extra_args_bytes=self._config.max_extra_args_bytes,
                arguments=self._engine.capabilities.arguments,
            )
            account.request = parsed.request
            parsed.output_format.check(self._engine.capabilities.modalities)
            validate(parsed.request, self._engine.capabilities, self._limits, self._config.max_batch_rows)
        except DiffusionError as error:
            self._engine.reject(error)
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

        def on_event(event: Event) -> None:
            try:
                stream.on_event(event)
            finally:
                if event.kind.is_final:
                    account.ended(event)

        self._engine.submit(parsed.request, on_event=on_event, finalize=stream.finalize, on_work=account.on_work)
