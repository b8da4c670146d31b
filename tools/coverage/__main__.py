"""`python -m tools.coverage`: the table of pipeline classes, batched or not, and how far from alone."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.support.families import Case, all_cases

from .measure import TOLERANCE, Row, measure_by_name
from .page import write_page

console = Console()


def main(
    only: Annotated[list[str] | None, typer.Option(help="Class names, or parts of them; all by default.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes, of one thread each.", min=1)] = 2,
    out: Annotated[Path, typer.Option(help="Page to write; it is written only for a full run.")] = Path(
        "docs/coverage.md"
    ),
    results: Annotated[Path | None, typer.Option(help="Also write the rows as JSON.")] = None,
    quiet: Annotated[bool, typer.Option(help="Print failures and the summary only.")] = False,
) -> None:
    """Run four requests of each pipeline class alone and together, and print what was found."""
    cases = [case for case in all_cases() if not only or any(part.lower() in case.pipeline.lower() for part in only)]
    if not cases:
        raise typer.BadParameter(f"no class matches {only}", param_hint="--only")
    rows = _measure_all(cases, jobs)
    table = Table("class", "kind", "verdict", "difference", "rows", "s", "reason", title="Step-level batching")
    for row in rows:
        if not quiet or not row.is_right:
            style = "" if row.is_right else "red"
            cells = (
                row.pipeline,
                row.kind,
                row.verdict,
                f"{row.difference:.1e}",
                f"{row.rows:.1f}",
                f"{row.seconds:.1f}",
            )
            table.add_row(*cells, row.reason, style=style)
    console.print(table)
    verdicts = Counter(row.verdict for row in rows)
    right = sum(row.is_right for row in rows)
    console.print(f"{len(rows)} classes: {dict(verdicts)}; {right} as alone within {TOLERANCE:.0e}")
    if results is not None:
        results.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if not only:
        write_page(out, rows)
        console.print(f"wrote {out}")
    if any(not row.is_right for row in rows):
        raise typer.Exit(1)


def _measure_all(cases: list[Case], jobs: int) -> list[Row]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows = []
    spawn = multiprocessing.get_context("spawn")  # forked torch threads hang
    with (
        Progress(*columns, console=console) as progress,
        concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawn) as pool,
    ):
        task = progress.add_task("measuring", total=len(cases))
        futures = [pool.submit(measure_by_name, case.pipeline) for case in cases]
        for future in concurrent.futures.as_completed(futures):
            rows.append(future.result())
            progress.update(task, advance=1, description=rows[-1].pipeline[:40])
    return sorted(rows, key=lambda row: row.pipeline)


if __name__ == "__main__":
    typer.run(main)
