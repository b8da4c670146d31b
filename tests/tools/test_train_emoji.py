"""A smoke run of the training through its command line, with a stop and a continuation."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from tools.emoji import train
from tools.emoji.autoencoder import AutoencoderStage, encode_all, standardise_latents, to_tensor
from tools.emoji.budget import Budget
from tools.emoji.pipeline import draw
from tools.emoji.render import draw_all
from tools.emoji.sources import load_emoji
from tools.emoji.stage import Rhythm, run_stage
from tools.emoji.tokenizer import keep_tokenizer

ROOT = Path(__file__).parents[2]
LIMIT = 8
SEED = 3
AUTOENCODER_STEPS, DENOISER_STEPS, DECODER_STEPS = 12, 8, 9
STAGES = (("autoencoder", AUTOENCODER_STEPS), ("denoiser", DENOISER_STEPS), ("decoder", DECODER_STEPS))
SHORT = Budget(steps=5)
SELDOM = Rhythm(checkpoint_seconds=1e9, measure_seconds=1e9)


@dataclass(frozen=True)
class SmokeRun:
    """What the two runs of the command printed, and where the second wrote the pipeline."""

    first: list[str]
    first_status: int
    second: list[str]
    out: Path


def start(folder: Path) -> subprocess.Popen[str]:
    """Start the training of a few emoji for a few steps, with a checkpoint after every step."""
    command = [sys.executable, "-m", "tools.emoji.train", "--out", folder / "model", "--work-dir", folder / "work"]
    command += ["--limit", LIMIT, "--seed", SEED, "--device", "cpu", "--threads", 1]
    command += ["--autoencoder-steps", AUTOENCODER_STEPS, "--denoiser-steps", DENOISER_STEPS]
    command += ["--decoder-steps", DECODER_STEPS]
    command += ["--checkpoint-seconds", 0, "--measure-seconds", 3600]
    return subprocess.Popen([str(part) for part in command], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> SmokeRun:
    print(f"seed {SEED}")
    folder = tmp_path_factory.mktemp("emoji")
    first: list[str] = []
    stopped = False
    with start(folder) as process:
        assert process.stdout is not None
        for line in process.stdout:
            first.append(line.strip())
            if line.startswith("denoiser: saved at step 3") and not stopped:
                process.send_signal(signal.SIGTERM)
                stopped = True
    with start(folder) as resumed:
        output, _ = resumed.communicate()
    assert resumed.returncode == 0, output
    return SmokeRun(first, process.returncode, output.splitlines(), folder / "model")


@pytest.mark.slow
def test_stop_keeps_the_work_and_the_next_run_continues(smoke: SmokeRun) -> None:
    assert smoke.first_status == train.INTERRUPTED
    stopped = next(line for line in smoke.first if line.startswith("denoiser: stopped at step"))
    step = int(stopped.split(";")[0].split()[-1])
    assert 3 <= step < DENOISER_STEPS
    assert f"autoencoder: already finished at step {AUTOENCODER_STEPS}" in "\n".join(smoke.second)
    assert any(line.startswith(f"denoiser: resumed at step {step} ") for line in smoke.second)
    assert f"denoiser: saved at step {step + 1}" in smoke.second
    assert "denoiser: saved at step 1" not in smoke.second


@pytest.mark.slow
def test_losses_fall(smoke: SmokeRun) -> None:
    record = json.loads((smoke.out / "training.json").read_text(encoding="utf-8"))
    assert record["seed"] == SEED
    for stage, steps in STAGES:
        history = record["stages"][stage]["history"]
        assert record["stages"][stage]["steps"] == steps
        assert history[0]["step"] == 1
        assert history[-1]["step"] == steps
        assert history[-1]["loss"] < 0.95 * history[0]["loss"]
    assert record["stages"]["autoencoder"]["history"][-1]["mse"] < 0.5


@pytest.mark.slow
def test_pipeline_loads_and_draws(smoke: SmokeRun) -> None:
    pipeline = DiffusionPipeline.from_pretrained(smoke.out)
    pipeline.set_progress_bar_config(disable=True)
    pictures = draw(pipeline, ["red apple", "rocket"], [1, 2])
    assert pictures.shape == (2, 64, 64, 3)
    assert all(picture.std() > 1 for picture in pictures)
    assert np.array_equal(pictures, draw(pipeline, ["red apple", "rocket"], [1, 2]))


@pytest.mark.slow
def test_labels_are_those_that_were_trained(smoke: SmokeRun) -> None:
    labels = json.loads((smoke.out / "labels.json").read_text(encoding="utf-8"))
    assert labels == [entry.label for entry in load_emoji(limit=LIMIT)]
    assert len(labels) == LIMIT


@pytest.mark.slow
def test_the_tokens_keep_their_numbers_when_a_run_continues(smoke: SmokeRun) -> None:
    kept = json.loads((smoke.out.parent / "work" / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))
    written = json.loads((smoke.out / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))
    assert written["model"] == kept["model"]


def test_a_tokenizer_that_was_kept_is_taken_again(tmp_path: Path) -> None:
    entries = load_emoji(limit=4)
    first = keep_tokenizer(tmp_path / "tokenizer", entries)
    again = keep_tokenizer(tmp_path / "tokenizer", load_emoji(limit=8))
    assert again.get_vocab() == first.get_vocab()
    assert again.model_max_length == first.model_max_length
    assert again("red apple").input_ids == first("red apple").input_ids


def new_stage() -> AutoencoderStage:
    """Make the autoencoder's stage for four pictures, in float32."""
    pictures = draw_all(["🍎", "🍏", "🐧", "🚀"])
    return AutoencoderStage(pictures, SEED, torch.device("cpu"), bfloat16=False)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> AutoencoderStage:
    stage = new_stage()
    assert run_stage(stage, SHORT, tmp_path_factory.mktemp("unbroken") / "stage.pt", SELDOM).finished
    return stage


