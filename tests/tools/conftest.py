"""What all the tests of the tools share."""

from __future__ import annotations

# First of all, as it decides how PyTorch's threads wait for each other.
import tools.emoji  # noqa: F401
