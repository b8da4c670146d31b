"""Pictures of emoji, drawn from the colour font on white."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tools.emoji.sources import DEFAULT_FONT, VARIATION_SELECTOR, require_file

PICTURE_SIZE = 64
# The font holds bitmaps of one size only: 136 by 128 pixels, which FreeType calls 109 pixels per em.
BITMAP_EM = 109
BITMAP_SIDE = 136


def load_font(path: Path = DEFAULT_FONT) -> ImageFont.FreeTypeFont:
    """Open the colour emoji font at the one size that it has."""
    return ImageFont.truetype(str(require_file(path, "fonts-noto-color-emoji")), BITMAP_EM)


def draw_emoji(font: ImageFont.FreeTypeFont, character: str, size: int = PICTURE_SIZE) -> Image.Image:
    """Draw one emoji in the middle of a white square of `size` pixels."""
    canvas = Image.new("RGB", (BITMAP_SIDE, BITMAP_SIDE), "white")
    glyph = character.replace(VARIATION_SELECTOR, "")
    left, top, right, bottom = font.getbbox(glyph)
    if right <= left or bottom <= top:
        raise ValueError(f"the font has no picture of {character!r}")
    corner = ((BITMAP_SIDE - left - right) // 2, (BITMAP_SIDE - top - bottom) // 2)
    ImageDraw.Draw(canvas).text(corner, glyph, font=font, embedded_color=True)
    return canvas.resize((size, size), Image.Resampling.LANCZOS)


def draw_all(characters: Iterable[str], font_path: Path = DEFAULT_FONT) -> np.ndarray:
    """Draw every emoji; returns `uint8[count, 64, 64, 3]`."""
    font = load_font(font_path)
    return np.stack([np.asarray(draw_emoji(font, character)) for character in characters])
