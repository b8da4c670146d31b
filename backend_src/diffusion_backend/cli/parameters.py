"""One option for every parameter of a model, made from the fields of `ModelConfig`: a new one appears by itself."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from rich.markup import escape

PANEL = "Parameters of the model, written to config.pbtxt"

_METAVARS = {"int": "INTEGER", "float": "NUMBER", "str": "TEXT", "bool": "true|false"}


def with_parameters(config: type, *, leave_out: frozenset[str] = frozenset()) -> Callable[[Any], Any]:
    """Return a decorator that gives a command an option for each field of a configuration.

    The command gets those that were given, as text, in its argument `parameters`. Each is read by the field's own
    parser, so that a wrong value gives the same error here as in the server.

    Args:
        config: a dataclass whose fields have the metadata `parse` and `help`.
        leave_out: fields that get no option.
    """
    fields = {field.name: field for field in dataclasses.fields(config) if field.name not in leave_out}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for name, parameter in signature.parameters.items() if name != "parameters"]
        clash = fields.keys() & {parameter.name for parameter in own}
        assert not clash, f"options that are also parameters of a model: {', '.join(clash)}"

        @functools.wraps(command)
        def run(**given: Any) -> None:
            texts = {name: text.strip() for name in fields if (text := given.pop(name)) is not None}
            for name, text in texts.items():
                fields[name].metadata["parse"](name, text)
            command(**given, parameters=texts)

        # typer reads the signature to make the options; without these it would follow functools.wraps to `command`.
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *(_option(field) for field in fields.values())]
        )
        run.__annotations__ = {name: p.annotation for name, p in inspect.signature(run).parameters.items()}
        return run

    return decorate


def _option(field: dataclasses.Field[Any]) -> inspect.Parameter:
    kind = typer.Option(
        f"--{field.name.replace('_', '-')}",
        metavar=_metavar(field),
        help=escape(_help(field)),
        rich_help_panel=PANEL,
        show_default=False,
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, kind]
    )


def _help(field: dataclasses.Field[Any]) -> str:
    text: str = field.metadata["help"]
    text = text[:1].upper() + text[1:]
    if field.default in (None, (), dataclasses.MISSING):
        return f"{text}."
    return f"{text}; {field.default} unless given."


def _metavar(field: dataclasses.Field[Any]) -> str:
    """Return what stands for the value in the help: the choices where the parser has some, else the type."""
    variables: Mapping[str, Any] = inspect.getclosurevars(field.metadata["parse"]).nonlocals
    allowed = variables.get("allowed")
    if isinstance(allowed, tuple):
        return "|".join(map(str, allowed))
    return _METAVARS.get(str(field.type).split(" | ")[0], "TEXT")
