"""The map of the house, as CONTRIBUTING shows it: floors from the import contract, the rest from the rooms themselves.

.venv/bin/python -m tests.unit.house      # writes it anew
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Set
from itertools import chain
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
CONTRIBUTING: Final = REPOSITORY / "CONTRIBUTING.md"
_BETWEEN: Final = re.compile(r"(?<=<!-- map -->\n)(.*)(?=<!-- end of map -->)", re.DOTALL)
_PREFIX: Final = "railscope."
_COLUMN: Final = 30


def contracts() -> dict[str, dict[str, Any]]:
    """The contracts of pyproject.toml, by id."""
    return {contract["id"]: contract for contract in _import_linter()["contracts"]}


def root_packages() -> list[str]:
    """The packages that the contracts are about: all of the product."""
    return list(_import_linter()["root_packages"])


def _import_linter() -> dict[str, Any]:
    settings: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]
    return settings


def floors(contract: dict[str, Any]) -> list[list[str]]:
    """The layers of a contract, highest first: the rooms of each, as modules."""
    (container,) = contract.get("containers", [""])
    return [
        [f"{container}.{room}" if container else room for room in re.split(r" *[|:] *", layer)]
        for layer in contract["layers"]
    ]


def folder(room: str) -> Path:
    """Where a room lies."""
    return REPOSITORY / room.removeprefix(_PREFIX).replace(".", "/")


def sentence(room: str) -> str:
    """What a room says of itself in its first line."""
    file = folder(room) / "__init__.py"
    text = ast.get_docstring(ast.parse((file if file.exists() else folder(room).with_suffix(".py")).read_text()))
    return (text or "").partition("\n")[0]


def the_map() -> str:
    """Every room on its floor, with its modules and what each says of itself; rooms of rooms below them."""
    inner = {contract["containers"][0]: contract for contract in contracts().values() if "containers" in contract}
    lines = ["```", *_lines(floors(contracts()["floors"]), inner, ""), "```", ""]
    return "\n".join(lines)


def _lines(ordered: list[list[str]], inner: dict[str, dict[str, Any]], indent: str) -> Iterator[str]:
    for number, rooms in zip(range(len(ordered), 0, -1), ordered, strict=True):
        for room in rooms:
            name = str(folder(room).relative_to(REPOSITORY)) if not indent else room.rpartition(".")[2]
            yield f"{number} {indent}{name:<{_COLUMN - len(indent)}} {sentence(room)}"
            below = floors(inner[room]) if room in inner else []
            for module in modules(room, {*chain.from_iterable(below)}):
                within = "/".join(module.removeprefix(f"{room}.").split("."))
                yield f"  {indent}- {within:<{_COLUMN - len(indent) - 2}} {sentence(module)}"
            yield from _lines(below, inner, indent + "  ")


def modules(room: str, rooms: Set[str]) -> list[str]:
    """The modules of a room and of its folders, without the `rooms` inside it and what stands in those."""
    found = []
    for file in sorted(folder(room).rglob("*.py")):
        name = ".".join([room, *file.relative_to(folder(room)).with_suffix("").parts])
        if file.stem not in ("__init__", "__main__") and not any(f"{name}.".startswith(f"{inner}.") for inner in rooms):
            found.append(name)
    return found


def contributing() -> str:
    """CONTRIBUTING with the map as it should be."""
    return _BETWEEN.sub(lambda _: the_map(), CONTRIBUTING.read_text())


if __name__ == "__main__":
    CONTRIBUTING.write_text(contributing())
