"""Every way to call: HTTP, gRPC, streams, `/generate`, `/generate_stream`; what is asked for is what comes."""

from __future__ import annotations

import base64
import io
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc
from PIL import Image
from tritonclient.utils import InferenceServerException

from tests.server.conftest import LONG, Blocker, same
from tests.support.client import HttpError, grpc_inputs, tensors

APPLE = {"prompt": "red apple", "seed": 7, "num_inference_steps": 4}


def picture(data: bytes, kind: str) -> np.ndarray:
    """Decode a file, which must be of this kind."""
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == kind
        return np.asarray(image.convert("RGB"))


# -- the twin -----------------------------------------------------------------------------------------------------


def test_grpc_infer_gives_a_picture_seeds_and_metrics(served):
    answer = served.infer(**APPLE, request_id="my id")
    assert set(answer.outputs) == {"images", "seeds", "metrics"}
    assert answer.images.shape == (1, 64, 64, 3)
    assert answer.images.dtype == np.uint8
    assert answer.images.std() > 5, "a picture of nothing"
    assert answer.seeds == [7]
    assert answer.request_id == "my id"


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_http_infer_gives_what_grpc_gives(served, alone, binary):
    expected = alone(**APPLE)
    answer = served.infer_http(**APPLE, binary=binary)
    assert set(answer.outputs) == {"images", "seeds", "metrics"}
    assert same(answer.images, expected.images)
    assert answer.seeds == [7]


@pytest.mark.parametrize("call", ["infer", "infer_http"])
def test_only_the_wanted_outputs_come(served, call):
    answer = getattr(served, call)(**APPLE, outputs=["seeds"])
    assert set(answer.outputs) == {"seeds"}


def test_generate_gives_a_png_as_text(served, alone):
    expected = alone(**APPLE)
    answer = served.generate(**APPLE, output_format="png;base64")
    assert "images" not in answer
    png = base64.b64decode(answer["encoded"], validate=True)
    assert same(picture(png, "PNG"), expected.image)
    assert answer["seeds"] == 7


def test_generate_without_a_format_gives_numbers(served, alone):
    expected = alone(**APPLE)
    answer = served.generate(**APPLE)
    assert same(np.array(answer["images"]).reshape(1, 64, 64, 3), expected.images)


@pytest.mark.parametrize(
    ("name", "kind", "tolerance"), [("png", "PNG", 1), ("jpeg", "JPEG", 40), ("jpg", "JPEG", 40), ("webp", "WEBP", 60)]
)
def test_each_format_is_what_it_says(served, alone, name, kind, tolerance):
    expected = alone(**APPLE)
    answer = served.infer(**APPLE, output_format=name)
    assert set(answer.outputs) == {"encoded", "seeds", "metrics"}
    decoded = picture(answer.encoded[0], kind)
    assert np.abs(decoded.astype(int) - expected.image.astype(int)).max() <= tolerance


def test_images_come_beside_an_encoded_format_if_asked_for(served):
    answer = served.infer(**APPLE, output_format="png", outputs=["images", "encoded"])
    assert same(picture(answer.encoded[0], "PNG"), answer.image)


# -- the stream ---------------------------------------------------------------------------------------------------


def test_stream_tells_each_step_then_the_result(served, alone):
    expected = alone(**APPLE)
    call = served.stream(**APPLE, request_id="mine")
    answer = call.result()
    assert [a.event for a in call.answers] == ["step"] * 4 + ["finished"]
    assert [(a.step, a.num_steps) for a in call.events("step")] == [(k, 4) for k in (1, 2, 3, 4)]
    assert {a.request_id for a in call.answers} == {"mine"}
    assert same(answer.images, expected.images)
    assert set(answer.outputs) == {"event", "step", "num_steps", "images", "seeds", "metrics"}
    assert (answer.step, answer.num_steps) == (4, 4)


def test_without_progress_exactly_one_response_comes(served, alone):
    expected = alone(**APPLE)
    call = served.stream(**APPLE, progress=False)
    answer = call.result()
    assert [a.event for a in call.answers] == ["finished"]
    assert same(answer.images, expected.images)


