"""What `diffusion-backend` refuses: in one readable line, with the exit code 2, and nothing is written."""

from __future__ import annotations

import diffusers
import pytest

from tests.cli.conftest import EMOJI, make_pipeline, snapshot


@pytest.mark.parametrize("name", ["a b", "ä", "a/b", "", ".hidden", "-x", "a:b", ".."])
def test_names_that_triton_does_not_allow(refused, name):
    assert "use letters, digits, '_', '.' and '-'" in refused("add", EMOJI, f"--name={name}")


def test_names_of_twins(refused):
    assert "names that end in _unary are those of unary twins" in refused("add", EMOJI, "--name", "x_unary")


def test_a_source_without_a_name(refused, tmp_path):
    assert "give one with --name" in refused("add", make_pipeline(tmp_path / "§§"))


@pytest.mark.parametrize("taken", ["emoji", "emoji_unary"])
def test_a_taken_name(refused, repository, taken):
    (repository / taken).mkdir(parents=True)
    assert refused("add", EMOJI) == (f"{repository / taken} exists; choose another --name, or replace it with --force")


@pytest.mark.parametrize("kept", ["weights/model.safetensors", "2/model.py", "1/notes.txt"])
def test_force_deletes_nothing_but_what_add_writes(call, refused, repository, kept):
    assert call("add", EMOJI).exit_code == 0
    path = repository / "emoji" / kept
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious")
    assert f"({kept}), which --force would delete" in refused("add", EMOJI, "--force")


def test_a_repository_that_is_a_file(refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert refused("add", EMOJI, "--repository", tmp_path / "file").endswith("is not a folder")


def test_a_folder_without_a_pipeline(refused, tmp_path):
    assert "model_index.json is missing" in refused("add", tmp_path, "--name", "x")


def test_a_single_file(refused, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "from_single_file" in refused("add", tmp_path / "model.safetensors")


@pytest.mark.parametrize("source", ["./nowhere", "/no/where", "~/nowhere", "one", "one/two/three", "a b/c"])
def test_neither_a_folder_nor_a_hub_id(refused, source):
    assert refused("add", source, "--name", "x") == (
        f"{source!r} is neither a folder that exists nor a hub id of the form owner/name"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "cannot be read: "),
        ("[]", "names no pipeline class"),
        ("{}", "names no pipeline class"),
        ("\xff", "cannot"),
    ],
)
def test_an_index_that_is_none(refused, tmp_path, text, problem):
    folder = make_pipeline(tmp_path / "x")
    (folder / "model_index.json").write_bytes(text.encode("latin-1"))
    assert problem in refused("add", folder)


def test_an_unknown_class_names_the_nearest_and_the_versions(refused, tmp_path):
    folder = make_pipeline(tmp_path / "x", "StableDifusionPipeline", _diffusers_version="9.9.9")
    assert refused("add", folder) == (
        f"the installed diffusers {diffusers.__version__} has no class 'StableDifusionPipeline' (the pipeline was made "
        "with 9.9.9): install a newer one; did you mean 'StableDiffusionPipeline'?"
    )


def test_a_class_that_brings_its_own_code(refused, tmp_path):
    folder = make_pipeline(tmp_path / "x", ["pipeline", "MyPipeline"])
    assert "brings code of its own (pipeline, MyPipeline)" in refused("add", folder)


@pytest.mark.parametrize("name", ["UNet2DConditionModel", "AutoPipelineForText2Image", "ModularPipeline"])
def test_a_class_that_is_no_pipeline(refused, tmp_path, name):
    assert "is no pipeline that can be served" in refused("add", make_pipeline(tmp_path / "x", name))


def test_a_class_whose_packages_are_missing(refused, tmp_path):
    folder = make_pipeline(tmp_path / "x", "OnnxStableDiffusionPipeline")
    assert "needs the packages torch, transformers, onnx" in refused("add", folder)


def test_an_unknown_option_is_an_error_of_the_command_line(call, repository):
    result = call("add", EMOJI, "--max-num-seq", 3)
    assert result.exit_code == 2
    assert "--max-num-seqs" in result.stderr
    assert snapshot(repository) == {}


@pytest.mark.parametrize("command", ["list", "check x"])
def test_a_repository_that_is_not_there(refused, repository, command):
    assert refused(*command.split()).startswith(f"there is no repository of models at {repository}")
