"""A line chart of the training, drawn with Pillow alone."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 560, 280
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 60, 20, 40, 40
INK, GRID = (60, 60, 60), (225, 225, 225)
COLOURS = ((31, 119, 180), (214, 90, 20), (44, 140, 44))
HORIZONTAL_LINES = 4
# Lines are drawn at this many times the size and reduced, which smooths them.
OVERSAMPLING = 3


@dataclass(frozen=True)
class Line:
    """One named line of `(x, y)` points."""

    name: str
    points: list[tuple[float, float]]


def line_chart(title: str, x_name: str, lines: list[Line], top: float) -> Image.Image:
    """Draw lines over `x` from 0, with `y` from 0 to `top`; points above it are cut off at the edge."""
    right = max(x for line in lines for x, _ in line.points) or 1.0
    plot_width = WIDTH - MARGIN_LEFT - MARGIN_RIGHT
    plot_height = HEIGHT - MARGIN_TOP - MARGIN_BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        across = MARGIN_LEFT + plot_width * x / right
        down = MARGIN_TOP + plot_height * (1 - min(y, top) / top)
        return across * OVERSAMPLING, down * OVERSAMPLING

    image = Image.new("RGB", (WIDTH * OVERSAMPLING, HEIGHT * OVERSAMPLING), "white")
    canvas = ImageDraw.Draw(image)
    font = ImageFont.load_default(12 * OVERSAMPLING)
    for number in range(HORIZONTAL_LINES + 1):
        value = top * number / HORIZONTAL_LINES
        start, end = place(0, value), place(right, value)
        canvas.line((start, end), fill=GRID, width=OVERSAMPLING)
        canvas.text((start[0] - 6 * OVERSAMPLING, start[1]), f"{value:.3g}", font=font, fill=INK, anchor="rm")
    below = place(right, 0)[1] + 6 * OVERSAMPLING
    canvas.text((place(0, 0)[0], below), "0", font=font, fill=INK, anchor="mt")
    canvas.text((place(right, 0)[0], below), f"{right:.0f} {x_name}", font=font, fill=INK, anchor="rt")
    canvas.text((MARGIN_LEFT * OVERSAMPLING, 10 * OVERSAMPLING), title, font=font, fill=INK)
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        canvas.line([place(x, y) for x, y in line.points], fill=colour, width=2 * OVERSAMPLING, joint="curve")
        across = (WIDTH - MARGIN_RIGHT - 90 * (len(lines) - 1 - number)) * OVERSAMPLING
        canvas.text((across, 10 * OVERSAMPLING), line.name, font=font, fill=colour, anchor="rt")
    return image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)
