"""Measures how many pipeline classes are batched, and that every one is right: `python -m tools.coverage`."""
