"""Where the command line writes: results to stdout, errors and progress to stderr."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import ParamSpec

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import DiffusionError

P = ParamSpec("P")

EXIT_NOT_RIGHT = 1
"""What was checked is not right."""

EXIT_USAGE = 2
"""The command was called wrongly, or the configuration is wrong."""

_PIPE_COLUMNS = 200
"""Width where the output is no terminal: rows stay whole, for grep."""


class CommandError(Exception):
    """The command cannot do what it was asked; the message says why and what to do, in one line."""


def output() -> Console:
    """Return where results go. Made anew for each command, so that it writes to the stdout of that moment."""
    return _console(stderr=False)


def errors() -> Console:
    """Return where errors and progress go."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    wide = not stream.isatty() and "COLUMNS" not in os.environ
    return Console(stderr=stderr, highlight=False, width=_PIPE_COLUMNS if wide else None)


def readable_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Make a command end with one line on stderr and the exit code 2 instead of a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (CommandError, DiffusionError) as error:
            tell_error(str(error))
            raise typer.Exit(EXIT_USAGE) from None

    return run


def tell_error(text: str) -> None:
    """Write one line to stderr."""
    line = " ".join(text.split())
    errors().print(f"[bold red]error[/] {escape(line)}", soft_wrap=True)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that tells what is being done: a spinner on a terminal, else a line each."""
    console = errors()
    if not console.is_terminal:
        yield lambda what: console.print(f"{escape(what)} …", soft_wrap=True)
        return
    with console.status("starting") as status:
        yield lambda what: status.update(escape(what))


@contextlib.contextmanager
def quiet(verbose: bool) -> Iterator[None]:
    """Keep logs and warnings off the terminal meanwhile, unless told otherwise: the result says what they say."""
    logger = logging.getLogger("diffusion_backend")
    level, propagate = logger.level, logger.propagate
    handler: logging.Handler = logging.NullHandler()
    if verbose:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with warnings.catch_warnings():
            if not verbose:
                warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
