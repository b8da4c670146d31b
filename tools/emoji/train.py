"""Train the text-to-emoji model from nothing: `python -m tools.emoji.train`.

Three stages: an autoencoder, a denoiser, and the decoder once more on what the denoiser draws. Run the same command
again to continue after a stop.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import diffusers
import torch
import transformers

from tools.emoji.autoencoder import AutoencoderStage
from tools.emoji.budget import Budget
from tools.emoji.checkpoint import load_json, save_json
from tools.emoji.decoder import DecoderStage
from tools.emoji.denoiser import DenoiserStage
from tools.emoji.device import choose_device, has_fast_bfloat16
from tools.emoji.pipeline import write_pipeline
from tools.emoji.render import draw_all
from tools.emoji.sources import DEFAULT_ANNOTATIONS, DEFAULT_FONT, Emoji, MissingDataError, load_emoji
from tools.emoji.stage import Rhythm, StageRecord, run_stage
from tools.emoji.tokenizer import keep_tokenizer

INTERRUPTED = 130
# The most minutes and the most steps of each stage.
DEFAULT_BUDGETS = (("autoencoder", 40.0, 8_000), ("denoiser", 80.0, 40_000), ("decoder", 25.0, 4_000))


def main(arguments: list[str] | None = None) -> int:
    """Run the training; returns the exit status."""
    options = build_parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        train(options)
    except (MissingDataError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def train(options: argparse.Namespace) -> None:
    """Do the three stages and write the pipeline."""
    device = choose_device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    entries = load_emoji(options.annotations, options.limit)
    pictures = draw_all((entry.character for entry in entries), options.font)
    if options.restart:
        shutil.rmtree(options.work_dir, ignore_errors=True)
    _check_settings(options, entries)
    fast_bfloat16 = has_fast_bfloat16(device)
    print(f"{len(entries)} emoji, seed {options.seed}, device {device}, {torch.get_num_threads()} threads", flush=True)

    rhythm = Rhythm(options.checkpoint_seconds, options.measure_seconds)
    first = AutoencoderStage(pictures, options.seed, device, fast_bfloat16)
    budget = Budget(options.autoencoder_minutes, options.autoencoder_steps)
    autoencoder_record = run_stage(first, budget, options.work_dir / "autoencoder.pt", rhythm)

    tokenizer = keep_tokenizer(options.work_dir / "tokenizer", entries)
    second = DenoiserStage(entries, pictures, first.autoencoder, tokenizer, options.seed, device, fast_bfloat16)
    budget = Budget(options.denoiser_minutes, options.denoiser_steps)
    denoiser_record = run_stage(second, budget, options.work_dir / "denoiser.pt", rhythm)

    third = DecoderStage(entries, pictures, second.pipeline, options.seed, device, fast_bfloat16)
    budget = Budget(options.decoder_minutes, options.decoder_steps)
    # It builds on what the stages before it made: when those have gone on, it begins anew.
    checkpoint = options.work_dir / f"decoder-{autoencoder_record.steps}-{denoiser_record.steps}.pt"
    decoder_record = run_stage(third, budget, checkpoint, rhythm)

    write_pipeline(second.pipeline, entries, options.out)
    records = {"autoencoder": autoencoder_record, "denoiser": denoiser_record, "decoder": decoder_record}
    save_json(options.out / "training.json", _summary(options.seed, device, records))
    print(f"wrote {options.out}", flush=True)


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.emoji.train",
        description="Train the text-to-emoji model from nothing. Each stage ends when its minutes or its steps are "
        "used up, whichever comes first. Run the same command again to continue after a stop.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("models/emoji"), help="folder of the finished pipeline")
    parser.add_argument("--work-dir", type=Path, default=Path("build/emoji"), help="folder of the checkpoints")
    parser.add_argument("--restart", action="store_true", help="discard the checkpoints and begin anew")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: a GPU when there is one")
    parser.add_argument("--threads", type=positive(int), help="CPU threads; as many as there are cores when not given")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights, batches, captions and noise")
    parser.add_argument("--limit", type=positive(int), help="learn only this many emoji, spread over all of them")
    for stage, minutes, steps in DEFAULT_BUDGETS:
        parser.add_argument(f"--{stage}-minutes", type=positive(float), default=minutes, help=f"time for the {stage}")
        parser.add_argument(f"--{stage}-steps", type=positive(int), default=steps, help=f"most steps of the {stage}")
    parser.add_argument("--checkpoint-seconds", type=float, default=120.0, help="time between two checkpoints")
    parser.add_argument("--measure-seconds", type=float, default=240.0, help="time between two measurements")
    parser.add_argument("--font", type=Path, default=DEFAULT_FONT, help="Noto Color Emoji")
    parser.add_argument("--annotations", type=Path, default=DEFAULT_ANNOTATIONS, help="English annotations of CLDR")
    return parser


def positive(kind: type[float]) -> Callable[[str], float]:
    """Make an argument type that accepts only numbers above zero."""

    def parse(text: str) -> float:
        value = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError("must be above zero")
        return value

    parse.__name__ = f"positive {kind.__name__}"
    return parse


def _check_settings(options: argparse.Namespace, entries: list[Emoji]) -> None:
    """Refuse to continue from checkpoints that were made for other emoji or from another seed."""
    path = options.work_dir / "settings.json"
    settings = {"seed": options.seed, "emoji": [entry.character for entry in entries]}
    if load_json(path) not in (None, settings):
        raise ValueError(
            f"{options.work_dir} holds checkpoints of other emoji or another seed; "
            "use --restart to discard them, or another --work-dir"
        )
    save_json(path, settings)


def _summary(seed: int, device: torch.device, records: dict[str, StageRecord]) -> dict:
    """Return what `training.json` keeps of the run."""
    return {
        "seed": seed,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "versions": {
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
            "transformers": transformers.__version__,
        },
        "stages": {name: vars(record) for name, record in records.items()},
    }


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