def test_previews_are_pictures_that_near_the_result(served, alone):
    values = {**APPLE, "num_inference_steps": 12}
    expected = alone(**values)
    call = served.stream(**values, preview_interval=4)
    answer = call.result()
    previews = call.events("preview")
    assert [a.step for a in previews] == [4, 8]
    assert len(call.events("step")) == 12
    errors = []
    for preview in previews:
        assert preview.images.shape == (1, 64, 64, 3)
        assert preview.images.dtype == np.uint8
        assert preview.images.std() > 5
        errors.append(np.abs(preview.image.astype(float) - answer.image).mean())
    assert errors[1] < errors[0], errors
    assert same(answer.images, expected.images), "a preview changed the result"


def test_previews_come_without_progress_and_in_the_format_asked_for(served):
    call = served.stream(**APPLE, preview_interval=2, progress=False, output_format="png")
    call.result()
    assert [a.event for a in call.answers] == ["preview", "finished"]
    for answer in call.answers:
        assert "images" not in answer.outputs
        assert picture(answer.encoded[0], "PNG").shape == (64, 64, 3)


def test_wanted_outputs_of_a_stream(served):
    call = served.stream(**APPLE, outputs=["event", "seeds"])
    answer = call.result()
    assert [a.event for a in call.answers] == ["step"] * 4 + ["finished"]
    assert all(set(a.outputs) <= {"event", "seeds"} for a in call.answers)
    assert answer.seeds == [7]


def test_generate_stream_tells_each_step_then_the_result(served, alone):
    expected = alone(**APPLE)
    events = list(served.generate_stream(**APPLE, output_format="png;base64"))
    assert [event["event"] for event in events] == ["step"] * 4 + ["finished"]
    assert [event["step"] for event in events[:-1]] == [1, 2, 3, 4]
    assert same(picture(base64.b64decode(events[-1]["encoded"]), "PNG"), expected.image)


def test_generate_stream_events_come_as_they_happen(served):
    """The first event is there long before the last one could be."""
    stream = served.generate_stream("tight", prompt="red apple", **LONG)
    assert [next(stream)["step"] for _ in range(3)] == [1, 2, 3]
    stream.close()


# -- final flags --------------------------------------------------------------------------------------------------


def finals(served, model: str, *, cancel_at: int | None = None, **values) -> tuple[list[bool], list[str]]:
    """Return the final flags and the errors of all responses of one stream, read until the server closes it."""
    flags, errors = [], []
    ended = threading.Condition()
    client = tritonclient.grpc.InferenceServerClient(served.grpc_url)

    def collect(result, error):
        with ended:
            if error is not None:
                errors.append(str(error))
            else:
                flags.append(result.get_response().parameters["triton_final_response"].bool_param)
            ended.notify_all()

    client.start_stream(collect)
    client.async_stream_infer(model, grpc_inputs(tensors(**values)), enable_empty_final_response=True)
    if cancel_at is not None:
        with ended:
            assert ended.wait_for(lambda: len(flags) >= cancel_at, 60)
    client.stop_stream(cancel_requests=cancel_at is not None)  # without cancelling it waits until all has come
    client.close()
    return flags, errors


def test_exactly_one_final_flag_on_success_7(served):
    """Case 7."""
    flags, errors = finals(served, "emoji", **APPLE)
    assert flags == [False] * 4 + [True]
    assert errors == []


def test_exactly_one_end_on_error_7(served):
    """Case 7: one error, with which the request ends: the stream can be closed and serves the next request."""
    flags, errors = finals(served, "emoji", prompt="a", num_inference_steps=0)
    assert flags.count(True) + len(errors) == 1, (flags, errors)
    assert "num_inference_steps" in errors[0]


def test_exactly_one_end_on_cancel_7(served):
    """Case 7: the client hears of its own cancelling once, and the server's side ends (see `_settled`)."""
    flags, errors = finals(served, "tight", cancel_at=2, prompt="a", **LONG)
    assert True not in flags
    assert len(errors) == 1
    assert "ancelled" in errors[0]


def test_an_error_on_a_stream_is_plain_text_unless_its_code_is_asked_for(served):
    """The request parameter `error_codes` puts the code's name before the text; it is no input and changes no other."""
    plain = served.stream(prompt="a", height=0, name_code=False).wait()
    coded = served.stream(prompt="a", height=0, name_code=True).wait()
    plain.close()
    coded.close()
    assert plain.error.status() is None
    assert coded.error.status() == "StatusCode.INVALID_ARGUMENT"
    assert plain.error.message() == coded.error.message() == "height: 0 is not allowed; it must be from 1 to 4096"


