"""Draws pictures as PNG, with Pillow, on light ground.

Pillow brings a font of its own, so a picture is the same on a server without fonts; that font has ASCII only, and what
else a text holds is spelled with it or becomes a question mark.
"""

from __future__ import annotations

import io
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from railscope.agent.analysis.pictures.parts import Box, Cells, Line, Picture, Words, paint_colours

_SPELLED: Final = str.maketrans(
    {"µ": "u", "×": "x", "–": "-", "−": "-", "…": "...", "→": "->", "≥": ">=", "≤": "<=", "·": ",", "½": "1/2"}
)
_MOST_PIXELS: Final = 40_000_000
_ANCHORS: Final = {"start": "ls", "middle": "ms", "end": "rs"}


def png_bytes(picture: Picture, scale: float = 2.0) -> bytes:
    """The picture as a PNG file of `scale` pixels for each of the picture's, fewer where it would be huge."""
    area = max(picture.width, 1) * max(picture.height, 1)
    scale = min(scale, (_MOST_PIXELS / area) ** 0.5)
    colours = paint_colours()[0]
    image = Image.new(
        "RGB", (round(picture.width * scale) or 1, round(picture.height * scale) or 1), colours["surface"]
    )
    draw = ImageDraw.Draw(image)
    fonts: dict[float, ImageFont.FreeTypeFont | ImageFont.ImageFont] = {}
    for part in picture.parts:
        match part:
            case Box():
                _fill(draw, part.x, part.y, part.x + part.width, part.y + part.height, colours[part.paint], scale)
            case Cells():
                for row, column, count in part.runs:
                    left, top = part.x + column * part.side, part.y + row * part.side
                    _fill(draw, left, top, left + count * part.side, top + part.side, colours[part.paint], scale)
            case Line():
                points = [(x * scale, y * scale) for x, y in part.points]
                draw.line(points, fill=colours[part.paint], width=max(1, round(part.width * scale)), joint="curve")
            case Words():
                # The font runs wider than the sans-serif fonts of browsers.
                points_high = part.points * 0.94 * scale
                font = fonts.setdefault(points_high, ImageFont.load_default(points_high))
                draw.text(
                    (part.x * scale, part.y * scale),
                    part.text.translate(_SPELLED).encode("ascii", "replace").decode(),
                    fill=colours[part.paint],
                    anchor=_ANCHORS[part.anchor],
                    font=font,
                    stroke_width=0.25 * scale if part.bold else 0,
                )
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def _fill(
    draw: ImageDraw.ImageDraw, left: float, top: float, right: float, bottom: float, colour: str, scale: float
) -> None:
    """A box from edge to edge: Pillow's own corners are inclusive."""
    x0, y0, x1, y1 = (round(edge * scale) for edge in (left, top, right, bottom))
    if x1 > x0 and y1 > y0:
        draw.rectangle((x0, y0, x1 - 1, y1 - 1), fill=colour)
