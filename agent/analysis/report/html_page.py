"""Builds a page of HTML that needs nothing but itself: elements, tables, and the style.

Elements are nodes of a tree, which the standard library writes out with every text and attribute escaped: whatever a
recording holds, it stays text.  There is no script, and nothing is loaded from anywhere.

Why not Jinja2 with its automatic escaping: pictures are such trees too, and would have to be marked as safe, where a
tree has no way to write unescaped text at all; the types of what goes into a template are checked by nobody; and it
takes 24 ms and 7 MiB to load.  A page of 115 kB takes 13 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from xml.etree import ElementTree

from railscope.agent.analysis.pictures.svg import strip_control_characters, svg_style

Element = ElementTree.Element
Content = Element | str

_STYLE: Final = """
:root { color-scheme: light dark; --surface: #ffffff; --ink: #1b2430; --muted: #5b6675; --line: #dfe4ea;
  --raised: #f6f8fa; --accent: #0072b2; --warn: #8a5a00; --warn-ground: #fff6e0; }
@media screen and (prefers-color-scheme: dark) { :root { --surface: #12171e; --ink: #e6eaf0; --muted: #a0abb9;
  --line: #2b3440; --raised: #1a212a; --accent: #4da3dc; --warn: #f0c060; --warn-ground: #2a2412; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 62rem; background: var(--surface); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .25rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
p { margin: .35rem 0; max-width: 48rem; overflow-wrap: anywhere; }
a { color: var(--accent); }
.meta, .definition, figcaption, .more { color: var(--muted); font-size: .875rem; overflow-wrap: anywhere; }
.definition b { color: var(--ink); font-weight: 600; }
.summary { background: var(--raised); border: 1px solid var(--line); border-radius: 8px; padding: .75rem 1.25rem;
  margin: 1rem 0; }
.summary li { margin: .3rem 0; overflow-wrap: anywhere; }
.note { background: var(--warn-ground); border-left: 3px solid var(--warn); padding: .4rem .75rem; margin: .75rem 0; }
.badge { display: inline-block; background: var(--warn-ground); color: var(--warn); border: 1px solid var(--warn);
  border-radius: 4px; padding: .05rem .5rem; font-size: .875rem; font-weight: 600; }
nav { font-size: .875rem; columns: 3 14rem; margin: .75rem 0; }
nav a { display: block; text-decoration: none; padding: .1rem 0; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { display: block; max-width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; margin: .5rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .25rem 0; }
th, td { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line);
  max-width: 26rem; overflow-wrap: break-word; }
th { color: var(--muted); font-weight: 600; vertical-align: bottom; }
.number { text-align: right; white-space: nowrap; }
@media print { html { font-size: 11px; } body { max-width: none; padding: 0; font-size: 1rem; } nav { display: none; }
  figure, tr, .summary, .note { break-inside: avoid; } h2, h3, caption { break-after: avoid; }
  .summary, .note, .badge, svg { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def tag(name: str, /, *content: Content, css: str = "", **attributes: str) -> Element:
    """An HTML element with text and elements in it, in order; `css` is its class."""
    element = ElementTree.Element(name, {key: strip_control_characters(value) for key, value in attributes.items()})
    if css:
        element.set("class", css)
    for one in content:
        if isinstance(one, str):
            _append(element, strip_control_characters(one))
        else:
            element.append(one)
    return element


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], sides: str, count: int) -> list[Element]:
    """An HTML table: rows under a header, and how many more of `count` there are; nothing where there are none.

    Each of `sides` is `<` for words or `>` for numbers, for one column.
    """
    if not rows:
        return []
    classes = ["number" if side == ">" else "" for side in sides]
    head = tag("tr", *(tag("th", text, css=css, scope="col") for text, css in zip(header, classes, strict=True)))
    body = [tag("tr", *(tag("td", text, css=css) for text, css in zip(row, classes, strict=True))) for row in rows]
    whole = tag("table", *([tag("caption", caption)] if caption else []), tag("thead", head), tag("tbody", *body))
    found = [tag("div", whole, css="scroll")]
    if count > len(rows):
        found.append(tag("p", f"… and {count - len(rows):,} more: 'railscope report --json' has all.", css="more"))
    return found


def page(title: str, content: Sequence[Element]) -> str:
    """The whole HTML document of a report."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # Nothing is fetched and nothing runs, whatever should ever get into the page.
        _policy(),
        tag("title", title),
        tag("style", f"{_STYLE}{svg_style()}\n"),
    )
    root = tag("html", head, tag("body", *content), lang="en")
    return "<!DOCTYPE html>\n" + ElementTree.tostring(root, encoding="unicode", method="html") + "\n"


def _policy() -> Element:
    return ElementTree.Element(
        "meta",
        {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"},
    )


def _append(element: Element, text: str) -> None:
    if len(element):
        element[-1].tail = (element[-1].tail or "") + text
    else:
        element.text = (element.text or "") + text
