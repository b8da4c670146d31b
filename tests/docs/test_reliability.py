"""The page on reliability names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tools.soak.report import BEGIN, END

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+) \| (.+?) \| (.+) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("number", range(1, 52))
def test_every_behaviour_names_tests_that_exist(number):
    """Each row of the table names at least one test, by its file and its function or class."""
    ((_, behaviour, shown_by),) = [row for row in ROWS if int(row[0]) == number]
    assert behaviour
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", shown_by)
    assert named, shown_by
    for path, name in named:
        body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assigned = {t.id for n in body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
        assert name in defined | assigned, f"{path} has no {name}"


def test_the_page_has_a_place_for_the_last_run():
    """`make soak ARGS=--into-docs` writes between the marks."""
    assert PAGE.count(BEGIN) == PAGE.count(END) == 1
