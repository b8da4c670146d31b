"""The commands and their options."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..config import ModelConfig
from .console import EXIT_NOT_RIGHT, output, progress, quiet, readable_errors, tell_error
from .parameters import with_parameters

if TYPE_CHECKING:
    from .add import Added

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)


def main() -> None:
    """Run the command line; the console script `diffusion-backend`."""
    # What these libraries warn of when they are imported concerns nobody here; whoever wants it sets the variables.
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    # Threads of PyTorch that wait for each other sleep: spinning, they starve whoever shares the processors.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app(prog_name="diffusion-backend")


def _show_version(wanted: bool) -> None:
    if wanted:
        names = ("diffusion-backend", "diffusers", "torch")
        output().print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the versions and exit.")
    ] = False,
) -> None:
    """Serve diffusers pipelines with Triton: add them to a repository of models, list them, try them out."""
    del version


Repository = Annotated[
    Path | None,
    typer.Option(
        envvar="MODEL_REPOSITORY",
        show_default=False,
        help="Folder of the models; ./model_repository, or that of this checkout, unless given.",
    ),
]


def _repository(given: Path | None) -> Path:
    from ..serve.command import default_repository

    return given if given is not None else default_repository()


@app.command()
@readable_errors
@with_parameters(ModelConfig, leave_out=frozenset({"model"}))
def add(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="The pipeline: a folder's path, or a hub id such as owner/name.")
    ],
    *,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the model, which clients ask for; the last part of SOURCE unless given.", show_default=False
        ),
    ] = None,
    repository: Repository = None,
    unary: Annotated[
        bool, typer.Option("--unary/--no-unary", help="Add the twin NAME_unary, for plain HTTP and gRPC calls.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace models of these names.")] = False,
    parameters: dict[str, str],
) -> None:
    """Add a pipeline to a repository of models.

    Writes config.pbtxt and model.py of the model and of its unary twin, once it is sure that the pipeline exists and
    that the installed diffusers has its class. Weights are neither downloaded nor loaded: `check` does that.
    Models of the hub are found with the ordinary cache and token of Hugging Face.
    """
    from .add import add as add_model

    place = _repository(repository)
    with progress() as tell:
        tell(f"looking at {source}")
        added = add_model(source, name=name, repository=place, parameters=parameters, unary=unary, force=force)
    _show_added(added, repository)


def _show_added(added: Added, repository: Path | None) -> None:
    seen = added.preview
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    after = f"known after `diffusion-backend check {added.name}`"
    rows: dict[str, Any] = {
        "pipeline": f"{seen.pipeline} from {added.written}",
        "takes": ", ".join(seen.inputs),
        "extra_args": ", ".join(seen.further) or "none",
        "gives": ", ".join(seen.outputs) or after,
        "wrote": "\n".join(str(folder) for folder in added.folders),
        "next": f"diffusion-backend check {added.name}{_option(repository)}\n{_serve(repository)}",
    }
    if seen.required:
        rows["needs"] = ", ".join(("prompt", *seen.required))
    if seen.unfulfilled:
        rows["but"] = f"no request can give it {', '.join(seen.unfulfilled)}: requests will fail"
    for heading in ("pipeline", "takes", "needs", "but", "extra_args", "gives", "wrote", "next"):
        if heading in rows:
            table.add_row(heading, escape(rows[heading]))
    output().print(f"[bold green]added[/] {escape(added.name)}")
    output().print(table)


def _option(repository: Path | None) -> str:
    return "" if repository is None else f" --repository {shlex.quote(str(repository))}"


def _serve(repository: Path | None) -> str:
    return "make serve" if repository is None else f"MODEL_REPOSITORY={shlex.quote(str(repository))} make serve"


@app.command("list")
@readable_errors
def list_models(repository: Repository = None) -> None:
    """List the models of a repository, and say what is wrong with those that would not load."""
    from .listing import show
    from .repository import read_repository

    place = _repository(repository)
    models = read_repository(place)
    if not models:
        output().print(f"{escape(str(place))} holds no models; add one with `diffusion-backend add`", soft_wrap=True)
        return
    show(output(), models)


@app.command()
@readable_errors
def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The model, by its name in the repository.")],
    *,
    repository: Repository = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Where to load it, such as cpu or cuda:0; the first GPU, or else the CPU, unless given.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps of the requests that are run.")] = 4,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the log of loading and running.")] = False,
) -> None:
    """Load a model, run requests alone and together, and say whether they come out the same.

    Prints for each denoiser whether its calls are batched or why not, the largest difference of an output together
    from alone, the memory, and the seconds a step. Sizes are those of the model's warmup_sizes, or its defaults.

    Exits with 0 if the model is right, 1 if it does not load or an output differs by more than its dtype explains, and
    2 if the call or the configuration is wrong.
    """
    from .repository import find_model

    model = find_model(_repository(repository), name)
    from ..errors import ConfigurationError, DiffusionError
    from .measure import measure
    from .verdict import show

    assert model.config is not None
    try:
        with progress() as tell, quiet(verbose):
            result = measure(model.config, base=model.folder, device=device, steps=steps, tell=tell)
    except ConfigurationError:
        raise  # called or configured wrongly, which is not the model's fault
    except DiffusionError as error:
        tell_error(f"{name} is not right: {error.message}")
        raise typer.Exit(EXIT_NOT_RIGHT) from None
    show(output(), name, result)
    if not result.is_right:
        raise typer.Exit(EXIT_NOT_RIGHT)
