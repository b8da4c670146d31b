"""Measure the text-to-emoji model: `python -m tools.emoji.report`.

Draws emoji from names and from keywords alone, and counts how often the nearest of all the originals
is the one that was asked for. Writes contact sheets, and the figures as JSON and into the documents.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline

from tools.emoji.autoencoder import reconstruction_error, to_tensor
from tools.emoji.captions import keyword_prompts, name_prompts
from tools.emoji.chart import Line, line_chart
from tools.emoji.checkpoint import load_json, save_json
from tools.emoji.device import choose_device
from tools.emoji.document import quality_table, training_table, write_part
from tools.emoji.metrics import NearestEmoji, share_within
from tools.emoji.pipeline import DRAW_STEPS, GUIDANCE, draw
from tools.emoji.render import draw_all
from tools.emoji.sheet import Pair, contact_sheet
from tools.emoji.sources import DEFAULT_ANNOTATIONS, DEFAULT_FONT, MissingDataError, read_labels

TIMED_DRAWS = 5


@dataclass(frozen=True)
class Outcome:
    """The drawn pictures of some prompts and the place of the right emoji for each."""

    prompts: list[tuple[int, str]]
    pictures: np.ndarray
    ranks: list[int]

    def figures(self) -> dict[str, float]:
        """Return the shares of prompts whose emoji is the nearest, and among the nearest five."""
        return {
            "prompts": len(self.prompts),
            "top1": round(share_within(self.ranks, 1), 4),
            "top5": round(share_within(self.ranks, 5), 4),
        }

    def sheet_pairs(self, originals: np.ndarray, places: int) -> list[Pair]:
        """Pair each picture with its original; a hit is among the nearest `places`."""
        return [
            Pair(originals[index], picture, prompt, rank < places)
            for (index, prompt), picture, rank in zip(self.prompts, self.pictures, self.ranks, strict=True)
        ]


def main(arguments: list[str] | None = None) -> int:
    """Measure and report; returns the exit status."""
    options = build_parser().parse_args(arguments)
    try:
        report(options)
    except (MissingDataError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def report(options: argparse.Namespace) -> None:
    """Do all the measurements and write the results."""
    device = choose_device(options.device)
    entries = read_labels(options.model / "labels.json", options.annotations)
    originals = draw_all((entry.character for entry in entries), options.font)
    nearest = NearestEmoji(originals)

    start = time.monotonic()
    pipeline = DiffusionPipeline.from_pretrained(options.model, torch_dtype=torch.float32).to(device)
    load_seconds = time.monotonic() - start
    pipeline.set_progress_bar_config(disable=True)
    draw_seconds = _time_draw(pipeline, entries[0].name)
    mse = reconstruction_error(pipeline.vae, to_tensor(originals).to(device))

    names = _ask(pipeline, nearest, name_prompts(entries, options.prompts))
    keywords = _ask(pipeline, nearest, keyword_prompts(entries, options.prompts, options.seed))
    figures = {
        "emoji": len(entries),
        "steps": DRAW_STEPS,
        "guidance": GUIDANCE,
        "names": names.figures(),
        "keywords": {**keywords.figures(), "seed": options.seed},
        "autoencoder_mse": round(mse, 5),
        "load_seconds": round(load_seconds, 2),
        "draw_seconds": round(draw_seconds, 2),
        "threads": torch.get_num_threads(),
        "megabytes": round(sum(file.stat().st_size for file in options.model.rglob("*") if file.is_file()) / 1e6, 1),
    }
    print_figures(figures)
    print("names whose nearest picture is another:", ", ".join(_missed(names, 1)) or "none")
    print("keywords whose emoji is not among the nearest five:", "; ".join(_missed(keywords, 5)) or "none")

    options.images.mkdir(parents=True, exist_ok=True)
    contact_sheet(names.sheet_pairs(originals, 1)).save(options.images / "emoji-names.png", optimize=True)
    contact_sheet(keywords.sheet_pairs(originals, 5)).save(options.images / "emoji-keywords.png", optimize=True)
    _write_chart(options.model / "training.json", options.images / "emoji-training.png")
    if options.json is not None:
        save_json(options.json, figures)
    if options.documents:
        write_part(options.documents / "emoji-model.md", "quality", quality_table(figures))
        for document in (options.documents / "emoji-model.md", options.model / "README.md"):
            write_part(document, "training", training_table(options.model / "training.json"))


def print_figures(figures: dict) -> None:
    """Print the figures for a person."""
    names, keywords = figures["names"], figures["keywords"]
    print(f"{figures['emoji']} emoji, {figures['steps']} steps, guidance {figures['guidance']:g}")
    print(f"names:       top-1 {names['top1']:.3f}, top-5 {names['top5']:.3f} of {names['prompts']} prompts")
    print(f"keywords:    top-1 {keywords['top1']:.3f}, top-5 {keywords['top5']:.3f} of {keywords['prompts']} prompts")
    print(f"autoencoder: mean squared error {figures['autoencoder_mse']:.5f} on -1..1")
    print(f"loading:     {figures['load_seconds']:.2f} s")
    print(f"one picture: {figures['draw_seconds']:.2f} s on {figures['threads']} threads")
    print(f"size:        {figures['megabytes']:.1f} MB")


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.emoji.report",
        description="Measure how often the text-to-emoji model draws what it was asked for.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=Path("models/emoji"), help="folder of the pipeline")
    parser.add_argument("--prompts", type=int, default=96, help="names, and as many sets of keywords, to ask for")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of keywords; pictures use 0, 1, 2, …")
    parser.add_argument("--images", type=Path, default=Path("docs/images"), help="folder of the contact sheets")
    parser.add_argument("--documents", type=Path, help="write the figures into this folder's documents and the card")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: a GPU when there is one")
    parser.add_argument("--font", type=Path, default=DEFAULT_FONT, help="Noto Color Emoji")
    parser.add_argument("--annotations", type=Path, default=DEFAULT_ANNOTATIONS, help="English annotations of CLDR")
    return parser


def _ask(pipeline: StableDiffusionPipeline, nearest: NearestEmoji, prompts: list[tuple[int, str]]) -> Outcome:
    """Draw every prompt, the i-th from seed i."""
    pictures = draw(pipeline, [prompt for _, prompt in prompts], range(len(prompts)))
    ranks = [nearest.rank(picture, index) for picture, (index, _) in zip(pictures, prompts, strict=True)]
    return Outcome(prompts, pictures, ranks)


def _missed(outcome: Outcome, places: int) -> list[str]:
    return [prompt for (_, prompt), rank in zip(outcome.prompts, outcome.ranks, strict=True) if rank >= places]


def _time_draw(pipeline: StableDiffusionPipeline, prompt: str) -> float:
    """Return the median seconds for one picture, after one that warms up."""
    seconds = []
    for seed in range(TIMED_DRAWS + 1):
        start = time.monotonic()
        draw(pipeline, [prompt], [seed])
        seconds.append(time.monotonic() - start)
    return statistics.median(seconds[1:])


def _write_chart(training: Path, image: Path) -> None:
    """Draw how the shares of recognised names rose, where the model came with its record."""
    record = load_json(training)
    if record is None:
        return
    history = record["stages"]["denoiser"]["history"]
    lines = [
        Line(title, [(row["minutes"], row[key]) for row in history])
        for title, key in (("top-1", "top1"), ("top-5", "top5"), ("loss", "loss"))
    ]
    line_chart("denoiser", "minutes", lines, top=1.0).save(image, optimize=True)


if __name__ == "__main__":
    raise SystemExit(main())
