"""`diffusion-backend list`, with all that can be wrong with a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import EMOJI, ROOT

CONFIG = 'backend: "python"\nmax_batch_size: 16\n'
STREAMING = "from diffusion_backend.triton import StreamingModel as TritonPythonModel\n"
UNARY = "from diffusion_backend.triton import UnaryModel as TritonPythonModel\n"


def make(folder: Path, config: str | None, model: str | None, version: str = "1") -> None:
    (folder / version).mkdir(parents=True)
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    if model is not None:
        (folder / version / "model.py").write_text(model)


def parameter(key: str, value: str) -> str:
    return f'parameters: {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'


def cells(output: str) -> list[list[str]]:
    """Return the rows of the table, as the words in them."""
    return [line.split() for line in output.splitlines()]


def test_what_add_wrote_is_listed(call, repository):
    call("add", EMOJI, "--name", "one", "--max-num-seqs", 8, "--dtype", "bfloat16")
    call("add", EMOJI, "--name", "two", "--no-unary")
    result = call("list")
    assert result.exit_code == 0
    assert cells(result.stdout) == [
        ["name", "kind", "source", "dtype", "max_num_seqs", "twin"],
        ["one", "streaming", str(EMOJI), "bfloat16", "8", "one_unary"],
        ["one_unary", "unary", "through", "one"],
        ["two", "streaming", str(EMOJI), "float32", "16"],
    ]


def test_the_models_that_ship(call):
    rows = cells(call("list", "--repository", ROOT / "model_repository").stdout)
    assert ["emoji", "streaming", "../../models/emoji", "float32", "16", "emoji_unary"] in rows
    assert ["emoji_unary", "unary", "through", "emoji"] in rows


BROKEN = {
    "no_config": (None, STREAMING, "it has no config.pbtxt"),
    "no_text": ("backend: [", STREAMING, "its config.pbtxt cannot be read: 1:10"),
    "other_name": (f'name: "x"\n{CONFIG}', STREAMING, "its config.pbtxt names it 'x'"),
    "no_script": (CONFIG, None, "it has no 1/model.py"),
    "no_model": (CONFIG, STREAMING, "parameter 'model': it is missing"),
    "bad_value": (
        CONFIG + parameter("model", "a/b") + parameter("max_num_seqs", "0"),
        STREAMING,
        "parameter 'max_num_seqs': 0 is not allowed",
    ),
    "misspelt": (
        CONFIG + parameter("model", "a/b") + parameter("max_num_seq", "1"),
        STREAMING,
        "there is no such parameter; did you mean 'max_num_seqs'?",
    ),
    "no_pipeline": (
        CONFIG + parameter("model", "../gone"),
        STREAMING,
        "its pipeline is missing: there is no folder ../gone",
    ),
    "twinless": (CONFIG, UNARY, "parameter 'stream_model' is missing"),
    "lost_unary": (CONFIG, UNARY, "the model 'lost', which it passes requests on to, is missing or broken"),
}


def test_broken_folders_are_shown_with_the_reason(call, repository):
    for name, (config, model, _) in BROKEN.items():
        make(repository / name, config, model)
    (repository / "versionless").mkdir()
    (repository / "versionless" / "config.pbtxt").write_text(CONFIG)
    (repository / "latin1" / "1").mkdir(parents=True)
    (repository / "latin1" / "config.pbtxt").write_bytes(b"# \xff\n")
    call("add", EMOJI)
    result = call("list")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    reasons = {name: reason for name, (_, _, reason) in BROKEN.items()}
    reasons |= {"versionless": "it has no version folder", "latin1": "its config.pbtxt cannot be read: 'utf-8'"}
    for name, reason in reasons.items():
        assert [name, "broken"] in [row[:2] for row in cells(result.stdout)]
        assert any(line.startswith(f"{name}: ") and reason in line for line in lines), name
    assert ["emoji", "streaming"] in [row[:2] for row in cells(result.stdout)]


@pytest.mark.parametrize("name", BROKEN)
def test_check_refuses_broken_folders_for_the_same_reason(refused, repository, name):
    config, model, reason = BROKEN[name]
    make(repository / name, config, model)
    message = refused("check", name)
    assert message.startswith(f"{name}: ")
    assert reason in message


def test_models_of_others_are_no_concern(call, repository):
    make(repository / "onnx", 'backend: "onnxruntime"\n', None)
    make(repository / "mine", CONFIG, "class TritonPythonModel:\n    pass\n")
    (repository / ".git").mkdir()
    (repository / "README").write_text("")
    assert cells(call("list").stdout)[1:] == [["mine", "other"], ["onnx", "other"]]


def test_the_newest_version_counts_and_a_hub_model_needs_no_folder(call, repository):
    make(repository / "m", CONFIG + parameter("model", "owner/name"), None, version="2")
    make(repository / "n", CONFIG + parameter("model", "owner/name"), STREAMING, version="10")
    assert ["n", "streaming", "owner/name", "float32", "16"] in cells(call("list").stdout)
    assert "m: it has no 2/model.py" in call("list").stdout


def test_a_twin_may_be_of_another_name_and_pass_on_to_another_server(call, repository):
    make(repository / "far_unary", CONFIG + parameter("grpc_endpoint", "gpu:8001"), UNARY)
    make(repository / "s", CONFIG + parameter("model", "owner/name"), STREAMING)
    make(repository / "t", CONFIG + parameter("stream_model", "s"), UNARY)
    rows = cells(call("list").stdout)
    assert ["far_unary", "unary", "through", "far"] in rows
    assert ["s", "streaming", "owner/name", "float32", "16", "t"] in rows


def test_an_empty_repository(call, repository):
    repository.mkdir(parents=True)
    result = call("list")
    assert result.exit_code == 0
    assert result.stdout.strip() == f"{repository} holds no models; add one with `diffusion-backend add`"
