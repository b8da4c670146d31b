"""`diffusion-backend add`: what it writes."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path

import pytest

from diffusion_backend.cli import add, parameters
from diffusion_backend.config import ModelConfig
from diffusion_backend.errors import ConfigurationError
from tests.cli.conftest import EMOJI, ROOT, make_pipeline, parameters_of, snapshot

FIELDS = {field.name: field for field in dataclasses.fields(ModelConfig) if field.name != "model"}

FAULTS = '[{"fault": "die", "phase": "load"}]'


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def a_value(name: str) -> str:
    """Return a text that a parameter's own parser takes, and that is not its default."""
    for text in (*parameters._choices(FIELDS[name]), "3", "0.25", "true", "false", "64x96, 32x32", "name=path", FAULTS):
        with contextlib.suppress(ConfigurationError):
            if FIELDS[name].metadata["parse"](name, text) != FIELDS[name].default:
                return text
    raise AssertionError(f"no value for {name}: add one here")


def test_a_folder_is_enough(call, repository):
    result = call("add", EMOJI)
    assert result.exit_code == 0
    assert sorted(snapshot(repository)) == [
        "emoji",
        "emoji/1",
        "emoji/1/model.py",
        "emoji/config.pbtxt",
        "emoji_unary",
        "emoji_unary/1",
        "emoji_unary/1/model.py",
        "emoji_unary/config.pbtxt",
    ]
    assert parameters_of(repository / "emoji") == {"model": str(EMOJI)}
    assert parameters_of(repository / "emoji_unary") == {}
    for said in (
        "added emoji",
        f"StableDiffusionPipeline from {EMOJI}",
        "takes       prompt, negative_prompt, num_inference_steps, guidance_scale, height, width,",
        "num_outputs_per_prompt, seed, output_format, extra_args",
        "gives       image",
        str(repository / "emoji_unary"),
        "diffusion-backend check emoji",
        "make serve",
    ):
        assert said in result.stdout


def test_files_are_those_of_the_model_that_ships(call, repository):
    """All but the comments and the parameters."""

    def rest(folder: Path) -> str:
        lines = (folder / "config.pbtxt").read_text().splitlines()
        return "\n".join(line for line in lines[1:] if not line.startswith("parameters"))

    assert call("add", EMOJI).exit_code == 0
    for name in ("emoji", "emoji_unary"):
        shipped, made = ROOT / "model_repository" / name, repository / name
        assert rest(made) == rest(shipped)
        code = [(folder / "1/model.py").read_text().splitlines()[1:] for folder in (made, shipped)]
        assert code[0] == code[1]


def test_every_parameter_is_an_option_and_only_those_given_are_written(call, repository):
    values = {name: a_value(name) for name in FIELDS} | {"pipeline_class": "StableDiffusionImg2ImgPipeline"}
    arguments = [argument for name, value in values.items() for argument in (option(name), value)]
    assert call("add", EMOJI, "--name", "all", *arguments).exit_code == 0
    assert parameters_of(repository / "all") == {"model": str(EMOJI), **values}
    expected = ModelConfig.from_parameters({"model": str(EMOJI), **values})
    assert ModelConfig.from_parameters(parameters_of(repository / "all")) == expected


def a_complaint(name: str) -> tuple[str, str]:
    """Return a text that a parameter's own parser refuses, and what it says of it."""
    for text in ("§", ""):
        try:
            FIELDS[name].metadata["parse"](name, text)
        except ConfigurationError as error:
            return text, error.message
    raise AssertionError(f"no bad value for {name}: add one here")


@pytest.mark.parametrize("name", FIELDS)
def test_a_bad_value_is_refused_in_the_words_of_its_parser(refused, name):
    text, complaint = a_complaint(name)
    assert refused("add", EMOJI, option(name), text) == complaint


