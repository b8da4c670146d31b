"""Triton's trace and the hops of a request, on instants that can be added up by hand."""

from __future__ import annotations

import json

import pytest

from benchmarks.hops import HOPS, middle_half, read_trace, split, summarize

MS = 1_000_000


def entries(number: int, model: str, stamps: dict[str, int]) -> list[dict[str, object]]:
    return [
        {"id": number, "model_name": model, "model_version": 1},
        *({"id": number, "timestamps": [{"name": name, "ns": ns}]} for name, ns in stamps.items()),
    ]


def test_the_trace_of_one_model_in_order() -> None:
    files = [
        entries(3, "emoji", {"QUEUE_START": 30, "GRPC_SEND_START": 31}),
        [
            *entries(1, "emoji", {"QUEUE_START": 10, "GRPC_SEND_START": 11}),
            {"id": 1, "timestamps": [{"name": "GRPC_SEND_START", "ns": 12}]},
            *entries(2, "other", {"QUEUE_START": 20}),
        ],
    ]
    assert read_trace([json.dumps(file) for file in files], "emoji") == [
        {"QUEUE_START": 10, "GRPC_SEND_START": 12},
        {"QUEUE_START": 30, "GRPC_SEND_START": 31},
    ]


def request(*, png: bool, encode_ms: float = 0.0) -> dict[str, float]:
    engine = {"queue": 1.0, "preprocess": 10.0, "execute": 100.0, "postprocess": 20.0 + encode_ms}
    total = sum(engine.values())
    client = {
        "png": png,
        "sent_ns": 0,
        "came_ns": round((12 + total) * MS),
        "build_ms": 0.5,
        "parse_ms": 0.25,
        "times": {f"time_{name}_ms": value for name, value in (engine | {"total": total}).items()},
    }
    instants = {
        "GRPC_WAITREAD_END": 2 * MS,
        "QUEUE_START": 3 * MS,
        "COMPUTE_START": 4 * MS,
        "GRPC_SEND_START": round((4 + 7 + total) * MS),
    }
    return split(client, instants)


def test_the_hops_of_a_request_are_all_of_it() -> None:
    hops = request(png=False)
    assert hops["grpc_in"] == pytest.approx(1.5)
    assert hops["ipc"] == pytest.approx(7)
    assert hops["reply"] == pytest.approx(0.75)
    assert hops["client"] == pytest.approx(0.75)
    assert sum(hops[name] for name in HOPS if name != "encode") == pytest.approx(hops["total"])


def test_a_disturbed_request_does_not_count() -> None:
    requests = [{"total": total} for total in (5.0, 900.0, 3.0, 4.0)]
    assert middle_half(requests) == [{"total": 4.0}, {"total": 5.0}]
    assert middle_half(requests[:1]) == requests[:1]


def test_encoding_is_what_png_adds() -> None:
    found = summarize([request(png=False), request(png=True, encode_ms=3.0)] * 3)
    assert found["hops_ms"]["encode"] == pytest.approx(3.0)
    assert found["hops_ms"]["decode"] == pytest.approx(20.0)
    assert found["remainder_ms"] == pytest.approx(0.0, abs=1e-6)
    assert found["total_png_ms"] - found["total_ms"] == pytest.approx(3.0)
    assert list(found["hops_ms"]) == list(HOPS)
