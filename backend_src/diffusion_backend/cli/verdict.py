"""The page that `diffusion-backend check` prints."""

from __future__ import annotations

import math

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .result import Denoiser, Result

_REASONS = {
    "deterministic": "`deterministic` is true",
    "disabled": "`step_batching` is off",
    "module_state": "the pipeline's call changes modules that all requests share",
    "self_check": "joint calls gave something else than alone",
    "argument": "an argument of its calls cannot be compared with another call's",
    "output": "a joint output did not divide into the rows that went in",
    "unknown_call": "no argument of its calls has rows",
}
"""The reasons of `diffusion_solo_calls_total`, for people."""


def show(console: Console, name: str, result: Result) -> None:
    """Print what was found of the model `name`."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("pipeline", f"{result.pipeline_class} on {result.device}, {result.dtype}")
    table.add_row("gives", ", ".join(result.modalities))
    for denoiser in result.denoisers:
        table.add_row(escape(denoiser.name), _verdict(denoiser))
    if not result.denoisers:
        table.add_row("denoiser", "none was called: requests run one after another")
    table.add_row("together", _together(result))
    table.add_row("load", f"{result.load_s:.1f} s, the self-check included")
    table.add_row("memory", _memory(result))
    if result.denoisers:
        table.add_row("a step", _step(result))
    console.print(
        f"[bold]{escape(name)}[/] {'[bold green]is right[/]' if result.is_right else '[bold red]is not right[/]'}"
    )
    console.print(table)


def _verdict(denoiser: Denoiser) -> str:
    reasons = "; ".join(f"{reason}: {_REASONS.get(reason, reason)}" for reason in denoiser.reasons)
    alone = f"{_rows(denoiser.rows_alone)} a forward alone"
    if denoiser.requests > 1:
        return escape(
            f"{denoiser.verdict}, {alone}, {denoiser.rows} for {denoiser.requests} requests"
            + (f" ({reasons})" if reasons else "")
        )
    if not reasons:
        return f"batched, {alone} (no two requests met)"
    return escape(f"{denoiser.verdict} ({reasons})")


def _rows(count: int) -> str:
    return f"{count} row{'s' * (count != 1)}"


def _together(result: Result) -> str:
    if math.isinf(result.difference):
        return "[red]the outputs have other shapes than alone[/]"
    unit = "255" if result.modalities != ("audio",) else "255 (the range of the sound)"
    colour = "green" if result.is_right else "red"
    return (
        f"[{colour}]differs from alone by at most {result.difference:.3g} of {unit}[/], "
        f"{result.allowed} allowed for {result.dtype}"
    )


def _memory(result: Result) -> str:
    memory = result.memory
    text = f"{_size(memory.before)} before loading, {_size(memory.loaded)} after, {_size(memory.peak)} at most"
    return text if memory.gpu_peak is None else f"{text}; on the GPU {_size(memory.gpu_peak)} at most"


def _size(count: int) -> str:
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"


def _step(result: Result) -> str:
    text = f"{result.step_alone_s:.3g} s alone"
    together = result.step_together_s
    if together is None:
        return text
    gain = result.requests * result.step_alone_s / together
    return f"{text}, {together:.3g} s for {result.requests} requests together: {gain:.1f} times as many steps a second"
