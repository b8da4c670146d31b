"""`diffusion-backend check`, on the model that ships and on tiny ones of the kinds that behave otherwise."""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from diffusion_backend.cli import measure, verdict
from diffusion_backend.cli.compare import difference
from diffusion_backend.cli.result import Denoiser, Memory, Result
from diffusion_backend.config import ModelConfig
from diffusion_backend.pipelines.executor import PipelineExecutor
from diffusion_backend.pipelines.probe import prepare
from diffusion_backend.request import DiffusionOutput
from tests.cli.conftest import EMOJI, ROOT, make_pipeline
from tests.support import tiny

MEMORY = Memory(before=300 * 2**20, loaded=400 * 2**20, peak=3 * 2**30, gpu_peak=None)
GOOD = Result(
    pipeline_class="StableDiffusionPipeline",
    device="cpu",
    dtype="float32",
    modalities=("image",),
    denoisers=(
        Denoiser("unet", (), 1.0, 2, 0.5, requests=8, rows=16, seconds=1.0),
        Denoiser("controlnet", ("unknown_call",), 2.0, 1, 0.25),
    ),
    shared=True,
    difference=1.0,
    allowed=1,
    memory=MEMORY,
    load_s=1.25,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors on a busy machine: more threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_model_that_ships_is_right(call):
    assert call("add", EMOJI, "--max-num-seqs", 4).exit_code == 0
    result = call("check", "emoji", "--device", "cpu", "--steps", 2)
    assert result.exit_code == 0
    lines = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in result.stdout.strip().splitlines()[1:])
    assert result.stdout.startswith("emoji is right\n")
    assert lines["pipeline"].strip() == "StableDiffusionPipeline on cpu, float32"
    assert lines["gives"].strip() == "image"
    assert lines["unet"].strip() == "batched, 2 rows a forward alone, 8 for 4 requests"
    assert re.match(r"differs from alone by at most [01] of 255, 1 allowed for float32", lines["together"])
    assert re.match(r"\d+\.\d s, the self-check included", lines["load"])
    size = r"([\d.]+) ([MG])iB"
    memory = re.match(f"{size} before loading, {size} after, {size} at most", lines["memory"])
    assert memory is not None, lines["memory"]
    numbers = memory.groups()
    before, after, most = (
        float(number) * {"M": 1, "G": 1024}[unit] for number, unit in zip(numbers[::2], numbers[1::2], strict=True)
    )
    rounded = 1.05  # one digit after the point of a GiB
    assert 0 < before <= most * rounded
    assert after <= most * rounded
    assert re.match(r"\S+ s alone, \S+ s for 4 requests together: \d+\.\d times as many steps", lines["a step"])
    assert [line.removesuffix(" …") for line in result.stderr.splitlines()] == [
        "loading diffusers",
        f"loading {EMOJI} and checking itself",
        "running two requests alone",
        "running two requests together",
        "timing a request alone",
        "running 4 requests together",
    ]


