"""The command that the launcher suggests."""

from __future__ import annotations

import json
import shlex

from diffusion_backend.serve.hint import suggest_command


def test_unary_twin_is_asked_to_draw():
    words = shlex.split(suggest_command("http://127.0.0.1:8000", ["emoji", "emoji_unary"]))
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8000/v2/models/emoji_unary/generate"]
    assert json.loads(words[4]) == {"prompt": "red apple", "output_format": "png;base64"}
    assert words[-2:] == [">", "picture.png"]


def test_other_models_are_asked_what_they_are():
    assert suggest_command("http://h:1", ["other"]) == "curl -s http://h:1/v2/models/other"
    assert suggest_command("http://h:1", []) == "curl -s http://h:1/v2"
