"""`make soak`, or `python -m tools.soak`: thousands of mixed requests; was anything lost, leaked or miscounted?"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.machine import describe_commit, describe_machine
from diffusion_backend.serve import ServeError

from . import report
from .report import draw, write_json
from .run import Settings, as_json, soak


def main(
    requests: Annotated[int, typer.Option(min=1, help="Requests to send.")] = Settings.requests,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="Begin no new part after so long, though fewer were sent.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the requests; the same seed sends the same ones.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Clients that send at once.")] = Settings.concurrency,
    parts: Annotated[
        int, typer.Option(min=2, help="Parts of the run; after each the server is left to become idle, and looked at.")
    ] = Settings.sections,
    out: Annotated[Path, typer.Option(help="Folder for soak.json, soak.png and the server's log.")] = Path("out/soak"),
    into_docs: Annotated[
        bool,
        typer.Option("--into-docs", help="Also put the figures into docs/reliability.md, data and picture beside it."),
    ] = False,
) -> None:
    """Serve the models that ship, send mixed requests, and check that nothing is lost, leaked or miscounted.

    Of the requests 10 % are given up by their clients, 2 % fail in the pipeline, 4 % are wrong, 2 % run out of time.
    Exits with 1, and says what does not hold, if a process's memory, its descriptors, its threads or the shared memory
    grow after the first tenth, an answer is lost or wrong, or a metric is not what the clients counted.
    """
    console = Console(soft_wrap=True)
    settings = Settings(requests=requests, seed=seed, concurrency=concurrency, sections=parts, minutes=minutes)
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "command": _command(sys.argv[1:]),
        "commit": describe_commit(),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
    }
    console.print(f"{requests:,} requests, {concurrency} at once, seed {seed}", highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    log_file = out / "server.log"
    log_file.unlink(missing_ok=True)
    try:
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("starting", total=requests)
            outcome = soak(
                settings, lambda done, what: bar.update(task, completed=done, description=what), log_file=log_file
            )
    except ServeError as error:
        console.print(f"error: {error}", style="red", markup=False)
        sys.exit(1)
    results |= as_json(outcome)
    write_json(out / "soak.json", results)
    draw(out / "soak.png", results)
    if into_docs:
        report.into_docs(results)
    _show(console, results)
    console.print(f"written: {out / 'soak.json'}, {out / 'soak.png'}", highlight=False)
    failed = [check for check in outcome.checks if not check.holds]
    for check in failed:
        console.print(f"does not hold: {check.name}: {check.says}", style="red", markup=False)
    sys.exit(1 if failed else 0)


def _show(console: Console, results: dict[str, Any]) -> None:
    table = Table("check", "found", "holds")
    for check in results["checks"]:
        table.add_row(
            check["name"], check["says"], "yes" if check["holds"] else "NO", style="" if check["holds"] else "red"
        )
    console.print(table)
    kinds = Table("kind of request", "how they ended")
    for kind, ended in results["ended_by_kind"].items():
        kinds.add_row(kind, ", ".join(f"{count} {how}" for how, count in ended.items()))
    console.print(kinds)


def _command(arguments: list[str]) -> str:
    """Return the command to repeat the run with: without folders, which change no figure."""
    kept, skip = ["python -m tools.soak"], False
    for argument in arguments:
        if not skip and argument not in ("--out", "--into-docs") and not argument.startswith("--out="):
            kept.append(argument)
        skip = argument == "--out"
    return " ".join(kept)


if __name__ == "__main__":
    typer.run(main)