class StopAfter:
    """Lets a stage do some steps, then interrupts it as a signal would."""

    def __init__(self, stage: AutoencoderStage, steps: int) -> None:
        self._step, self._left = stage.step, steps
        stage.step = self  # type: ignore[method-assign]

    def __call__(self, step: int, progress: float) -> torch.Tensor:
        if self._left == 0:
            raise KeyboardInterrupt
        self._left -= 1
        return self._step(step, progress)


@pytest.mark.parametrize("stop", [2, 4])
def test_resumed_stage_ends_where_an_unbroken_one_does(tmp_path: Path, unbroken: AutoencoderStage, stop: int) -> None:
    """Stops before and after the point from which only the decoder learns."""
    stopped = new_stage()
    StopAfter(stopped, stop)
    with pytest.raises(KeyboardInterrupt):
        run_stage(stopped, SHORT, tmp_path / "stage.pt", SELDOM)
    resumed = new_stage()
    record = run_stage(resumed, SHORT, tmp_path / "stage.pt", SELDOM)
    assert (record.steps, record.finished) == (SHORT.steps, True)
    for name, weights in unbroken.autoencoder.state_dict().items():
        torch.testing.assert_close(resumed.autoencoder.state_dict()[name], weights, rtol=1e-4, atol=1e-5)


def test_larger_budget_continues_a_finished_stage(tmp_path: Path) -> None:
    assert run_stage(new_stage(), Budget(steps=1), tmp_path / "stage.pt", SELDOM).finished
    again = run_stage(new_stage(), Budget(steps=1), tmp_path / "stage.pt", SELDOM)
    assert (again.steps, again.finished) == (1, True)
    longer = run_stage(new_stage(), Budget(steps=2), tmp_path / "stage.pt", SELDOM)
    assert (longer.steps, longer.finished) == (2, True)


def test_standardised_latents_have_no_mean_and_unit_spread() -> None:
    torch.manual_seed(SEED)
    pictures = draw_all(["🍎", "🍏", "🐧", "🚀"])
    autoencoder = new_stage().autoencoder
    before = encode_all(autoencoder, to_tensor(pictures))
    decoded = autoencoder.decode(before).sample
    standardise_latents(autoencoder, before)
    after = encode_all(autoencoder, to_tensor(pictures))
    torch.testing.assert_close(after.mean(dim=(0, 2, 3)), torch.zeros(16), rtol=0, atol=1e-4)
    torch.testing.assert_close(after.std(dim=(0, 2, 3)), torch.ones(16), rtol=0, atol=1e-4)
    # Away from the border, where padding reaches, the decoder draws what it drew before.
    difference = (autoencoder.decode(after).sample - decoded).detach().abs()
    assert difference.mean() < 0.1 * decoded.detach().abs().mean() + 0.05


@pytest.mark.parametrize(
    ("option", "package"), [("--font", "fonts-noto-color-emoji"), ("--annotations", "unicode-cldr-core")]
)
def test_missing_data_is_an_error_that_helps(
    option: str, package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = train.main([option, str(tmp_path / "missing"), "--limit", "2", "--work-dir", str(tmp_path / "work")])
    assert status == 1
    assert f"apt-get install {package}" in capsys.readouterr().err


def test_checkpoints_of_another_seed_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    characters = [entry.character for entry in load_emoji(limit=2)]
    (tmp_path / "settings.json").write_text(json.dumps({"seed": 1, "emoji": characters}), encoding="utf-8")
    status = train.main(["--limit", "2", "--seed", "2", "--device", "cpu", "--work-dir", str(tmp_path)])
    assert status == 1
    assert "--restart" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--limit", "0"], ["--denoiser-minutes", "-1"], ["--seed", "x"]])
def test_wrong_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        train.build_parser().parse_args(arguments)
    assert arguments[0] in capsys.readouterr().err
