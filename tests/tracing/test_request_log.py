"""The line of a request is one piece, ASCII, and bounded, whatever is in it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusion_backend.request_log import MAX_LINE_BYTES, RequestLog, tellable


def line_of(*, quoting: bool = False, **values: Any) -> dict[str, Any]:
    """Write a line and read it; the arguments are those of `RequestLog.write`."""
    lines: list[bytes] = []
    usual = {"request_id": "r", "outcome": "completed", "identity": {}, "seeds": (), "record": {}, "texts": {}}
    RequestLog("m", texts=quoting, write=lines.append).write(**{**usual, **values})
    (line,) = lines
    assert line.endswith(b"\n")
    assert len(line) <= MAX_LINE_BYTES
    assert line.isascii()
    assert all(byte >= 32 for byte in line[:-1]), "one line, and nothing that a terminal obeys"
    return json.loads(line)


@given(request_id=st.text(), prompt=st.lists(st.text(), max_size=20), error=st.text())
def test_any_text_stays_in_one_line(request_id: str, prompt: list[str], error: str) -> None:
    texts = {"prompt": prompt, "error": error}
    line = line_of(quoting=True, request_id=request_id, outcome="failed", texts=texts)
    assert (line["request_id"], line["outcome"], line["level"]) == (request_id[:128], "failed", "error")
    if "cut" not in line:
        assert line["prompt"] == prompt[:16]
        assert line["error"] == error


@pytest.mark.parametrize("letter", ["a", "\U0001f34e", "\n"])
def test_the_longest_line_still_says_who_and_how(letter: str) -> None:
    """Of the longest prompts only the beginning is told; where even that is too much, the line says so."""
    line = line_of(
        quoting=True,
        request_id=letter * 1000,
        identity={"trace_id": "0" * 32, "span_id": "0" * 16, "error_code": "INVALID_ARG", "num_outputs": 999},
        seeds=[2**63 - 1] * 5000,
        record={f"time_{name}_ms": 1234567.891 for name in ("queue", "preprocess", "execute", "postprocess", "total")}
        | {f"param_{k}": 2**63 for k in range(300)},
        texts={"prompt": [letter * 5000] * 100},
    )
    assert line["cut"] is True
    assert line["seeds"] == [2**63 - 1] * 64
    assert line["time_total_ms"] == 1234567.891
    assert line["trace_id"] == "0" * 32


def test_a_long_prompt_is_shortened() -> None:
    line = line_of(quoting=True, texts={"prompt": ["a" * 256, "b" * 257]})
    assert line["prompt"] == ["a" * 256, "b" * 255 + "…"]


def test_texts_are_told_only_where_they_are_asked_for() -> None:
    record = {"time_total_ms": 1.23456, "param_prompt_2": "secret", "param_height": 64, "param_seeds": [1]}
    texts = {"prompt": ["secret"], "error": "secret"}
    quiet = line_of(record=record, texts=texts)
    assert {name: quiet[name] for name in quiet if name not in ("time", "level", "event", "model")} == {
        "request_id": "r",
        "outcome": "completed",
        "seeds": [],
        "time_total_ms": 1.235,
        "param_height": 64,
    }
    loud = line_of(quoting=True, record=record, texts=texts)
    assert (loud["param_prompt_2"], loud["prompt"], loud["error"]) == ("secret", ["secret"], "secret")


def test_parameters_that_quote_no_prompt() -> None:
    safe = {
        "param_height": 64,
        "param_guidance_scale": 1.5,
        "param_clean": True,
        "param_sigmas": [1.0, 0.5],
        "param_none": None,
        "param_scheduler": "DDIMScheduler",
        "param_lora": "ink:0.5",
    }
    unsafe = {
        "param_prompt_2": "a",
        "param_texts": ["a"],
        "param_nested": [[1], ["a"]],
        "param_object": {"a": 1},
    }
    assert tellable({**safe, **unsafe}) == safe
