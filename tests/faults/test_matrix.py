"""Each fault, alone and with neighbours, streaming and unary: one right error, the others as alone, the books right."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from diffusion_backend.serve.endpoints import list_models
from tests.faults.conftest import FAULTS, LOAD_FAULTS, MOST_ROWS, SMALL, marker, settled
from tests.server.conftest import same
from tests.support.client import eventually

NEIGHBOURS = 3
LONG = {**SMALL, "num_inference_steps": 200}
"""Long enough for neighbours to be under way together on a busy machine."""

EXPECTED: dict[tuple[str, str], tuple[str | None, str]] = {
    # fault and phase: the error's reason in the metrics (None: there is no error), and what its text must match
    ("raise", "preprocess"): ("pipeline", r"^the pipeline failed in preprocess: InjectedFaultError: injected fault"),
    ("raise", "step"): ("pipeline", r"^the pipeline failed in step 3 of 6: InjectedFaultError: injected fault"),
    ("raise", "decode"): ("pipeline", r"^the pipeline failed in decode, after 6 steps: InjectedFaultError: injected"),
    ("nan", "step"): ("not_finite", r"^the pipeline's output is not finite: images hold NaN or infinity"),
    ("nan", "decode"): ("not_finite", r"^the pipeline's output is not finite: images hold NaN or infinity"),
    ("out_of_memory", "preprocess"): ("out_of_memory", r"^out of device memory in preprocess: this request does not"),
    ("out_of_memory", "step"): ("out_of_memory", r"^out of device memory in step 4 of 6: this request does not fit"),
    ("out_of_memory", "decode"): ("out_of_memory", r"^out of device memory in decode, after 6 steps: this request"),
    ("hang", "preprocess"): (None, ""),
    ("hang", "step"): (None, ""),
    ("hang", "decode"): (None, ""),
}  # fmt: skip


def prompt_of(fault: dict[str, Any]) -> str:
    return f"{marker(fault)}: red apple"


def ask(served: Any, way: str, values: dict[str, Any]) -> Any:
    """Make a call on a stream or through the twin, and return its answer."""
    if way == "unary":
        return served.infer("faulty_unary", **values)
    return served.stream("faulty", **values).result()


@pytest.mark.parametrize("way", ["stream", "unary"])
@pytest.mark.parametrize("neighbours", [0, NEIGHBOURS], ids=["alone", "with_neighbours"])
@pytest.mark.parametrize("fault", FAULTS, ids=[f"{fault['fault']}_{fault['phase']}" for fault in FAULTS])
def test_a_fault_stays_with_its_request(served, alone, fault, neighbours, way):
    reason, text = EXPECTED[fault["fault"], fault["phase"]]
    others = [{"prompt": f"blue whale {k}", "seed": k, **LONG} for k in range(neighbours)]
    expected = [alone(model="faulty_unary", **values).images for values in others]
    after = {"prompt": "green cat", "seed": 77, **SMALL}
    expected_after = alone(model="faulty_unary", **after).images
    before = served.metrics()
    with ThreadPoolExecutor(neighbours + 1) as pool:
        answers = [pool.submit(ask, served, way, values) for values in others]
        if neighbours:
            eventually(lambda: served.metrics().get("diffusion_requests_running", "faulty") >= 2, "two of them run")
        culprit = pool.submit(ask, served, way, {"prompt": prompt_of(fault), "seed": 9, **SMALL})
        error = culprit.exception()
        if reason is None:
            assert culprit.result().seeds == [9]
        else:
            assert isinstance(error, InferenceServerException), error or "a result"
            assert re.search(text, error.message()), error.message()
            assert error.status() == "StatusCode.INTERNAL"
            assert "Traceback" not in error.message()
        images = [answer.result().images for answer in answers]
    for got, wanted in zip(images, expected, strict=True):
        assert same(got, wanted), "a neighbour is not as alone"
    assert settled(served)
    delta = served.metrics() - before
    assert delta.get("diffusion_requests_total", "faulty", outcome="completed") == neighbours + (reason is None)
    assert delta.get("diffusion_requests_total", "faulty") == neighbours + 1, "each accepted request ended once"
    assert delta.get("diffusion_errors_total", "faulty") == (reason is not None)
    if reason is not None:
        assert delta.get("diffusion_errors_total", "faulty", reason=reason) == 1
    if neighbours:
        rows = delta.get("diffusion_batch_rows_sum", "faulty") / delta.get("diffusion_batch_rows_count", "faulty")
        assert rows > 2, "no forward was joint, so nothing was shown"
    assert same(ask(served, way, after).images, expected_after), "the next request is not as alone"


def test_a_hang_ends_at_the_deadline_of_its_request_once_the_forward_is_over(served):
    """A forward cannot be interrupted: the deadline acts as soon as it has ended."""
    fault = next(fault for fault in FAULTS if (fault["fault"], fault["phase"]) == ("hang", "step"))
    call = served.stream("faulty", prompt=prompt_of(fault), **SMALL, timeout_s=0.5)
    with pytest.raises(InferenceServerException, match=r"deadline exceeded: not done within the timeout of 0\.5 s"):
        call.result()
    assert fault["seconds"] <= call.seconds


def test_a_fault_is_of_the_request_and_not_of_the_model(served):
    """Two culprits and an innocent one, again and again: what is left behind by one would hurt the next."""
    for _ in range(3):
        calls = [served.stream("faulty", prompt=prompt_of(fault), **SMALL, seed=1) for fault in FAULTS[:3]]
        innocent = served.stream("faulty", prompt="red apple", **SMALL, seed=2)
        for call in calls:
            with pytest.raises(InferenceServerException):
                call.result()
        assert innocent.result().seeds == [2]


@pytest.mark.parametrize("way", ["stream", "unary"])
def test_out_of_memory_splits_the_forward_answers_all_and_is_remembered(served, alone, way):
    """46: six requests of two rows where four rows fit: all as alone, and soon no forward is larger."""
    values = [{"prompt": f"a cat {k}", "seed": k, **LONG} for k in range(6)]
    expected = [alone(model="narrow_unary", **value).images for value in values]

    def together() -> Any:
        before = served.metrics()
        if way == "stream":
            calls = [served.stream("narrow", **value) for value in values]
            answers = [call.result() for call in calls]
        else:
            with ThreadPoolExecutor(6) as pool:
                answers = list(pool.map(lambda value: served.infer("narrow_unary", **value), values))
        for answer, wanted in zip(answers, expected, strict=True):
            assert same(answer.images, wanted)
        assert settled(served)
        return served.metrics() - before

    together()
    again = together()
    forwards = again.get("diffusion_batch_rows_count", "narrow")
    assert again.get("diffusion_batch_rows_bucket", "narrow", le=str(MOST_ROWS)) == forwards
    assert again.get("diffusion_batch_rows_sum", "narrow") > 2 * forwards, "no forward is joint any more"
    assert again.get("diffusion_errors_total", "narrow") == 0


def test_a_request_of_too_many_rows_fails_alone_46(served, alone):
    """46: three outputs are six rows, which fit nowhere: an error at once; its neighbour and the next one are OK."""
    small = {"prompt": "a cat", "seed": 3, **LONG}
    expected = alone(model="narrow_unary", **small).images
    neighbour = served.stream("narrow", **small).wait_step(1)
    with pytest.raises(InferenceServerException, match="out of device memory in step 1: this request does not fit"):
        served.stream("narrow", prompt="a dog", num_outputs_per_prompt=3, **SMALL).result()
    assert same(neighbour.result().images, expected)
    assert same(served.infer("narrow_unary", **small).images, expected)


@pytest.mark.parametrize("name", LOAD_FAULTS)
def test_a_fault_at_load_is_a_readable_reason_and_takes_no_other_model_with_it_51(triton, name):
    at = triton.addresses
    index = {model.name: model for model in list_models(at.local_host, at.http_port, triton.access.http_headers)}
    entry = index[f"broken_{name}"]
    assert entry.state == "UNAVAILABLE"
    assert re.search(LOAD_FAULTS[name][2], entry.reason.splitlines()[0]), entry.reason
    assert index["faulty"].is_ready


@pytest.mark.parametrize(
    ("twin", "code", "words"),
    [
        ("orphan_unary", "NOT_FOUND", "Request for unknown model: 'nowhere' is not found"),
        (
            "broken_raising_unary",
            "UNAVAILABLE",
            "Request for unknown model: 'broken_raising' has no available versions",
        ),
    ],
)
def test_a_twin_without_its_model_says_so_with_the_right_code_51(served, twin, code, words):
    with pytest.raises(InferenceServerException, match=words) as caught:
        served.infer(twin, prompt="a", **SMALL)
    assert caught.value.status() == f"StatusCode.{code}"


def test_a_twin_names_its_model_on_metrics(served):
    """The launcher knows by it that the twin's requests are counted elsewhere."""
    assert served.metrics().labels("diffusion_unary_twin", "faulty_unary") == [{"stream_model": "faulty"}]
    assert served.metrics().get("diffusion_unary_twin", "orphan_unary", stream_model="nowhere") == 1
    assert served.metrics().labels("diffusion_unary_twin", "faulty") == []
