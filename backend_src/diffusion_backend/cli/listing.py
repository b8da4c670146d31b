"""The table of `diffusion-backend list`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .repository import Kind, Model

_STYLES = {Kind.STREAMING: "green", Kind.UNARY: "green", Kind.OTHER: "dim", Kind.BROKEN: "red"}


def show(console: Console, models: Sequence[Model]) -> None:
    """Print the models of a repository, and what is wrong with the broken ones."""
    twins = {model.stream_model: model.name for model in models if model.kind is Kind.UNARY}
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("name", "kind", "source", "dtype", "max_num_seqs", "twin"):
        table.add_column(heading, overflow="fold")
    for model in models:
        source, dtype, num_seqs = "", "", ""
        if model.config is not None:
            source, dtype, num_seqs = model.config.model, model.config.dtype, str(model.config.max_num_seqs)
        elif model.kind is Kind.UNARY:
            source = f"through {model.stream_model}"
        twin = twins.get(model.name, "") if model.kind is Kind.STREAMING else ""
        kind = f"[{_STYLES[model.kind]}]{model.kind}[/]"
        table.add_row(escape(model.name), kind, escape(source), dtype, num_seqs, escape(twin))
    console.print(table)
    for model in models:
        if model.problem:
            console.print(f"[red]{escape(model.name)}[/]: {escape(model.problem)}", soft_wrap=True)
