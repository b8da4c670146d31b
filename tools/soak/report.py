"""Writes a run down: JSON, a picture, and the part of the page on reliability that holds its figures.

`python -m tools.soak.report out/soak/soak.json` puts a run that was made before into the docs.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tools.markers import write_between

from .checks import WARM_UP

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
MAX_SAMPLES = 150
"""Of the server under load that are kept."""

BEGIN, END = "<!-- soak: begin, written by make soak -->", "<!-- soak: end -->"


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Write the results, the samples one a line: all of the idle server, and some of those under load."""
    under_load = [sample for sample in results["samples"] if not sample["idle"]]
    kept = under_load[:: len(under_load) // MAX_SAMPLES + 1]
    samples = [sample for sample in results["samples"] if sample["idle"] or sample in kept]
    text = json.dumps({**results, "samples": []}, indent=1)
    lines = ",\n".join(f"  {json.dumps(sample)}" for sample in samples)
    path.write_text(text.replace('"samples": []', f'"samples": [\n{lines}\n ]') + "\n", encoding="utf-8")


def draw(path: Path, results: dict[str, Any]) -> None:
    """Draw memory, descriptors, threads and shared memory over the requests; points are the idle server."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    samples = results["samples"]
    idle = [sample for sample in samples if sample["idle"]]
    figure, axes = plt.subplots(2, 2, figsize=(11, 6.5), sharex=True, layout="constrained")
    titles = {"own_kib": "memory of its own, MiB", "descriptors": "file descriptors", "threads": "threads"}
    for axis, (key, title) in zip(axes.flat, titles.items(), strict=False):
        scale = 1024 if key == "own_kib" else 1
        for name in samples[0]["processes"]:
            (line,) = axis.plot(
                [sample["requests"] for sample in samples],
                [sample["processes"][name][key] / scale for sample in samples],
                linewidth=0.8,
                alpha=0.6,
                label=name,
            )
            axis.plot(
                [sample["requests"] for sample in idle],
                [sample["processes"][name][key] / scale for sample in idle],
                ".",
                color=line.get_color(),
            )
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0)
    shared = axes.flat[3]
    shared.plot([s["requests"] for s in samples], [s["shm_kib"] / 1024 for s in samples], color="black", linewidth=0.8)
    shared.set_title("shared memory in /dev/shm, MiB", fontsize=10)
    shared.set_ylim(bottom=0)
    for axis in axes.flat:
        axis.axvline(WARM_UP * results["requests"], color="grey", linestyle=":", linewidth=0.8)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("requests ended")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=len(labels))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def figures(results: dict[str, Any], picture: str, data: str) -> str:
    """Return the figures of a run as Markdown.

    Args:
        picture, data: the links to the picture and to the JSON file.
    """
    ended: Counter[str] = Counter()
    for kinds in results["ended_by_kind"].values():
        ended.update(kinds)
    settings, wanted, sent = results["settings"], results["settings"]["requests"], results["requests"]
    cancelled = ended["cancelled"] + ended["gone"]
    short = "" if sent == wanted else f" (of {wanted:,} asked for: the time was up)"
    machine, minutes = results["machine"], results["seconds"] / 60
    lines = [
        f"`{results['command']}`, {results['started_at'][:10]}, commit `{results['commit']}`, on "
        f"{machine['cores']} cores ({machine['cpu']}), {settings['concurrency']} clients at once: "
        f"**{sent:,} requests**{short} in {minutes:.0f} "
        f"minutes; {ended['finished']:,} finished, {cancelled:,} given up by their clients ({cancelled / sent:.0%}), "
        f"{ended['failed']:,} faulty ({ended['failed'] / sent:.0%}), {ended['late']:,} out of time, "
        f"{ended['rejected'] + ended['refused']:,} bad.",
        "",
        f"![memory, descriptors, threads and shared memory over the run]({picture})",
        "",
        "Points are the idle server, between two parts of the run; lines are the server under load. "
        f"The samples: [{data}]({data}).",
        "",
        "| check | found | |",
        "| --- | --- | --- |",
    ]
    for check in results["checks"]:
        says = check["says"].replace("|", "\\|")
        lines.append(f"| {check['name']} | {says} | {'holds' if check['holds'] else '**does not hold**'} |")
    return "\n".join(lines)


def into_docs(results: dict[str, Any]) -> None:
    """Put the figures of a run into the page on reliability, its data and its picture beside it."""
    publish(PAGE, figures(results, "images/soak.png", "soak.json"))
    write_json(PAGE.parent / "soak.json", results)
    draw(PAGE.parent / "images" / "soak.png", results)


def publish(page: Path, text: str) -> None:
    """Put the figures between the marks of the page.

    Raises:
        ValueError: the page has no such marks.
    """
    write_between(page, BEGIN, END, f"\n{text}\n")


if __name__ == "__main__":
    into_docs(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