def test_the_help_has_every_parameter_with_its_values_and_default(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = call("add", "--help").output
    for name in FIELDS:
        assert option(name) in text
    for said in ("(float32, float16, bfloat16)", "float32 unless given", "16 unless given", "require: refuse to load"):
        assert said in text


def test_a_neighbour_is_named_relative_to_the_models_folder(call, repository):
    pipeline = make_pipeline(repository.parent / "models" / "mine")
    assert call("add", pipeline).exit_code == 0
    written = parameters_of(repository / "mine")["model"]
    assert written == "../../models/mine"
    assert (repository / "mine" / written).resolve() == pipeline


def test_a_stranger_is_named_absolutely_wherever_the_command_runs(call, repository, tmp_path, monkeypatch):
    make_pipeline(tmp_path / "elsewhere" / "mine")
    monkeypatch.chdir(tmp_path)
    assert call("add", "./elsewhere/mine").exit_code == 0
    assert parameters_of(repository / "mine")["model"] == str(tmp_path / "elsewhere" / "mine")


@pytest.mark.parametrize("folder", ['a "quoted" one', "back\\slash", "Ünïcode æøå", "new\tline"])
def test_any_path_survives(call, repository, tmp_path, folder):
    pipeline = make_pipeline(tmp_path / "elsewhere" / folder)
    assert call("add", pipeline, "--name", "odd").exit_code == 0
    assert parameters_of(repository / "odd")["model"] == str(pipeline)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("stabilityai/stable-diffusion-3.5-medium", "stable-diffusion-3.5-medium"),
        ("/srv/models/My Model (v2)", "My_Model_v2_"),
        ("./a/.hidden", "hidden"),
        ("me/thing_unary", "thing"),
        ("folder/", "folder"),
    ],
)
def test_a_name_is_made_from_the_source(source, name):
    assert add.derive_name(source) == name


def test_without_twin(call, repository):
    assert call("add", EMOJI, "--no-unary").exit_code == 0
    assert [path.name for path in repository.iterdir()] == ["emoji"]


def test_force_replaces_both(call, repository):
    assert call("add", EMOJI, "--max-num-seqs", 4).exit_code == 0
    (repository / "emoji" / "1" / "__pycache__").mkdir()
    assert call("add", EMOJI, "--max-num-seqs", 5, "--force").exit_code == 0
    assert parameters_of(repository / "emoji")["max_num_seqs"] == "5"
    assert sorted(path.name for path in repository.iterdir()) == ["emoji", "emoji_unary"]
    assert not (repository / "emoji" / "1" / "__pycache__").exists()


@pytest.mark.parametrize("failing", range(1, 5))
def test_a_failure_in_the_midst_leaves_all_as_it_was(call, refused, repository, monkeypatch, failing):
    """Replacing a model and its twin takes four renames; each of them fails once."""
    assert call("add", EMOJI, "--max-num-seqs", 4).exit_code == 0
    real, done = Path.rename, []

    def rename(path: Path, target: Path) -> Path:
        done.append(path)
        if len(done) == failing:
            raise OSError(28, "No space left on device")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    message = refused("add", EMOJI, "--max-num-seqs", 5, "--force")
    assert message == f"{repository} cannot be written to: No space left on device"
    assert len(done) >= failing


def test_what_a_pipeline_needs_and_what_is_not_known_is_said(call, tmp_path):
    pictures = call("add", make_pipeline(tmp_path / "wan", "WanImageToVideoPipeline")).stdout
    assert "needs       prompt, image" in pictures
    assert "gives       video" in pictures
    depth = call("add", make_pipeline(tmp_path / "depth", "MarigoldDepthPipeline")).stdout
    assert "gives       known after `diffusion-backend check depth`" in depth


def test_what_no_request_can_give_is_said_and_is_not_offered(call, tmp_path):
    edit = call("add", make_pipeline(tmp_path / "edit", "LucyEditPipeline")).stdout
    assert "but         no request can give it video: requests will fail" in edit
    assert re.search(r"^extra_args  attention_kwargs, guidance_scale_2, max_sequence_length *$", edit, re.MULTILINE)
    stage = call("add", make_pipeline(tmp_path / "stage", "KandinskyV22Pipeline")).stdout
    assert "no request can give it image_embeds, negative_image_embeds" in stage
    for source in (make_pipeline(tmp_path / "wan", "WanImageToVideoPipeline"), EMOJI):
        assert "no request can give" not in call("add", source).stdout


def test_the_class_that_the_weights_are_loaded_with_counts(call):
    result = call("add", EMOJI, "--name", "other", "--pipeline-class", "StableDiffusionInpaintPipeline")
    assert result.exit_code == 0
    assert f"StableDiffusionInpaintPipeline from {EMOJI}" in result.stdout
    assert "mask_image" in result.stdout
