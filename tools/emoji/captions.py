"""What the model reads: names, keywords, or both, and the prompts that the report asks for."""

from __future__ import annotations

import random

from tools.emoji.sources import Emoji, spread

EMPTY_SHARE = 0.1
NAME_SHARE = 0.35
NAME_WITH_KEYWORDS_SHARE = 0.2
# How many keywords a caption has, each as likely as it is often here. One alone seldom tells an emoji apart.
KEYWORD_COUNTS = (1, 2, 2, 3, 3, 4)


def draw_caption(entry: Emoji, rng: random.Random) -> str:
    """Draw a caption: empty one time in ten, else the name, the name with keywords, or keywords."""
    choice = rng.random()
    if choice < EMPTY_SHARE:
        return ""
    choice -= EMPTY_SHARE
    if choice < NAME_SHARE or not entry.keywords:
        return entry.name
    words = rng.sample(entry.keywords, min(rng.choice(KEYWORD_COUNTS), len(entry.keywords)))
    if choice < NAME_SHARE + NAME_WITH_KEYWORDS_SHARE:
        words = [entry.name, *words]
    return ", ".join(words)


def name_prompts(entries: list[Emoji], count: int) -> list[tuple[int, str]]:
    """Return `count` pairs of an index into `entries` and its name, spread evenly."""
    return [(index, entries[index].name) for index in spread(len(entries), count)]


def keyword_prompts(entries: list[Emoji], count: int, seed: int) -> list[tuple[int, str]]:
    """Return pairs of an index and two or three of its keywords, spread evenly over those that have two."""
    rng = random.Random(seed)
    able = [index for index, entry in enumerate(entries) if len(entry.keywords) >= 2]
    prompts = []
    for place in spread(len(able), count):
        index = able[place]
        keywords = entries[index].keywords
        prompts.append((index, ", ".join(rng.sample(keywords, min(len(keywords), rng.choice((2, 3)))))))
    return prompts
