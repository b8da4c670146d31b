"""Suggest a command to try on the models that are served."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

_EXAMPLE = {"prompt": "red apple", "output_format": "png;base64"}
_SAVE = r"""sed 's/.*"encoded":"\([^"]*\)".*/\1/' | base64 -d"""


def suggest_command(url_http: str, models: Sequence[str]) -> str:
    """Return one ``curl`` command that does something with the models.

    A model ``x`` with a twin ``x_unary`` is one that draws: the twin answers ``/generate`` with one response, which
    is saved as a picture. For other models, whose inputs are not known here, the command asks for the model's metadata.

    Args:
        url_http: base URL of the HTTP endpoint.
        models: names of the models that are ready, in the order of preference.
    """
    for model in models:
        if model.endswith("_unary"):
            url = f"{url_http}/v2/models/{model}/generate"
            return f"curl -s {shlex.quote(url)} -d {shlex.quote(json.dumps(_EXAMPLE))} | {_SAVE} > picture.png"
    path = f"/v2/models/{models[0]}" if models else "/v2"
    return f"curl -s {shlex.quote(url_http + path)}"
