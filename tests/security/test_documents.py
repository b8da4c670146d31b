"""The tables of `docs/security.md` name tests that exist, and every file of tests here is named in them."""

from __future__ import annotations

import re

from tests.security.conftest import ROOT

TEXT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_exists() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    named = re.findall(r"test_\w+", TEXT)
    assert len(named) > 30
    for name in named:
        assert f"def {name}(" in code or f"{name}.py" in files, name


def test_every_file_of_attacks_is_named() -> None:
    for path in (ROOT / "tests" / "security").glob("test_*.py"):
        if path.name != "test_documents.py":
            assert path.name in TEXT, path.name


def test_the_documents_lead_to_each_other() -> None:
    summary = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "(docs/security.md)" in summary
    assert "(../SECURITY.md)" in TEXT
    assert "(SECURITY.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
