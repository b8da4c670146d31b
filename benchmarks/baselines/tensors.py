"""The tensors of the baselines behind Triton: the same inputs as our own models have, and one output, `image`."""

from __future__ import annotations

from typing import Any

from benchmarks.workload import Job

INPUTS = {
    "prompt": "STRING",
    "num_inference_steps": "INT32",
    "guidance_scale": "FP32",
    "height": "INT32",
    "width": "INT32",
    "seed": "INT64",
}


def read(request: Any, pb_utils: Any) -> Job:
    """Return the job of a Triton request for one picture."""
    prompt, steps, guidance, height, _, seed = (
        pb_utils.get_input_tensor_by_name(request, name).as_numpy().item() for name in INPUTS
    )
    return Job(prompt.decode(), steps, guidance, seed, height)