def test_hundreds_of_errors_at_once_leave_the_server_alive(served):
    """Errors through the twin: with the header `triton_grpc_error` a few hundred of them end this server."""

    def call(k: int) -> str:
        with pytest.raises(InferenceServerException) as caught:
            served.infer(prompt="a", height=0)
        return caught.value.status()

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(call, range(600))) == {"StatusCode.INVALID_ARGUMENT"}
    assert served.grpc.is_server_live()


def test_an_error_does_not_end_the_other_requests_of_its_stream(served, alone):
    """The stream goes on."""
    expected = alone(**APPLE)
    images, errors = {}, []
    came = threading.Condition()
    client = tritonclient.grpc.InferenceServerClient(served.grpc_url)

    def collect(result, error):
        with came:
            if error is not None:
                errors.append(error)
            elif result.as_numpy("images") is not None:
                images[result.get_response().id] = result.as_numpy("images")
            came.notify_all()

    client.start_stream(collect)
    for name, values in (("one", APPLE), ("bad", {"prompt": "a", "height": -8}), ("two", APPLE)):
        client.async_stream_infer("emoji", grpc_inputs(tensors(**values)), request_id=name)
    client.stop_stream()
    client.close()
    assert len(errors) == 1
    assert "height" in str(errors[0])
    assert set(images) == {"one", "two"}
    assert all(same(value, expected.images) for value in images.values())


# -- the twin passes on -------------------------------------------------------------------------------------------


def test_errors_reach_each_kind_of_client_of_the_twin(served):
    said = "num_inference_steps: 0 is not allowed; it must be from 1 to 1000"
    with pytest.raises(InferenceServerException) as grpc_error:
        served.infer(prompt="a", num_inference_steps=0)
    assert grpc_error.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert grpc_error.value.message() == said
    with pytest.raises(InferenceServerException) as http_error:
        served.infer_http(prompt="a", num_inference_steps=0)
    assert http_error.value.message() == said
    assert http_error.value.status() == "400"
    with pytest.raises(HttpError) as generate_error:
        served.generate(prompt="a", num_inference_steps=0)
    assert generate_error.value.message() == said
    assert generate_error.value.status == 400
    with pytest.raises(HttpError) as stream_error:
        list(served.generate_stream(prompt="a", num_inference_steps=0))
    assert stream_error.value.message() == said


def test_a_twin_that_cannot_reach_its_model_says_so(served):
    with pytest.raises(InferenceServerException) as caught:
        served.infer("deaf_unary", prompt="a")
    assert caught.value.status() == "StatusCode.UNAVAILABLE"


def test_a_request_without_the_prompt_names_it(served):
    with pytest.raises(InferenceServerException, match="prompt"):
        served.infer(num_inference_steps=1)
    with pytest.raises(InferenceServerException, match="prompt"):
        served.stream(num_inference_steps=1).result()


# -- questions under load -----------------------------------------------------------------------------------------


def test_questions_are_answered_under_load_5(served):
    """Case 5: 8 running while ready, config, statistics and metadata are asked: no wrong kind of reply, no stall."""
    metadata = served.grpc.get_model_metadata("emoji", as_json=True)
    config = served.grpc.get_model_config("emoji", headers=served.admin, as_json=True)
    assert {i["name"] for i in metadata["inputs"]} >= {"prompt", "negative_prompt", "seed", "extra_args", "progress"}
    assert {o["name"] for o in metadata["outputs"]} >= {"images", "video", "seeds", "metrics", "event", "step"}
    assert config["config"]["model_transaction_policy"] == {"decoupled": True}

    with Blocker(served, "emoji", count=8):

        def ask(_):
            assert served.grpc.is_server_live()
            assert served.grpc.is_server_ready()
            assert served.grpc.is_model_ready("emoji")
            assert served.grpc.get_model_metadata("emoji", as_json=True) == metadata
            assert served.grpc.get_model_config("emoji", headers=served.admin, as_json=True) == config
            stats = served.grpc.get_inference_statistics("emoji", headers=served.admin, as_json=True)
            assert [s["name"] for s in stats["model_stats"]] == ["emoji"]
            assert served.request("GET", "/v2/models/emoji/ready") == b""
            return served.metrics().get("diffusion_requests_running")

        with ThreadPoolExecutor(4) as pool:
            running = list(pool.map(ask, range(20), timeout=60))
        assert set(running) == {8}