@pytest.fixture
def check_tiny(call: Any, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Check a pipeline that was built here in the place of one that is loaded."""

    def run(pipeline: Any, *arguments: str) -> Any:
        def load(config: ModelConfig, *, device: str, base: Path) -> PipelineExecutor:
            disabled = "disabled" if config.step_batching == "off" else None
            capabilities, _, output_type = prepare(pipeline, disabled=disabled, params={"height": 16, "width": 16})
            return PipelineExecutor(pipeline, capabilities, output_type=output_type)

        make_pipeline(repository.parent / "tiny")
        limits = ("--max-num-seqs", 3, "--warmup-sizes", "16x16")
        assert call("add", repository.parent / "tiny", *limits, *arguments).exit_code == 0
        monkeypatch.setattr(measure, "load", load)
        return call("check", "tiny", "--device", "cpu", "--steps", 2)

    return run


def test_a_pipeline_that_needs_a_picture_gets_one(check_tiny):
    pipeline = tiny.stable_diffusion(diffusers.StableDiffusionImg2ImgPipeline)
    result = check_tiny(pipeline)
    assert result.exit_code == 0
    assert "StableDiffusionImg2ImgPipeline on cpu" in result.stdout
    assert "batched, " in result.stdout


@pytest.mark.parametrize(
    ("build", "arguments", "reason"),
    [
        (tiny.mixed_rows, (), "self_check: joint calls gave something else than alone"),
        (tiny.perturbed_attention, (), "module_state: the pipeline's call changes modules that all requests share"),
        (tiny.stable_diffusion, ("--step-batching", "off"), "disabled: `step_batching` is off"),
    ],
)
def test_what_is_not_batched_is_right_all_the_same_and_says_why(check_tiny, build, arguments, reason):
    result = check_tiny(build(), *arguments)
    assert result.exit_code == 0
    assert "tiny is right" in result.stdout
    assert f"one by one ({reason})" in result.stdout
    assert "differs from alone by at most 0 of 255" in result.stdout
    assert "requests together" not in result.stdout


def test_a_joint_forward_that_is_wrong_is_found(check_tiny, monkeypatch):
    """The self-check is made to let a denoiser pass whose rows look at each other."""
    monkeypatch.setattr("diffusion_backend.pipelines.meeting_point.tolerance_of", lambda output: 10.0)
    result = check_tiny(tiny.mixed_rows())
    assert result.exit_code == 1
    assert "tiny is not right" in result.stdout
    found = re.search(r"differs from alone by at most (\d+) of 255, 1 allowed", result.stdout)
    assert found is not None
    assert int(found[1]) > 1


def test_a_request_that_fails_is_not_right(check_tiny, monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the pipeline breaks")

    pipeline = tiny.stable_diffusion()
    monkeypatch.setattr(measure, "run_alone", fail)
    result = check_tiny(pipeline)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "error tiny is not right: the pipeline failed with made-up inputs: RuntimeError: the pipeline breaks"
    )


def test_a_model_that_does_not_load_is_not_right(call, repository, tmp_path):
    shutil.copytree(EMOJI, tmp_path / "torn", ignore=shutil.ignore_patterns("*.safetensors"))
    assert call("add", tmp_path / "torn").exit_code == 0
    result = call("check", "torn", "--device", "cpu")
    assert result.exit_code == 1
    error = result.stderr.splitlines()[-1]
    assert error.startswith("error torn is not right: cannot load the pipeline")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("emojj",), "there is no model 'emojj' in REPOSITORY; did you mean 'emoji'? (there are emoji, emoji_unary)"),
        (("emoji_unary",), "emoji_unary only passes requests on to emoji; try `diffusion-backend check emoji`"),
        (("emoji", "--device", "tpu:9"), "parameter 'device': 'tpu:9' is no device; give cpu or cuda:0, say"),
        (("emoji", "--device", "meta"), "parameter 'device': models are not served on meta; give cpu or cuda:0, say"),
        (("emoji", "--device", "cuda:99"), "parameter 'device': there is no cuda:99; PyTorch sees"),
    ],
)
def test_wrong_calls_are_refused(call, refused, repository, arguments, problem):
    assert call("add", EMOJI).exit_code == 0
    assert refused("check", *arguments).startswith(problem.replace("REPOSITORY", str(repository)))


def test_logs_are_as_they_were_after_a_check(call):
    logger = logging.getLogger("diffusion_backend")
    before = (logger.level, logger.propagate, list(logger.handlers))
    call("check", "nothing", "--verbose")
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


# -- the page ---------------------------------------------------------------------------------------------------


def page(result: Result, capsys: pytest.CaptureFixture[str]) -> str:
    from diffusion_backend.cli.console import output

    verdict.show(output(), "it", result)
    return capsys.readouterr().out


def test_seconds_a_step(capsys):
    # Alone: 1 x 0.5 s and 2 x 0.25 s; 8 together: one forward of 1 s, and 8 x 2 of 0.25 s.
    assert GOOD.step_alone_s == 1.0
    assert GOOD.step_together_s == 5.0
    assert "1 s alone, 5 s for 8 requests together: 1.6 times as many steps a second" in page(GOOD, capsys)


def test_sizes_and_the_gpu(capsys):
    text = page(dataclasses.replace(GOOD, memory=dataclasses.replace(MEMORY, gpu_peak=5 * 2**30)), capsys)
    assert "300 MiB before loading, 400 MiB after, 3.0 GiB at most; on the GPU 5.0 GiB at most" in text


@pytest.mark.parametrize(("difference", "right"), [(0.0, True), (1.0, True), (1.01, False), (float("inf"), False)])
def test_is_right_up_to_what_is_allowed(capsys, difference, right):
    result = dataclasses.replace(GOOD, difference=difference)
    assert result.is_right is right
    assert ("it is right" in page(result, capsys)) is right


def test_reasons_are_those_of_the_docs():
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text[text.index("| reason | meaning |") :].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(verdict._REASONS)


def test_difference():
    black, white = np.zeros((1, 2, 2, 3), np.uint8), np.full((1, 2, 2, 3), 255, np.uint8)
    sound = np.zeros((1, 1, 4), np.float32)
    assert difference(DiffusionOutput(images=black), DiffusionOutput(images=white)) == 255
    assert difference(DiffusionOutput(images=white), DiffusionOutput(images=black)) == 255  # uint8 does not wrap
    assert difference(DiffusionOutput(audio=sound), DiffusionOutput(audio=sound + 1)) == 127.5
    assert difference(DiffusionOutput(images=black, audio=sound), DiffusionOutput(images=black, audio=sound)) == 0
    assert difference(DiffusionOutput(images=black), DiffusionOutput(images=black[:, :1])) == float("inf")
    assert difference(DiffusionOutput(images=black), DiffusionOutput(video=black[None])) == float("inf")
    assert difference(DiffusionOutput(audio=sound), DiffusionOutput(audio=sound * np.nan)) == float("inf")
