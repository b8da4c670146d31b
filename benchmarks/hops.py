"""Where the milliseconds of one request go, hop by hop, from the instants that each part of the way notes itself.

The client, Triton and the model's process are on one machine and read the same monotonic clock, so instants of one can
be compared with those of another. Triton's are those of its trace; the model's are the phases in the `metrics` output.
A server of its own runs here with its trace on; requests come one at a time, as pixels and as png in turns.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.clients import StreamClient
from benchmarks.fleet import READY_S, ROOT
from benchmarks.workload import make_jobs
from diffusion_backend.serve import TritonServer

HOPS: dict[str, str] = {
    "client": "client: build the request, take the answer apart",
    "grpc_in": "gRPC: from the client into the server",
    "triton": "Triton: read the request, hand it to the queue",
    "triton_queue": "Triton: queue",
    "ipc": "stub: to the model's process and back, tensors read and written, threads woken",
    "engine_queue": "engine: queue",
    "preprocess": "preprocess: the pipeline's call up to the first forward (text encoding)",
    "steps": "steps: forwards and scheduler",
    "decode": "decode: the VAE, and the copy to the host",
    "encode": "encode: png",
    "reply": "gRPC: the reply, from the server to the client",
}
"""The hops, in the order of a request's way."""

_TRACE_S = 30.0
_MS = 1e-6  # of nanoseconds


def measure_hops(model_name: str, env: Mapping[str, str], steps: int, requests: int) -> dict[str, Any]:
    """Return the milliseconds of each hop, of the whole, and what the hops do not explain of it.

    Args:
        model_name: our model, in the repository that ships.
        env: environment of the server.
        steps: of each request.
        requests: of each kind, after one to warm up.
    """
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        trace = Path(folder) / "trace.json"
        frequency = "triton,log-frequency=1"  # each request is written at once, into a file of its own
        options = ("mode=triton", f"triton,file={trace}", frequency, "level=TIMESTAMPS", "rate=1", "count=-1")
        extra = [argument for option in options for argument in ("--trace-config", option)]
        with TritonServer(ROOT / "model_repository", env=env, extra_args=extra) as server:
            server.wait_ready(READY_S, strict=True)
            seen = asyncio.run(_draw(server.url_grpc, model_name, steps, requests))
            traces = _wait_for_traces(trace, model_name, len(seen))
    found = [split(client, instants) for client, instants in zip(seen, traces, strict=True)][2:]
    return summarize(found)


def summarize(found: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the means over the middle half of the requests, by their totals, so that the hops add up to the total.

    What png adds to the time after the last step is the encoding.
    """
    raw, png = (middle_half([hops for hops in found if hops["png"] == kind]) for kind in (0, 1))

    def mean(requests: Sequence[dict[str, float]], name: str) -> float:
        return statistics.fmean(hops[name] for hops in requests)

    hops = {name: mean(raw, name) for name in HOPS if name != "encode"}
    encode = mean(png, "decode") - mean(raw, "decode")
    return {
        "hops_ms": {name: encode if name == "encode" else hops[name] for name in HOPS},
        "total_ms": mean(raw, "total"),
        "total_png_ms": mean(png, "total"),
        "remainder_ms": mean(raw, "total") - sum(hops.values()),
        "requests": [dict(hops) for hops in found],
    }


def middle_half(requests: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Return the requests whose totals are neither in the lowest nor in the highest quarter."""
    ordered = sorted(requests, key=lambda hops: hops["total"])
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def split(client: dict[str, Any], instants: Mapping[str, int]) -> dict[str, float]:
    """Return the milliseconds of each hop of one request; `decode` holds the encoding too.

    Args:
        client: what `_draw` noted.
        instants: of Triton's trace, in nanoseconds; of those that come several times, the last one.
    """
    times = client["times"]
    engine = {name: times[f"time_{name}_ms"] for name in ("queue", "preprocess", "execute", "postprocess", "total")}
    read, sent = instants["GRPC_WAITREAD_END"], instants["GRPC_SEND_START"]
    computed = instants["COMPUTE_START"]
    return {
        "client": client["build_ms"] + client["parse_ms"],
        "grpc_in": (read - client["sent_ns"]) * _MS - client["build_ms"],
        "triton": (instants["QUEUE_START"] - read) * _MS,
        "triton_queue": (computed - instants["QUEUE_START"]) * _MS,
        "ipc": (sent - computed) * _MS - engine["total"],
        "engine_queue": engine["queue"],
        "preprocess": engine["preprocess"],
        "steps": engine["execute"],
        "decode": engine["postprocess"],
        "reply": (client["came_ns"] - sent) * _MS - client["parse_ms"],
        "total": (client["came_ns"] - client["sent_ns"]) * _MS,
        "png": float(client["png"]),
    }


def _wait_for_traces(trace: Path, model_name: str, count: int) -> list[dict[str, int]]:
    """Return the instants of the requests once Triton has written so many; raise RuntimeError if it does not."""
    deadline = time.monotonic() + _TRACE_S
    while True:
        files = [text for path in trace.parent.glob(f"{trace.name}*") if (text := path.read_text(encoding="utf-8"))]
        traces = read_trace([text for text in files if text.rstrip().endswith("]")], model_name)
        if len(traces) == count:
            return traces
        if time.monotonic() > deadline:
            raise RuntimeError(f"{count} requests were sent, and {len(traces)} are in Triton's trace")
        time.sleep(0.05)


def read_trace(texts: Sequence[str], model_name: str) -> list[dict[str, int]]:
    """Return the instants of each request of a model, by name, in the order of Triton's ids, from its files."""
    instants: dict[int, dict[str, int]] = {}
    models: dict[int, str] = {}
    for entry in (entry for text in texts for entry in json.loads(text)):
        if "model_name" in entry:
            models[entry["id"]] = entry["model_name"]
        for stamp in entry.get("timestamps", ()):
            instants.setdefault(entry["id"], {})[stamp["name"]] = stamp["ns"]
    return [instants[number] for number in sorted(models) if models[number] == model_name]


async def _draw(url: str, model_name: str, steps: int, requests: int) -> list[dict[str, Any]]:
    """Send requests one after another, as pixels and as png in turns; the first of each only warms up."""
    clients = [StreamClient(url, model_name), StreamClient(url, model_name, "png")]
    seen = []
    for client in clients:
        await client.open()
    for job in make_jobs(1 + requests, [steps]):
        for png, client in enumerate(clients):
            sent_ns = time.monotonic_ns()
            answer = await client.draw(job)
            seen.append(
                {
                    "png": bool(png),
                    "sent_ns": sent_ns,
                    "came_ns": time.monotonic_ns(),
                    "times": answer.times,
                    "build_ms": answer.build_s * 1e3,
                    "parse_ms": answer.parse_s * 1e3,
                }
            )
    for client in clients:
        await client.close()
    return seen
