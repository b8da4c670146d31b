"""The inputs and outputs of every model, and the completion of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_BATCH_SIZE = 16
"""Most prompts in one request."""

MAX_QUEUE_SIZE = 1024
"""Requests that wait in Triton's queue, for each priority level; a generous backstop."""

DEFAULT_TIMEOUT_MICROSECONDS = 3_600_000_000
"""How long a request may wait in Triton's queue. It must not be 0, or the timeouts of requests would not act."""

QUEUE_DELAY_MICROSECONDS = 1000
"""How long Triton waits for others that come with a request. While a model has limits, priorities or timeouts, its
batcher looks at the queue when a request comes, and else every half second: it does not learn that `execute` has
returned. One request at a time, the others of a burst would wait that long each."""

QUEUE = {
    "max_queue_delay_microseconds": QUEUE_DELAY_MICROSECONDS,
    "priority_levels": 3,
    "default_priority_level": 2,
    "default_queue_policy": {
        "timeout_action": "REJECT",
        "default_timeout_microseconds": DEFAULT_TIMEOUT_MICROSECONDS,
        "allow_timeout_override": True,
        "max_queue_size": MAX_QUEUE_SIZE,
    },
}
"""The queue in front of a streaming model; a `dynamic_batching` block in its config.pbtxt takes its place."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output; `dims` are without the batch dimension, -1 for any size."""

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True

    def as_config(self, *, is_input: bool) -> dict[str, Any]:
        """Return it as an entry of the model configuration."""
        entry: dict[str, Any] = {"name": self.name, "data_type": f"TYPE_{self.data_type}", "dims": list(self.dims)}
        if is_input and self.optional:
            entry["optional"] = True
        return entry


INPUTS = (
    TensorSpec("prompt", "STRING", optional=False),
    TensorSpec("negative_prompt", "STRING"),
    TensorSpec("num_inference_steps", "INT32"),
    TensorSpec("guidance_scale", "FP32"),
    TensorSpec("height", "INT32"),
    TensorSpec("width", "INT32"),
    TensorSpec("num_frames", "INT32"),
    TensorSpec("strength", "FP32"),
    TensorSpec("frame_rate", "FP32"),
    TensorSpec("duration_s", "FP32"),
    TensorSpec("image", "UINT8", (-1, -1, -1)),
    TensorSpec("image_file", "STRING"),
    TensorSpec("mask_image", "UINT8", (-1, -1, -1)),
    TensorSpec("mask_image_file", "STRING"),
    TensorSpec("control_image", "UINT8", (-1, -1, -1)),
    TensorSpec("control_image_file", "STRING"),
    TensorSpec("num_outputs_per_prompt", "INT32"),
    TensorSpec("seed", "INT64"),
    TensorSpec("timeout_s", "FP32"),
    TensorSpec("output_format", "STRING"),
    TensorSpec("lora", "STRING"),
    TensorSpec("extra_args", "STRING"),
)

STREAM_INPUTS = (
    TensorSpec("preview_interval", "INT32"),
    TensorSpec("progress", "BOOL"),
)
"""Inputs that only the streaming model has."""

OUTPUTS = (
    TensorSpec("images", "UINT8", (-1, -1, 3)),
    TensorSpec("video", "UINT8", (-1, -1, -1, 3)),
    TensorSpec("frame_rate", "FP32"),
    TensorSpec("audio", "FP32", (-1, -1)),
    TensorSpec("sample_rate", "INT32"),
    TensorSpec("encoded", "STRING"),
    TensorSpec("seeds", "INT64"),
    TensorSpec("metrics", "STRING"),
)

STREAM_OUTPUTS = (
    TensorSpec("event", "STRING"),
    TensorSpec("step", "INT32"),
    TensorSpec("num_steps", "INT32"),
)
"""Outputs that only the streaming model has."""


def complete(config: Any, *, decoupled: bool) -> Any:
    """Fill in what a model's config.pbtxt leaves out: inputs, outputs, policy and batching.

    Called by Triton in a process of its own before the model is loaded.

    Args:
        config: Triton's `ModelConfig` of the Python backend.
        decoupled: whether the model streams.

    Returns:
        The same object.
    """
    existing: dict[str, Any] = config.as_dict()
    have_inputs = {entry["name"] for entry in existing.get("input", [])}
    have_outputs = {entry["name"] for entry in existing.get("output", [])}
    for spec in INPUTS + (STREAM_INPUTS if decoupled else ()):
        if spec.name not in have_inputs:
            config.add_input(spec.as_config(is_input=True))
    for spec in OUTPUTS + (STREAM_OUTPUTS if decoupled else ()):
        if spec.name not in have_outputs:
            config.add_output(spec.as_config(is_input=False))
    if not existing.get("max_batch_size"):
        config.set_max_batch_size(MAX_BATCH_SIZE)
    config.set_model_transaction_policy({"decoupled": decoupled})
    if "dynamic_batching" not in existing:  # an empty block is a choice too
        config.set_dynamic_batching()
        if decoupled:  # the method makes an empty block, with which neither priorities nor time-outs act
            existing["dynamic_batching"].update(QUEUE)
    return config


def queue_hint(model_config: Mapping[str, Any]) -> str | None:
    """Say what of a streaming model's queue lets requests wait for nothing, or return None.

    Args:
        model_config: as Triton hands it to `initialize`.
    """
    batching = model_config.get("dynamic_batching", {})
    policy = batching.get("default_queue_policy", {})
    is_told = not (
        int(batching.get("priority_levels", 0))
        or int(policy.get("default_timeout_microseconds", 0))
        or int(policy.get("max_queue_size", 0))
        or policy.get("allow_timeout_override", False)
    )
    if is_told or (
        int(batching.get("max_queue_delay_microseconds", 0))
        and max(map(int, batching.get("preferred_batch_size", [])), default=MAX_BATCH_SIZE) > 1
    ):
        return None
    return (
        "dynamic_batching: with priorities, timeouts or a size limit Triton looks at the queue only when a request "
        "comes and every 0.5 s; so that requests that come together are handed over together, set "
        f"max_queue_delay_microseconds: {QUEUE_DELAY_MICROSECONDS} and no preferred_batch_size of 1"
    )
