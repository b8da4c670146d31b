"""What the balancer adds to a request: `python -m benchmarks.balancer --direct-http ... --balanced-http ...`.

Against a stack that runs (docs/deploy.md) with one server behind the balancer. The same calls go directly and through
the balancer, in turn and in an order that changes each time, so that what else the machine does meets both alike; one
call at a time on a connection that stays open. Printed are the medians and the median of the paired differences.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import numpy as np
import tritonclient.grpc
import typer
from rich.console import Console
from rich.table import Table

PICTURE = {"prompt": "red apple", "num_inference_steps": 1, "output_format": "png;base64"}


def main(
    direct_http: Annotated[str, typer.Option(help="host:port of the server's HTTP")] = "127.0.0.1:8000",
    balanced_http: Annotated[str, typer.Option(help="host:port of the balancer's HTTP")] = "127.0.0.1:8080",
    direct_grpc: Annotated[str, typer.Option(help="host:port of the server's gRPC")] = "127.0.0.1:8001",
    balanced_grpc: Annotated[str, typer.Option(help="host:port of the balancer's gRPC")] = "127.0.0.1:8081",
    rounds: Annotated[int, typer.Option(min=10, help="Calls of each kind, each way.")] = 400,
) -> None:
    """Measure what the balancer adds to a request at the median."""
    table = Table("call", "direct, median ms", "through the balancer", "added, median ms", "added, 95th percentile")
    kinds: dict[str, tuple[Callable[[], object], Callable[[], object], int]] = {
        "HTTP, metadata of a model": (_http_metadata(direct_http), _http_metadata(balanced_http), rounds),
        "gRPC, metadata of a model": (_grpc_metadata(direct_grpc), _grpc_metadata(balanced_grpc), rounds),
        "HTTP, picture of one step": (_http_picture(direct_http), _http_picture(balanced_http), rounds // 4),
        "gRPC, picture of one step": (_grpc_picture(direct_grpc), _grpc_picture(balanced_grpc), rounds // 4),
    }
    for name, (direct, balanced, count) in kinds.items():
        table.add_row(name, *(f"{value:.2f}" for value in compare(direct, balanced, count)))
    Console().print(table)


def compare(
    direct: Callable[[], object], balanced: Callable[[], object], count: int
) -> tuple[float, float, float, float]:
    """Make calls both ways in turn.

    Returns:
        Medians in milliseconds: directly, through the balancer, of the differences of a pair; their 95th percentile.
    """
    rng = random.Random(0)
    for call in (direct, balanced) * 5:  # connections are opened, caches filled
        call()
    pairs = []
    for _ in range(count):
        took = {}
        for name, call in rng.sample([("direct", direct), ("balanced", balanced)], 2):
            begin = time.perf_counter()
            call()
            took[name] = (time.perf_counter() - begin) * 1e3
        pairs.append((took["direct"], took["balanced"]))
    added = [balanced_ms - direct_ms for direct_ms, balanced_ms in pairs]
    return (
        statistics.median(pair[0] for pair in pairs),
        statistics.median(pair[1] for pair in pairs),
        statistics.median(added),
        statistics.quantiles(added, n=20)[-1],
    )


def _http_metadata(address: str) -> Callable[[], object]:
    return _http(address, "GET", "/v2/models/emoji_unary", None)


def _http_picture(address: str) -> Callable[[], object]:
    return _http(address, "POST", "/v2/models/emoji_unary/generate", json.dumps(PICTURE))


def _http(address: str, method: str, path: str, body: str | None) -> Callable[[], object]:
    connection = http.client.HTTPConnection(address, timeout=60)

    def call() -> bytes:
        connection.request(method, path, body)
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"{address}{path} answered {response.status}: {answer[:200]!r}")
        return answer

    return call


def _grpc_metadata(address: str) -> Callable[[], object]:
    client = tritonclient.grpc.InferenceServerClient(address)
    return lambda: client.get_model_metadata("emoji_unary")


def _grpc_picture(address: str) -> Callable[[], object]:
    client = tritonclient.grpc.InferenceServerClient(address)
    inputs = []
    for name, value, kind in (
        ("prompt", np.array([[PICTURE["prompt"]]], dtype=object), "BYTES"),
        ("num_inference_steps", np.array([[PICTURE["num_inference_steps"]]], dtype=np.int32), "INT32"),
    ):
        tensor = tritonclient.grpc.InferInput(name, [1, 1], kind)
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    return lambda: client.infer("emoji_unary", inputs)


if __name__ == "__main__":
    typer.run(main)
