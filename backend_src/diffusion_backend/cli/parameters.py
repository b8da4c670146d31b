"""One option for every parameter of a model, made from the fields of `ModelConfig`: a new one appears by itself."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

PANEL = "Parameters of the model, written to config.pbtxt"

_METAVARS = {"int": "INTEGER", "float": "NUMBER", "str": "TEXT", "bool": "BOOL"}


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
        metavar=_METAVARS.get(str(field.type).split(" | ")[0], "TEXT"),
        help=_help(field),
        rich_help_panel=PANEL,
        show_default=False,
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, kind]
    )


def _help(field: dataclasses.Field[Any]) -> str:
    text: str = field.metadata["help"]
    if not text.split()[0].endswith(":"):  # what begins with a value stays as it is to be written
        text = text[:1].upper() + text[1:]
    choices = _choices(field)
    if any(choice not in text for choice in choices):
        text += f" ({', '.join(choices)})"
    default = field.default
    if default in (None, (), dataclasses.MISSING):
        return f"{text}."
    if isinstance(default, bool):
        default = str(default).lower()
    return f"{text}; {f'{default:g}' if isinstance(default, float) else default} unless given."


def _choices(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Return the values that the field's parser allows, where it has a list of them."""
    variables: Mapping[str, Any] = inspect.getclosurevars(field.metadata["parse"]).nonlocals
    allowed = variables.get("allowed")
    return allowed if isinstance(allowed, tuple) else ()
