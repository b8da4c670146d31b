"""A Triton Python model as its documentation's first example has it: `execute` answers request by request."""

from __future__ import annotations

import json
import sys
from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Calls the pipeline once for each request; Triton keeps the others in its queue."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the pipeline."""
        parameters = json.loads(args["model_config"])["parameters"]
        sys.path.insert(0, parameters["root"]["string_value"])
        from benchmarks.baselines import tensors
        from benchmarks.baselines.pipeline import draw, load

        self._read, self._draw = tensors.read, draw
        self._pipeline = load(parameters["model"]["string_value"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Draw one picture after another."""
        responses = []
        for request in requests:
            (picture,) = self._draw(self._pipeline, [self._read(request, pb_utils)])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("image", picture[None])]))
        return responses
