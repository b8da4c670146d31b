"""Contact sheets: what was drawn beside the originals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

COLUMNS = 8
GAP = 12
CAPTION_HEIGHT = 16
CAPTION_POINTS = 10
MISS_COLOUR = (200, 30, 30)
TEXT_COLOUR = (60, 60, 60)


@dataclass(frozen=True)
class Pair:
    """An original and the picture that was drawn from `caption`, both `uint8[64, 64, 3]`."""

    original: np.ndarray
    drawn: np.ndarray
    caption: str
    hit: bool


def contact_sheet(pairs: list[Pair]) -> Image.Image:
    """Lay the pairs out in rows: original on the left, drawn on the right, misses framed and red."""
    size = pairs[0].original.shape[0]
    cell_width, cell_height = 2 * size + GAP, size + CAPTION_HEIGHT + GAP
    rows = -(-len(pairs) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * cell_width + GAP, rows * cell_height + GAP), "white")
    canvas = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(CAPTION_POINTS)
    for number, pair in enumerate(pairs):
        left = GAP + number % COLUMNS * cell_width
        top = GAP + number // COLUMNS * cell_height
        sheet.paste(Image.fromarray(pair.original), (left, top))
        sheet.paste(Image.fromarray(pair.drawn), (left + size, top))
        if not pair.hit:
            canvas.rectangle((left + size, top, left + 2 * size - 1, top + size - 1), outline=MISS_COLOUR)
        text = _fit(pair.caption, font, 2 * size)
        canvas.text((left, top + size + 1), text, font=font, fill=TEXT_COLOUR if pair.hit else MISS_COLOUR)
    return sheet


def _fit(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """Shorten a caption to the width of its cell."""
    if font.getlength(text) <= width:
        return text
    while font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
