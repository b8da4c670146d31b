"""`make bench`, or `python -m benchmarks`: run the arms, show a table, write the results, the plots and the tables."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.fleet import BASELINES, missing_extras
from benchmarks.machine import ROOT, cores, describe_commit, describe_machine, other_load
from benchmarks.plan import ARMS, QUICK, Settings
from benchmarks.report import LATEST, RECORDS, make_console, show, write_all
from benchmarks.suite import run
from diffusion_backend.serve import ServeError

SCHEMA = 2
"""Of the results file; grows when the meaning of a field changes."""


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="Very few and short requests: only to see that the benchmarks work.")
    ] = False,
    only: Annotated[list[str] | None, typer.Option(help=f"Run this arm; repeatable: {', '.join(ARMS)}.")] = None,
    baseline: Annotated[
        list[str] | None, typer.Option(help=f"Run this baseline; repeatable: {', '.join(BASELINES)}, or none.")
    ] = None,
    budget_minutes: Annotated[
        float, typer.Option(min=0, help="Begin no round that would not end within so many minutes; 0 for no limit.")
    ] = 15.0,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds at most. (default: 3)")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests of a closed loop. (default: 24)")] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once; repeatable. (default: 8 and 16)")
    ] = None,
    idle_seconds: Annotated[float | None, typer.Option(min=0.1, help="Watch of the idle server. (default: 8)")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="PyTorch threads in every arm. (default: cores)")] = None,
    wait_policy: Annotated[
        str, typer.Option(help="How these threads wait for each other: PASSIVE sleeps, ACTIVE spins.")
    ] = "PASSIVE",
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = LATEST.parent,
) -> None:
    """Measure on this machine what serving costs, what step-level batching gives, and what a user would write instead.

    Writes latest.json and records.jsonl into the folder for results (with --quick or --only, files of other names).
    A whole run into its usual folder also writes the plots and the tables of both READMEs.
    Exits with 0 whether the goals are met or not, with 1 if an arm could not be run.
    """
    console = make_console()
    arms = _chosen("--only", only, ARMS)
    baselines = () if baseline == ["none"] else _chosen("--baseline", baseline, tuple(BASELINES))
    if wait_policy not in ("PASSIVE", "ACTIVE"):
        raise typer.BadParameter("it is PASSIVE or ACTIVE", param_hint="--wait-policy")
    settings = Settings(
        model=ROOT / "models" / "emoji",
        arms=arms,
        baselines=baselines,
        budget_s=60 * budget_minutes,
        threads=threads or cores(),
        wait_policy=wait_policy,
        **(QUICK if quick else {}),
    )
    given: dict[str, Any] = {
        "rounds": rounds,
        "mixed_requests": requests,
        "concurrencies": tuple(concurrency) if concurrency else None,
        "idle_s": idle_seconds,
    }
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    if settings.needs_servers:
        _install_extras(settings.baselines)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are ended, too

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
        # On a terminal only, and seldom: what draws it runs beside the load generator.
        line = console.status("starting", refresh_per_second=1) if console.is_terminal else None
        with line or contextlib.nullcontext():

            def say(what: str) -> None:
                if line is not None:
                    line.update(what)
                else:
                    console.print(what, highlight=False, markup=False)

            outcome = run(settings, say)
    except (RuntimeError, ServeError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        sys.exit(1)
    results["other_load_percent"]["after"] = other_load()
    order = {arm: place for place, arm in enumerate(("single", "load", "mixes", "poisson", "cancelling", "memory"))}
    outcome.figures.sort(key=lambda figure: order.get(figure.key.partition(".")[0], len(order)))
    results["figures"] = [figure.as_dict() for figure in outcome.figures]
    results["raw"] = outcome.raw
    show(console, results)

    whole = not quick and arms == ARMS
    stem = LATEST.stem if whole else "quick" if quick else "-".join(arms)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{stem}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    records = out / (RECORDS.name if whole else f"{stem}.{RECORDS.name}")
    records.write_text("".join(json.dumps(record) + "\n" for record in outcome.records), encoding="utf-8")
    written = [path, records]
    if whole and out.resolve() == LATEST.parent:
        written += write_all(results, outcome.records)
    for each in written:
        console.print(f"written: {each}", soft_wrap=True)


def _chosen(option: str, names: Sequence[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in their usual order; all of them if none was given."""
    if unknown := set(names or ()) - set(known):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; there are: {', '.join(known)}", param_hint=option)
    return tuple(name for name in known if names is None or name in names)


def _install_extras(baselines: Sequence[str]) -> None:
    """Install what only the baselines need, where it is missing; nothing that is installed changes its version."""
    if not missing_extras(baselines):
        return
    files = [ROOT / "requirements.lock", ROOT / "benchmarks" / "requirements.txt"]
    arguments = [argument for file in files for argument in ("-r", str(file))]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)
    if still := missing_extras(baselines):
        sys.exit(f"error: {', '.join(still)} could not be installed; choose others with --baseline, or none")


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
