"""Tests for promtool with no more rules than each is about: those that it names, and all that these are made from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of some files."""

    groups: Mapping[str, list[Mapping[str, Any]]]
    """By the name of their file."""
    texts: Mapping[str, str]
    """By a rule's name all that it asks for: its expression, its labels, its annotations."""
    alerts: frozenset[str]

    @classmethod
    def from_files(cls, files: Iterable[Path]) -> Self:
        groups = {file.name: yaml.safe_load(file.read_text())["groups"] for file in files}
        # Some are in several parts.
        texts: dict[str, str] = {}
        alerts = set()
        for rule in (rule for of_file in groups.values() for group in of_file for rule in group["rules"]):
            parts = (rule["expr"], *rule.get("labels", {}).values(), *rule.get("annotations", {}).values())
            texts[_name(rule)] = "\n".join((texts.get(_name(rule), ""), *parts))
            alerts |= {rule["alert"]} if "alert" in rule else set()
        return cls(groups, texts, frozenset(alerts))

    def narrowed(self, tests: Mapping[str, Any], folder: Path) -> list[Path]:
        """Write each test of a file of promtool's tests into a file of its own, with the rules that it is about.

        Args:
            tests: what the file holds; its `rule_files` are not read.
            folder: empty.
        """
        written = []
        for at, test in enumerate(tests["tests"]):
            needed, rule_files, names = self._needed(test), [], set()
            for file, of_file in self.groups.items():
                kept = [{**one, "rules": [rule for rule in one["rules"] if _name(rule) in needed]} for one in of_file]
                if kept := [group for group in kept if group["rules"]]:
                    names |= {group["name"] for group in kept}
                    rule_files.append(folder / f"{at}-{file}")
                    rule_files[-1].write_text(yaml.safe_dump({"groups": kept}))
            order = [name for name in tests.get("group_eval_order", ()) if name in names]
            whole = {**tests, "rule_files": [*map(str, rule_files)], "group_eval_order": order, "tests": [test]}
            written.append(folder / f"{at}.yml")
            written[-1].write_text(yaml.safe_dump(whole))
        return written

    def _needed(self, test: Mapping[str, Any]) -> set[str]:
        """Names of the rules that a test is about."""
        ahead = {check["alertname"] for check in test.get("alert_rule_test", ())}
        ahead |= {name for check in test.get("promql_expr_test", ()) for name in self._asked(check["expr"])}
        needed: set[str] = set()
        while ahead:
            needed.add(name := ahead.pop())
            ahead |= set(self._asked(self.texts[name])) - needed
        return needed

    def _asked(self, text: str) -> Iterator[str]:
        """Rules whose series a text asks for."""
        yield from self.texts.keys() & set(re.findall(r"\w*:[\w:]+", text))
        for matchers in re.findall(r"\bALERTS(?:_FOR_STATE)?\b(?:\{([^}]*)\})?", text):
            wanted = re.findall(r'\balertname="(\w+)"', matchers)
            yield from wanted or self.alerts


def _name(rule: Mapping[str, Any]) -> str:
    name: str = rule.get("record") or rule["alert"]
    return name
