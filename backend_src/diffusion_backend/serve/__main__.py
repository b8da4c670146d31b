"""The launcher's command line: ``python -m diffusion_backend.serve``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from diffusion_backend.serve.app import App
from diffusion_backend.serve.command import default_repository
from diffusion_backend.serve.log import LogLine
from diffusion_backend.serve.server import TritonServer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def serve(
    model_repository: Annotated[
        str | None,
        typer.Option(envvar="MODEL_REPOSITORY", help="Folder of the models to serve; ./model_repository unless given."),
    ] = None,
    host: Annotated[
        str, typer.Option(envvar="HOST", help="Address to listen on; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(envvar="HTTP_PORT", min=1, max=65535, help="Port for HTTP.")] = 8000,
    grpc_port: Annotated[int, typer.Option(envvar="GRPC_PORT", min=1, max=65535, help="Port for gRPC.")] = 8001,
    metrics_port: Annotated[
        int, typer.Option(envvar="METRICS_PORT", min=1, max=65535, help="Port for Prometheus metrics.")
    ] = 8002,
    exit_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that running requests have to finish when the server stops.")
    ] = 30.0,
    ready_timeout: Annotated[float, typer.Option(min=1, help="Seconds that the models have to load.")] = 900.0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit if any model fails to load, not only if all do.")
    ] = False,
    verbose: Annotated[
        int,
        typer.Option("--verbose", "-v", count=True, help="Show the server's whole log; twice: its verbose log, too."),
    ] = 0,
    log_file: Annotated[Path | None, typer.Option(help="Append the server's whole log to this file.")] = None,
    extra_args: Annotated[
        list[str] | None, typer.Argument(metavar="[-- TRITONSERVER_ARGS...]", help="Further tritonserver arguments.")
    ] = None,
) -> None:
    """Serve a repository of models with the Triton Inference Server until Ctrl-C.

    Exits with 0 after Ctrl-C or SIGTERM once the running requests are answered; with 1 if no model loads, if the
    process of a model or the server dies, or if requests had to be cut off at the end.
    """

    def make_server(on_line: Callable[[LogLine], None], on_exit: Callable[[], None]) -> TritonServer:
        return TritonServer(
            model_repository or default_repository(),
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            exit_timeout=exit_timeout,
            log_verbose=max(0, verbose - 1),
            log_file=log_file,
            on_line=on_line,
            on_exit=on_exit,
            extra_args=extra_args or (),
        )

    console = Console(soft_wrap=True, highlight=False)
    sys.exit(App(make_server, console, ready_timeout=ready_timeout, strict=strict, verbose=verbose > 0).run())


if __name__ == "__main__":
    app(prog_name="python -m diffusion_backend.serve")
