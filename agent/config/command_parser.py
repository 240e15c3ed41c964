"""Parsers of command lines: errors of one line, with the nearest word that is right, and help that can be copied.

Every command begins with one, so no more than argparse is imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence

TYPE_CHECKING = False  # typing's own takes milliseconds to import
if TYPE_CHECKING:
    from typing import Any, NoReturn


class HelpFormatter(argparse.HelpFormatter):
    """Wraps each line of a description or an epilog by itself; examples are not wrapped, so that they can be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for line in text.splitlines():
            as_it_is = not line.strip() or line.startswith((" ", "example"))
            filled.append(indent + line if as_it_is else super()._fill_text(line, width, indent))
        return "\n".join(filled)


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the nearest word that is right; exit status 2.

    Options are not abbreviated, so that a new option never changes the meaning of an old command line.  Parsers of
    subcommands are of this class too.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", HelpFormatter)
        super().__init__(*args, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; an option of a command that stands before the command is an error, and without a word where a
        command has to be it prints the help, status 2."""
        words = list(sys.argv[1:] if args is None else args)
        commands = self._commands()
        if commands is not None and not words:
            self.print_help(sys.stderr)
            self.exit(2)
        if commands is not None and words and words[0].startswith("-") and len(words[0]) > 1:
            flag = words[0].partition("=")[0]
            if flag not in self._option_string_actions:
                self._refuse_early_option(flag, words, commands)
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Print one line and leave with status 2."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = unknown.split(" ", 1)[0].partition("=")[0]
            kind = "option" if word.startswith("-") else "argument"
            message = f"unknown {kind} {word}{_suggest_nearest(word, self._flags()) if kind == 'option' else ''}"
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        # Standard error that is full or closed takes nothing, and that is no other error.
        with contextlib.suppress(OSError):
            super()._print_message(message, file)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse's, with the nearest choice.

        Raises:
            argparse.ArgumentError: the value is no choice.
        """
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        word = str(value)
        if not isinstance(action, argparse._SubParsersAction):
            hint = _suggest_nearest(word, choices) or f"; choose from {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"{word!r} is no choice{hint}")
        # `help` and `version` are options here.
        hint = _suggest_nearest(word, [*choices, *self._option_string_actions]) or f"; there are {', '.join(choices)}"
        raise argparse.ArgumentError(None, f"there is no {str(action.metavar).lower()} {word!r}{hint}")

    def _refuse_early_option(
        self, flag: str, words: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]
    ) -> NoReturn:
        command = next((word for word in words if word in commands), None)
        if command is None:
            self.error(f"unknown option {flag}{_suggest_nearest(flag, self._option_string_actions)}")
        self.error(f"{flag} stands before {command}: write the options of a command behind it")

    def _commands(self) -> Mapping[str, argparse.ArgumentParser] | None:
        """Parsers of subcommands, by name; None: there are no subcommands."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return action.choices
        return None

    def _flags(self) -> list[str]:
        flags = [flag for action in self._actions for flag in action.option_strings]
        for parser in (self._commands() or {}).values():
            flags += parser._flags() if isinstance(parser, CommandParser) else ()
        return flags


def _suggest_nearest(word: str, allowed: Iterable[str]) -> str:
    from railscope.agent.config.keys import suggest_nearest  # only ever for an error

    return suggest_nearest(word, allowed)
