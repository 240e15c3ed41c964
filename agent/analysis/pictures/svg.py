"""Draws pictures as SVG, inline in a page or as a file of its own.

The tree is built with the standard library, which escapes every text and attribute: a name from a recording cannot
become markup.  Colours are CSS classes, so that one picture serves light and dark ground; there is no script and no
reference to anything outside.
"""

from __future__ import annotations

from typing import Final
from xml.etree import ElementTree

from railscope.agent.analysis.pictures.parts import Box, Cells, Line, Part, Picture, Words, paint_colours
from railscope.probes.printable import printable

_SVG: Final = "http://www.w3.org/2000/svg"
_FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif"


def svg_element(picture: Picture) -> ElementTree.Element:
    """The picture for a page that holds `svg_style()`."""
    width, height = _number(picture.width), _number(picture.height)
    svg = ElementTree.Element(
        "svg", {"class": "picture", "viewBox": f"0 0 {width} {height}", "width": width, "height": height, "role": "img"}
    )
    ElementTree.SubElement(svg, "title").text = strip_control_characters(picture.title)
    for part in picture.parts:
        _draw(svg, part)
    return svg


def svg_file(picture: Picture) -> str:
    """The picture as a document of its own."""
    svg = svg_element(picture)
    svg.set("xmlns", _SVG)
    style = ElementTree.Element("style")
    style.text = (
        svg_style()
        + f" svg {{ background: {paint_colours()[0]['surface']}; }} "
        + _dark(f"svg {{ background: {paint_colours()[1]['surface']}; }}")
    )
    svg.insert(1, style)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(svg, encoding="unicode") + "\n"


def svg_style() -> str:
    """The CSS that pictures on a page need."""
    light, dark = paint_colours()
    # Only screens are dark: paper is white whatever the reader prefers.
    # Boxes that touch must not let the ground shine through between them.
    sharp = ".picture rect, .picture path { shape-rendering: crispEdges; }"
    return f".picture {{ font-family: {_FONT}; }} {sharp} {_rules(light)} {_dark(_rules(dark))}"


def strip_control_characters(text: str) -> str:
    """The text without the control characters that neither XML nor HTML may hold."""
    return "".join(character if character in "\n\t" else printable(character) for character in text)


def _dark(rules: str) -> str:
    return f"@media screen and (prefers-color-scheme: dark) {{ {rules} }}"


def _rules(colours: dict[str, str]) -> str:
    return " ".join(
        f".f-{name} {{ fill: {colour}; }} .s-{name} {{ stroke: {colour}; }}" for name, colour in colours.items()
    )


def _draw(svg: ElementTree.Element, part: Part) -> None:
    match part:
        case Box():
            element = ElementTree.SubElement(
                svg,
                "rect",
                {
                    "class": f"f-{part.paint}",
                    "x": _number(part.x),
                    "y": _number(part.y),
                    "width": _number(part.width),
                    "height": _number(part.height),
                },
            )
            _title(element, part.title)
        case Line():
            element = ElementTree.SubElement(
                svg,
                "polyline",
                {
                    "class": f"s-{part.paint}",
                    "fill": "none",
                    "stroke-width": _number(part.width),
                    "stroke-linejoin": "round",
                    "points": " ".join(f"{_number(x)},{_number(y)}" for x, y in part.points),
                },
            )
            if part.dashed:
                element.set("stroke-dasharray", "4 3")
            _title(element, part.title)
        case Words():
            element = ElementTree.SubElement(
                svg,
                "text",
                {
                    "class": f"f-{part.paint}",
                    "x": _number(part.x),
                    "y": _number(part.y),
                    "font-size": str(part.points),
                    "text-anchor": part.anchor,
                },
            )
            if part.bold:
                element.set("font-weight", "600")
            element.text = strip_control_characters(part.text)
        case Cells():
            side = _number(part.side)
            path = "".join(
                f"M{_number(part.x + column * part.side)} {_number(part.y + row * part.side)}"
                f"h{_number(part.side * count)}v{side}h{_number(-part.side * count)}z"
                for row, column, count in part.runs
            )
            ElementTree.SubElement(svg, "path", {"class": f"f-{part.paint}", "d": path})


def _title(element: ElementTree.Element, text: str) -> None:
    if text:
        ElementTree.SubElement(element, "title").text = strip_control_characters(text)


def _number(value: float) -> str:
    """At most two places after the point: a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"
