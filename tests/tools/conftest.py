"""What all the tests of the tools share."""

from __future__ import annotations

from pathlib import Path

import pytest

# First of all, as it decides how PyTorch's threads wait for each other.
import tools.emoji  # noqa: F401
from tools.emoji.sources import DEFAULT_ANNOTATIONS, DEFAULT_FONT

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave these tests out, and say so, where the pictures and keywords that they need are not installed."""
    if DEFAULT_FONT.is_file() and DEFAULT_ANNOTATIONS.is_file():
        return
    remedy = "needs two Debian packages: apt-get install fonts-noto-color-emoji unicode-cldr-core"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=remedy))
