"""The launcher's command line: ``python -m diffusion_backend.serve``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from diffusion_backend.serve.access import RESTRICTABLE, Access, parse_apis, read_key
from diffusion_backend.serve.app import EXIT_FAILED, App
from diffusion_backend.serve.command import default_repository
from diffusion_backend.serve.errors import ArgumentError
from diffusion_backend.serve.log import LogLine
from diffusion_backend.serve.server import TritonServer
from diffusion_backend.serve.tls import GrpcTls

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
    metrics_address: Annotated[
        str, typer.Option(envvar="METRICS_ADDRESS", help="Address to listen on for metrics, whatever HOST is.")
    ] = "127.0.0.1",
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            envvar="ADMIN_KEY_FILE",
            help="File with the key that the restricted endpoints ask for; or set ADMIN_KEY. Random unless given.",
        ),
    ] = None,
    restricted_apis: Annotated[
        str,
        typer.Option(envvar="RESTRICTED_APIS", help="Endpoints that need the key, separated by commas, or none."),
    ] = ",".join(RESTRICTABLE),
    grpc_tls_cert: Annotated[
        Path | None, typer.Option(envvar="GRPC_TLS_CERT", help="PEM file of the certificate for TLS over gRPC.")
    ] = None,
    grpc_tls_key: Annotated[
        Path | None, typer.Option(envvar="GRPC_TLS_KEY", help="PEM file of the certificate's private key.")
    ] = None,
    grpc_tls_ca: Annotated[
        Path | None,
        typer.Option(envvar="GRPC_TLS_CA", help="PEM file of the authorities that gRPC clients must be known to."),
    ] = None,
    exit_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that running requests have to finish when the server stops.")
    ] = 30.0,
    ready_timeout: Annotated[float, typer.Option(min=1, help="Seconds that the models have to load.")] = 900.0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit if any model fails to load, not only if all do.")
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(
            envvar="MAX_RESTARTS",
            min=0,
            help="Times an hour that a server which had served, and died, is started again; "
            "0 exits and leaves that to docker, systemd or Kubernetes.",
        ),
    ] = 0,
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
    process of a model or the server dies (and no restart is allowed), or if requests had to be cut off at the end.
    """
    # No emoji either: a line of the log is passed on as it is, whatever stands between two colons in it.
    console = Console(soft_wrap=True, highlight=False, emoji=False)
    try:
        key = read_key(os.environ, admin_key_file)
        apis = parse_apis(restricted_apis)
        access = Access(apis) if key is None else Access(apis, key)
        grpc_tls = GrpcTls.from_options(grpc_tls_cert, grpc_tls_key, grpc_tls_ca)
    except ArgumentError as error:
        console.print(f"[bold red]error[/] {escape(str(error))}")
        sys.exit(EXIT_FAILED)

    def make_server(on_line: Callable[[LogLine], None], on_exit: Callable[[], None]) -> TritonServer:
        return TritonServer(
            model_repository or default_repository(),
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            metrics_address=metrics_address,
            access=access,
            grpc_tls=grpc_tls,
            exit_timeout=exit_timeout,
            log_verbose=max(0, verbose - 1),
            log_file=log_file,
            on_line=on_line,
            on_exit=on_exit,
            extra_args=extra_args or (),
        )

    launcher = App(
        make_server,
        console,
        ready_timeout=ready_timeout,
        strict=strict,
        verbose=verbose > 0,
        max_restarts=max_restarts,
    )
    sys.exit(launcher.run())


if __name__ == "__main__":
    app(prog_name="python -m diffusion_backend.serve")
