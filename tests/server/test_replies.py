"""As many replies as calls, each its own, whatever else goes on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.server.conftest import SMALL, rounds, same
from tests.support.client import DEADLINE_S, grpc_inputs, tensors

POISON = {"scheduler": "DDPMScheduler", "timesteps": [900, 500, -5000]}
"""Two timesteps that the scheduler has, and one that it looks up in vain."""

PROMPTS = ["red apple", "blue whale", "green tree", "yellow star", "pizza", "rocket", "black cat", "umbrella"]


def at_once(count: int, call):
    """Call `call(k)` for each k on a thread of its own, all starting together; return what they gave."""
    barrier = threading.Barrier(count)

    def run(k: int):
        barrier.wait(DEADLINE_S)
        return call(k)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count), timeout=DEADLINE_S))


class Burst:
    """Many requests on one stream; what comes is kept by id."""

    def __init__(self, served) -> None:
        self.answers: dict[str, list] = {}
        self.finished: dict[str, np.ndarray] = {}
        self.errors: list[InferenceServerException] = []
        self._changed = threading.Condition()
        self._client = tritonclient.grpc.InferenceServerClient(served.grpc_url)
        self._client.start_stream(self._collect)

    def send(self, request_id: str, model: str = "emoji", **values) -> None:
        self._client.async_stream_infer(model, grpc_inputs(tensors(**values)), request_id=request_id)

    def _collect(self, result, error) -> None:
        with self._changed:
            if error is not None:
                self.errors.append(error)
            else:
                request_id = result.get_response().id
                event = result.as_numpy("event")[0]
                self.answers.setdefault(request_id, []).append(event)
                if event == b"finished":
                    assert request_id not in self.finished, f"{request_id} finished twice"
                    self.finished[request_id] = result.as_numpy("images")
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        """Wait until so many have ended, then close."""
        with self._changed:
            done = self._changed.wait_for(lambda: len(self.finished) + len(self.errors) >= count, DEADLINE_S)
        assert done, f"{len(self.finished)} of {count} finished, errors: {self.errors[:3]}"
        self._client.stop_stream()
        self._client.close()


@pytest.mark.parametrize("count", [2, 32])
def test_as_many_replies_as_identical_calls_1(served, alone, count):
    """Case 1: identical calls at once, without request ids."""
    values = {**SMALL, "prompt": "red apple", "seed": 7}
    expected = alone(**values)
    before = served.metrics()
    for _ in range(rounds(10, 200)):
        answers = at_once(count, lambda k: served.infer(**values))
        assert len(answers) == count
        assert all(same(answer.images, expected.images) for answer in answers)
    delta = served.metrics() - before
    assert delta.get("diffusion_requests_total", outcome="completed") == count * rounds(10, 200)
    assert delta.get("diffusion_requests_total") == count * rounds(10, 200)


def test_fifty_calls_with_empty_ids_each_get_their_own_2(served, alone):
    """Case 2: 50 calls at once with empty ids, each of another seed."""
    values = [{**SMALL, "prompt": PROMPTS[k % 8], "seed": k} for k in range(50)]
    expected = [alone(**value).images for value in values]
    assert len({image.tobytes() for image in expected}) == 50, "the seeds make no difference, so this shows nothing"
    calls = [served.stream(**value) for value in values]
    answers = [call.result() for call in calls]
    assert all(same(answer.images, image) for answer, image in zip(answers, expected, strict=True))
    assert [answer.seeds for answer in answers] == [[k] for k in range(50)]


def test_different_step_counts_at_once_3(served, alone):
    """Case 3: 8 at once with 4, 10, 20 and 50 steps: each as alone."""
    values = [
        {"prompt": PROMPTS[k], "seed": 30 + k, "num_inference_steps": (4, 10, 20, 50)[k % 4], "height": 32, "width": 32}
        for k in range(8)
    ]
    expected = [alone(**value).images for value in values]
    before = served.metrics()
    answers = at_once(8, lambda k: served.infer(**values[k]))
    for value, answer, image in zip(values, answers, expected, strict=True):
        assert same(answer.images, image), value
        assert answer.metrics["param_num_inference_steps"] == value["num_inference_steps"]
    delta = served.metrics() - before
    assert delta.get("diffusion_steps_total") == 2 * (4 + 10 + 20 + 50)
    assert delta.get("diffusion_batch_rows_count") < 2 * (4 + 10 + 20 + 50), "nothing ran together"


def test_bursts_of_one_step_calls_4(served):
    """Case 4: bursts of 64 one-step calls: nothing is lost that ends before somebody waits for it."""
    for _ in range(rounds(4, 50)):
        answers = at_once(64, lambda k: served.infer(**SMALL, prompt="a", seed=k))
        assert [answer.seeds for answer in answers] == [[k] for k in range(64)]


def test_many_outstanding_on_one_stream_6(served, alone):
    """Case 6: many outstanding on one stream: all OK, each its own."""
    count = rounds(80, 500)
    expected = {k: alone(**SMALL, prompt=PROMPTS[k], seed=k).images for k in range(8)}
    burst = Burst(served)
    for k in range(count):
        burst.send(str(k), **SMALL, prompt=PROMPTS[k % 8], seed=k % 8)
    burst.wait(count)
    assert burst.errors == []
    assert set(burst.finished) == {str(k) for k in range(count)}
    assert all(events == [b"step", b"finished"] for events in burst.answers.values())
    assert all(same(image, expected[int(name) % 8]) for name, image in burst.finished.items())


def test_equal_ids_are_no_fault(served):
    """Ids are the caller's: those of live requests may be equal."""
    calls = [served.stream(**SMALL, prompt="a", seed=k, request_id="same") for k in range(4)]
    assert [call.result().seeds for call in calls] == [[0], [1], [2], [3]]


def test_one_poison_request_among_eight_8(served, alone):
    """Case 8: one request fails in the pipeline, at its third step: one error, the others as alone."""
    values = [{"prompt": PROMPTS[k], "seed": k, "num_inference_steps": 6, "height": 32, "width": 32} for k in range(8)]
    expected = [alone(**value).images for value in values]
    before = served.metrics()
    calls = [served.stream(**value, **({"extra_args": POISON} if k == 3 else {})) for k, value in enumerate(values)]
    for call in calls:
        call.wait()
    for k, call in enumerate(calls):
        if k == 3:
            with pytest.raises(
                InferenceServerException, match="the pipeline failed in step 3 of 3: IndexError"
            ) as caught:
                call.result()
            assert caught.value.status() == "StatusCode.INTERNAL"
            assert "Traceback" not in caught.value.message()
            assert "/" not in caught.value.message()
        else:
            assert same(call.result().images, expected[k])
    delta = served.metrics() - before
    assert delta.get("diffusion_requests_total", outcome="failed") == 1
    assert delta.get("diffusion_requests_total", outcome="completed") == 7


def test_the_twin_loses_none_9(served):
    """Case 9: 32 in flight through the unary twin."""
    before = served.metrics()
    count = rounds(150, 20_000)
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda k: served.infer(**SMALL, prompt="a", seed=k), range(count)))
    assert [answer.seeds for answer in answers] == [[k] for k in range(count)]
    assert (served.metrics() - before).get("diffusion_requests_total", outcome="completed") == count
