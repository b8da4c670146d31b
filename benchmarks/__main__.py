"""`make bench`, or `python -m benchmarks`: run the arms, show a table, write the results as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.machine import ROOT, cores, describe_commit, describe_machine, other_load
from benchmarks.report import LATEST, make_console, show
from benchmarks.suite import ARMS, Settings, run
from diffusion_backend.serve import ServeError

SCHEMA = 1
"""Of the results file; grows when the meaning of a field changes."""


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="Very few and short requests: only to see that the benchmarks work.")
    ] = False,
    only: Annotated[list[str] | None, typer.Option(help=f"Run this arm; repeatable: {', '.join(ARMS)}.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of every arm but idle. (default: 5)")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Mixed requests in a round. (default: 48)")] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once; repeatable. (default: 8 and 16)")
    ] = None,
    idle_seconds: Annotated[float | None, typer.Option(min=0.1, help="Watch of the idle server. (default: 10)")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="PyTorch threads in every arm. (default: cores)")] = None,
    wait_policy: Annotated[
        str, typer.Option(help="How these threads wait for each other: PASSIVE sleeps, ACTIVE spins.")
    ] = "PASSIVE",
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = LATEST.parent,
) -> None:
    """Measure on this machine what serving costs and what step-level batching gives.

    Writes latest.json into the folder for results (with --quick: quick.json, with --only: a file named after the arms).
    Exits with 0 whether the goals are met or not, with 1 if an arm could not be run.
    """
    console = make_console()
    arms = tuple(arm for arm in ARMS if only is None or arm in only)
    if unknown := set(only or ()) - set(ARMS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; there are: {', '.join(ARMS)}", param_hint="--only")
    if wait_policy not in ("PASSIVE", "ACTIVE"):
        raise typer.BadParameter("it is PASSIVE or ACTIVE", param_hint="--wait-policy")
    settings = Settings(
        model=ROOT / "models" / "emoji",
        repository=ROOT / "model_repository",
        arms=arms,
        threads=threads or cores(),
        wait_policy=wait_policy,
    )
    if quick:
        settings = replace(
            settings,
            rounds=1,
            single_steps=4,
            single_requests=2,
            mixed_steps=(2, 3, 4),
            mixed_requests=6,
            concurrencies=(4,),
            forward_repeats=2,
            idle_s=1.0,
            engine_steps=50,
            fairness_rounds=1,
            fairness_quick=True,
        )
    given: dict[str, Any] = {
        "rounds": rounds,
        "mixed_requests": requests,
        "concurrencies": tuple(concurrency) if concurrency else None,
        "idle_s": idle_seconds,
    }
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})

    results: dict[str, Any] = {
        "schema": SCHEMA,
        "quick": quick,
        "command": _command(sys.argv[1:]),
        "commit": describe_commit(),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "settings": settings.as_dict(),
        "other_load_percent": {"before": other_load()},
    }
    try:
        with console.status("starting") as status:

            def progress(what: str) -> None:
                status.update(what)
                if not console.is_terminal:
                    console.print(what, highlight=False)

            outcome = run(settings, progress)
    except (RuntimeError, ServeError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        sys.exit(1)
    results["other_load_percent"]["after"] = other_load()
    results["figures"] = [figure.as_dict() for figure in outcome.figures]
    results["raw"] = outcome.raw

    show(console, results)
    out.mkdir(parents=True, exist_ok=True)
    # Only a whole run takes the place of the last whole run.
    path = out / ("quick.json" if quick else LATEST.name if arms == ARMS else f"{'-'.join(arms)}.json")
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(f"written: {path}", soft_wrap=True)


def _command(arguments: list[str]) -> str:
    """Return the command to repeat the run with: without --out, which changes no figure and names a folder."""
    kept = ["python -m benchmarks"]
    skip = False
    for argument in arguments:
        if not skip and argument != "--out" and not argument.startswith("--out="):
            kept.append(argument)
        skip = argument == "--out"
    return " ".join(kept)


if __name__ == "__main__":
    typer.run(main)
