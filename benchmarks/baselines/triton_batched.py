"""A Triton Python model behind the dynamic batcher: Triton collects requests, the pipeline draws them group by group.

A call of the pipeline has one number of steps, one guidance scale and one size, and cannot be padded to the longest; so
the requests of a batch are grouped by them. The shortest group is drawn first and answered at once.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Calls the pipeline once for each group of requests of one shape."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the pipeline."""
        parameters = json.loads(args["model_config"])["parameters"]
        sys.path.insert(0, parameters["root"]["string_value"])
        from benchmarks.baselines import tensors
        from benchmarks.baselines.pipeline import draw, grouped, load

        self._read, self._draw, self._grouped = tensors.read, draw, grouped
        self._pipeline = load(parameters["model"]["string_value"])

    def execute(self, requests: list[Any]) -> None:
        """Draw the groups of a batch; answer each request as soon as its group is done."""
        jobs = [self._read(request, pb_utils) for request in requests]
        senders = [request.get_response_sender() for request in requests]
        for group in self._grouped(jobs):
            pictures = self._draw(self._pipeline, [jobs[index] for index in group])
            for index, picture in zip(group, pictures, strict=True):
                senders[index].send(pb_utils.InferenceResponse([pb_utils.Tensor("image", picture[None])]), flags=FINAL)
