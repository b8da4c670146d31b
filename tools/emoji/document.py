"""The figures in the documents: the report writes them between markers, so that none is typed by hand."""

from __future__ import annotations

from pathlib import Path

from tools.emoji.checkpoint import load_json
from tools.markers import write_between


def quality_table(figures: dict) -> str:
    """Return what the report measured as a table and a sentence."""
    rows = [
        f"| {figures[key]['prompts']} {title} | {figures[key]['top1']:.3f} | {figures[key]['top5']:.3f} |"
        for key, title in (("names", "names"), ("keywords", "sets of keywords"))
    ]
    return "\n".join(
        [
            "| | Top-1 | Top-5 |",
            "|---|---|---|",
            *rows,
            "",
            f"The autoencoder alone reproduces the {figures['emoji']} originals with a mean squared error of "
            f"{figures['autoencoder_mse']:.4f} on a scale from -1 to 1.",
        ]
    )


def training_table(training: Path) -> str:
    """Return the steps and minutes of each stage of the record `training.json`."""
    record = load_json(training)
    rows = [
        f"| {name} | {stage['steps']:,} | {stage['seconds'] / 60:.0f} |" for name, stage in record["stages"].items()
    ]
    return "\n".join(["| Stage | Steps | Minutes |", "|---|---|---|", *rows])


def write_part(document: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- name -->` and `<!-- /name -->` in a document.

    Raises:
        ValueError: the document does not have exactly one such place.
    """
    write_between(document, f"<!-- {name} -->", f"<!-- /{name} -->", f"\n{text}\n")
