"""The error tree, and texts that do not tell how the server is laid out."""

from __future__ import annotations

import inspect

import pytest

from diffusion_backend import errors
from diffusion_backend.errors import (
    CallerError,
    ConfigurationError,
    DeadlineExceededError,
    DiffusionError,
    EngineStoppedError,
    ExecutorError,
    HungError,
    InvalidArgumentError,
    ModelLoadError,
    NotFiniteError,
    OutOfMemoryError,
    PipelineError,
    QueueFullError,
    RequestCancelledError,
    ServerError,
    UnavailableError,
    did_you_mean,
    without_paths,
)

TREE = {
    CallerError: {InvalidArgumentError, RequestCancelledError, DeadlineExceededError},
    UnavailableError: {QueueFullError, EngineStoppedError},
    ServerError: {
        PipelineError,
        OutOfMemoryError,
        NotFiniteError,
        ExecutorError,
        HungError,
        ConfigurationError,
        ModelLoadError,
    },
}


def test_the_tree_is_the_one_that_its_module_draws() -> None:
    """A new error must be put into the drawing, and into Triton's codes (`triton/errors.py`)."""
    defined = {c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, DiffusionError)}
    assert defined == {DiffusionError, *TREE, *(leaf for leaves in TREE.values() for leaf in leaves)}
    for family, leaves in TREE.items():
        assert family.__bases__ == (DiffusionError,)
        for leaf in leaves:
            assert leaf.__bases__ == (family,)
    for error in defined - {DiffusionError}:
        assert error.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (InvalidArgumentError("height", "7 is not allowed", request_id="r"), "height: 7 is not allowed"),
        (RequestCancelledError(request_id="r"), "the request was cancelled"),
        (
            DeadlineExceededError(2.5, request_id="r", where="while it ran"),
            "deadline exceeded: not done within the timeout of 2.5 s while it ran; "
            "ask for fewer steps, or give a longer timeout",
        ),
        (QueueFullError(7, request_id="r"), "the queue is full (7 requests wait); try again later"),
        (
            EngineStoppedError(request_id="r"),
            "the server is stopping; send the request to another replica, or again later",
        ),
        (PipelineError(ValueError("no"), request_id="r", where="here"), "the pipeline failed here: ValueError: no"),
        (PipelineError(KeyError(), request_id="r"), "the pipeline failed: KeyError"),
        (
            OutOfMemoryError(request_id="r"),
            "out of device memory: this request does not fit even alone; "
            "ask for a smaller size, fewer frames or fewer outputs",
        ),
        (
            NotFiniteError("images", request_id="r"),
            "the pipeline's output is not finite: images hold NaN or infinity after decode; ask for other arguments, "
            "or, if it happens often, load the model with a wider dtype (float16 overflows where bfloat16 does not)",
        ),
        (
            HungError("a forward of 3 requests", 2.5, request_id="r"),
            "the model hangs: a forward of 3 requests was not done within 2.5 s, and its process is ended; "
            "send the request again when the server is back",
        ),
        (
            ExecutorError(OSError("/srv/secret/x"), request_id="r"),
            "the executor failed (OSError); the request was lost, send it again",
        ),
    ],
)
def test_each_error_says_what_is_wrong_and_what_to_do_and_carries_the_request(error: DiffusionError, text: str) -> None:
    assert str(error) == error.message == text
    assert error.request_id == "r"


def test_errors_of_the_configuration_name_the_parameter() -> None:
    error = ConfigurationError("dtype", "'x' is not one of a, b")
    assert str(error) == "parameter 'dtype': 'x' is not one of a, b"
    assert error.parameter == "dtype"
    assert error.request_id == ""


def test_only_the_first_line_of_a_cause_is_told_and_no_path() -> None:
    cause = RuntimeError("cannot read '/srv/models/emoji/unet.safetensors'\n  File \"/usr/lib/python3/x.py\", line 3\n")
    assert str(PipelineError(cause)) == "the pipeline failed: RuntimeError: cannot read '<path>'"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cannot open /srv/models/emoji/model.bin", "cannot open <path>"),
        ("'/home/user/x.py' is missing", "'<path>' is missing"),
        ('File "/usr/lib/python3.11/site-packages/a-b/c_d.py", line 3', 'File "<path>", line 3'),
        ("(/a/b)", "(<path>)"),
        ("in ~/models/secret.txt now", "in <path> now"),
        ("./a/b and ../../c/d", "<path> and <path>"),
        ("/one/two/", "<path>"),
        ("PATH=/usr/bin:/home/user/bin", "PATH=<path>:<path>"),
        ("No such file or directory:/srv/models/x", "No such file or directory:<path>"),
        ("file:///srv/models/x", "<path>"),
        ("/srv/a/b, /srv/c/d", "<path>, <path>"),
        ("/srv/models/x+y@1.0-2", "<path>"),
    ],
)
def test_paths_are_taken_out(text: str, expected: str) -> None:
    assert without_paths(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "on 2026/11/30 at 15:30",
        "30/11/2026",
        "1/2 and 3/4 of it",
        "a ratio of 16/9, or 1.5/2.5",
        "and/or",
        "steps/second and frames/s",
        "dogs / cats",
        "N/A",
        "https://huggingface.co/docs/diffusers",
        "see http://localhost:8000/v2/health",
        "owner/name is a hub id",
        "stable-diffusion/v1/unet",
        "TCP/IP/UDP",
        "a /prompt that begins with a slash",
        "shape mismatch: (1, 4, 8, 8) and (2, 4, 8, 8)",
        "x // y",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert without_paths(text) == text


def test_the_nearest_known_name_is_offered_or_none() -> None:
    assert did_you_mean("guidance_scal", ["guidance_scale", "height"]) == "; did you mean 'guidance_scale'?"
    assert did_you_mean("zzz", ["guidance_scale", "height"]) == ""
    assert did_you_mean("x", []) == ""
