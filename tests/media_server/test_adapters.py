"""LoRA adapters of requests to the real server: in force for the request that names them, and for nobody else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.media_server.conftest import assert_differ, assert_same

MODEL = "styled"
SENT: dict[str, Any] = {"prompt": "red apple", "seed": 3, "num_inference_steps": 6, "guidance_scale": 3.0}
LORAS: dict[str, tuple[tuple[str, float], ...]] = {
    "ink": (("ink", 1.0),),
    "ink:0.5": (("ink", 0.5),),
    "ink:0.5, chalk:2": (("ink", 0.5), ("chalk", 2.0)),
}


@pytest.fixture(scope="module")
def expected(alone: Any) -> dict[str | None, np.ndarray]:
    """What the bare pipeline draws with each adapter, and with none."""
    params = {name: value for name, value in SENT.items() if name != "prompt"}
    drawn = {text: alone(MODEL, SENT["prompt"], **params, lora=lora).images for text, lora in LORAS.items()}
    return {None: alone(MODEL, SENT["prompt"], **params).images, **drawn}


@pytest.mark.parametrize("way", ["stream", "unary"])
@pytest.mark.parametrize("lora", [*LORAS, None])
def test_the_picture_is_the_adapters(served, expected, way, lora):
    sent = SENT if lora is None else {**SENT, "lora": lora}
    answer = served.stream(MODEL, **sent).result() if way == "stream" else served.infer(f"{MODEL}_unary", **sent)
    assert_same(answer.outputs["images"], expected[lora])
    assert answer.metrics.get("param_lora") == (None if lora is None else _echo(lora))
    for other, picture in expected.items():
        if other != lora:
            assert_differ(answer.outputs["images"], picture)


def _echo(text: str) -> str:
    return ", ".join(f"{name}:{weight}" for name, weight in LORAS[text])


def test_neighbours_at_the_same_time_get_their_own(served, expected):
    """Twelve requests at once, three of each kind: those without an adapter are as in a model that has none."""
    kinds = [*LORAS, None] * 3
    calls = [served.stream(MODEL, **SENT, **({} if lora is None else {"lora": lora})) for lora in kinds]
    for lora, call in zip(kinds, calls, strict=True):
        assert_same(call.result().outputs["images"], expected[lora])


def test_an_adapter_that_is_not_there_is_refused_with_those_that_are(served):
    with pytest.raises(InferenceServerException) as caught:
        served.infer(f"{MODEL}_unary", **SENT, lora="inc")
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert "there is no adapter 'inc'; did you mean 'ink'? (allowed are ink, chalk)" in caught.value.message()
