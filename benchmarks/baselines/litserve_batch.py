"""LitServe with batching: `python -m benchmarks.baselines.litserve_batch MODEL PORT`."""

from __future__ import annotations

import base64
import sys
from typing import Any

import litserve
import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines.pipeline import MAX_BATCH, draw, grouped, load
from benchmarks.workload import Job

BATCH_TIMEOUT_S = 0.005


class DrawAPI(litserve.LitAPI):
    """Draws the requests of a batch, one call of the pipeline for each group of one shape."""

    def __init__(self, model: str) -> None:
        super().__init__(max_batch_size=MAX_BATCH, batch_timeout=BATCH_TIMEOUT_S)
        self._model = model

    def setup(self, device: str) -> None:  # noqa: ARG002  # the pipeline chooses it, as in all baselines
        """Load the pipeline in the worker's process."""
        self._pipeline = load(self._model)

    def decode_request(self, request) -> Job:  # without a type: LitServe would take it for a query's
        """Read a job from the JSON body."""
        return Job(**request)

    def batch(self, inputs: list[Job]) -> list[Job]:
        """Hand the jobs on as they are: they cannot be stacked."""
        return inputs

    def predict(self, x: list[Job]) -> list[NDArray[np.uint8]]:
        """Draw a batch; its pictures in the order of the jobs."""
        pictures: dict[int, NDArray[np.uint8]] = {}
        for group in grouped(x):
            pictures |= zip(group, draw(self._pipeline, [x[index] for index in group]), strict=True)
        return [pictures[index] for index in range(len(x))]

    def unbatch(self, output: list[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
        """Give each request its picture."""
        return output

    def encode_response(self, output: NDArray[np.uint8]) -> dict[str, Any]:
        """Write the pixels into the JSON answer."""
        return {"shape": output.shape, "image": base64.b64encode(output.tobytes()).decode()}


def main(model: str, port: int) -> None:
    """Serve until the process is ended."""
    server = litserve.LitServer(DrawAPI(model), accelerator="auto", devices=1, timeout=False)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
