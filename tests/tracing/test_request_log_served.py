"""One line of JSON a request, in the real server's log, and no prompt in it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.server.conftest import LONG, SMALL
from tests.server.test_replies import POISON
from tests.support.client import HttpError, eventually
from tests.tracing.conftest import Client

SECRET = "Zanzibarquokka"
"""A word that no log has a reason to hold."""


def fail(call) -> str:
    with pytest.raises(InferenceServerException) as caught:
        call.result()
    return caught.value.message()


def test_a_line_holds_the_times_and_parameters_of_the_answer(client: Client):
    request_id = client.new_id()
    values = {"num_inference_steps": 3, "guidance_scale": 2.5, "seed": 11, "num_outputs_per_prompt": 2}
    call, trace_id, _ = client.stream(request_id=request_id, prompt="red apple", **values)
    answer = call.result()
    line = client.line(request_id)
    told = answer.metrics
    for name, value in told.items():
        if name.startswith("time_"):
            assert line.pop(name) == pytest.approx(value, abs=1e-3)
        elif name != "param_seeds":
            assert line.pop(name) == value
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert re.fullmatch(r"[0-9a-f]{16}", line.pop("span_id"))
    assert re.fullmatch(rf"{request_id}#\d+", line.pop("request_id"))
    assert line == {
        "level": "info",
        "event": "request",
        "model": "emoji",
        "outcome": "completed",
        "trace_id": trace_id,
        "num_prompts": 1,
        "num_outputs": 2,
        "step": 3,
        "num_steps": 3,
        "seeds": answer.seeds,
    }


def test_every_request_has_one_line_whatever_its_end(client: Client):
    kinds = {}
    for outcome, values in {
        "completed": SMALL,
        "failed": {**SMALL, "extra_args": POISON, "num_inference_steps": 3},
        "rejected": {"num_inference_steps": 0},
        "cancelled": LONG,
    }.items():
        kinds[outcome] = client.new_id()
        call, _, _ = client.stream(request_id=kinds[outcome], prompt="a", **values)
        if outcome == "cancelled":
            call.wait_step(2)
            call.cancel()
        elif outcome == "completed":
            call.result()
        else:
            fail(call)
    lines = {outcome: client.line(request_id) for outcome, request_id in kinds.items()}
    assert {outcome: line["outcome"] for outcome, line in lines.items()} == {name: name for name in lines}
    assert [lines[k]["level"] for k in lines] == ["info", "error", "info", "info"]
    told = {k: (line.get("error_code"), line.get("reason"), line.get("field")) for k, line in lines.items()}
    assert told == {
        "completed": (None, None, None),
        "failed": ("INTERNAL", "pipeline", None),
        "rejected": ("INVALID_ARG", "argument", "num_inference_steps"),
        "cancelled": ("CANCELLED", "cancelled", None),
    }
    assert lines["cancelled"]["step"] >= 2
    assert lines["cancelled"]["time_postprocess_ms"] == 0
    assert "time_total_ms" not in lines["rejected"]


def test_lines_and_metrics_agree(client: Client):
    """As many lines as requests that the metrics count, model by model."""

    def agree() -> bool:
        metrics = client.served.metrics()
        counted = {m: metrics.get("diffusion_requests_total", m) for m in ("emoji", "loud")}
        lines = client.lines()
        return counted == {m: sum(line["model"] == m for line in lines) for m in counted} and counted["emoji"] > 0

    client.served.infer(prompt="a", num_inference_steps=1)
    eventually(agree, "a line for each request")


def test_no_prompt_is_in_the_log_unless_asked_for(client: Client, log_path):
    """Through every way that a text can take: prompts, fields, errors of ours, of libraries, of the pipeline."""
    send = client.stream
    quick = {**SMALL, "guidance_scale": 3.0}
    send(**quick, prompt=SECRET, negative_prompt=f"not {SECRET}")[0].result()
    send(**quick, prompt=f"{SECRET} " * 300)[0].result()  # more than the text encoder takes: libraries warn of that
    texts = [
        fail(send(**SMALL, prompt=f"POISON {SECRET}")[0]),
        fail(send(**SMALL, prompt=f"{SECRET} " * 3000)[0]),
        fail(send(**SMALL, prompt=np.array([[SECRET.encode() + b"\xff"]], dtype=np.object_))[0]),
        fail(send(**SMALL, prompt=SECRET, output_format=SECRET)[0]),
        fail(send(**SMALL, prompt=SECRET, extra_args=f'{{"{SECRET}": 1}}')[0]),
        fail(send(**SMALL, prompt=SECRET, extra_args=f'["{SECRET}"')[0]),
        fail(send(**SMALL, prompt=SECRET, extra_args={"scheduler": SECRET})[0]),
        fail(send(**{**SMALL, "num_inference_steps": 3}, prompt=SECRET, extra_args=POISON)[0]),
        fail(send("quiet", **SMALL, prompt=f"POISON {SECRET}")[0]),
    ]
    assert sum(SECRET in text for text in texts) >= 4, "some of the errors that clients get quote them"
    with pytest.raises(HttpError, match=SECRET):
        client.served.generate(prompt="a", **{SECRET: SECRET})
    with pytest.raises(InferenceServerException):
        client.served.infer(prompt=f"POISON {SECRET}")
    last = client.new_id()
    send(**SMALL, prompt="a", request_id=last)[0].result()
    client.line(last)
    log = (log_path / "log").read_text()
    assert "RuntimeError: its text is left out" in log, "the error itself is told, with its place"
    assert "model.py" in log
    assert SECRET not in log


def test_prompts_are_there_where_they_are_asked_for(client: Client, log_path):
    request_id, failed = client.new_id(), client.new_id()
    client.stream("loud", **SMALL, prompt="a green tree", negative_prompt="grey", request_id=request_id)[0].result()
    line = client.line(request_id)
    assert (line["prompt"], line["negative_prompt"]) == (["a green tree"], ["grey"])
    fail(client.stream("loud", **SMALL, prompt="POISON tree", request_id=failed)[0])
    assert "no idea what" in client.line(failed)["error"]
    assert "RuntimeError: no idea what" in (log_path / "log").read_text()


def test_no_text_can_forge_a_line(client: Client, log_path):
    forged = '{"event":"request","outcome":"completed","model":"emoji","request_id":"forged"}'
    hostile = f'a"}}\n{forged}\r\n{forged}\u2028{forged}\x1b[2K\x00'
    before = len(client.lines())
    request_ids = [client.new_id(), client.new_id(), f"x\n{forged}\n{client.new_id()}"]
    client.stream("loud", **SMALL, prompt=hostile, request_id=request_ids[0])[0].result()
    fail(client.stream("loud", **SMALL, prompt=f"POISON {hostile}", request_id=request_ids[1])[0])
    fail(client.stream(**SMALL, prompt=f"POISON {hostile}", request_id=request_ids[2])[0])
    line = client.line(request_ids[0])
    assert line["prompt"] == [hostile]
    assert client.line(request_ids[2])["outcome"] == "failed"
    lines = client.lines()
    assert len(lines) == before + 3
    assert all(line["request_id"] != "forged" for line in lines)
    raw = (log_path / "log").read_bytes()
    assert b"\x1b" not in raw
    assert b"\x00" not in raw


def test_a_model_can_be_quiet(client: Client):
    request_id, after = client.new_id(), client.new_id()
    client.stream("quiet", **SMALL, prompt="a", request_id=request_id)[0].result()
    client.stream(**SMALL, prompt="a", request_id=after)[0].result()
    client.line(after)
    assert all(line["model"] != "quiet" for line in client.lines())
