"""The command line in other forms: manual pages, and completion for bash, zsh and fish.

    python -m railscope.agent.cli.pages FOLDER

All of them are made of the parser when packages are built, so that a new option is in them.  Options that a command
only takes for another command's sake, and does not list in its help, are left out.

Source: man(7), bash(1) "Programmable Completion", zshcompsys(1), complete(1) of fish.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.agent.cli.main import Command, make_parser, version

PROGRAM: Final = "railscope"
_WORDS: Final = re.compile(r"[a-z0-9-]+(\|[a-z0-9-]+)+")
"""A metavar that lists all values."""
_FILES: Final = ("FILE", "PATH", "PROGRAM", "DIR|FILE", "DIR|FILE.npz")
_FOLDERS: Final = ("DIR",)


@dataclass(frozen=True, slots=True)
class Flag:
    """An option, or a positional argument, as a user sees it."""

    names: tuple[str, ...]
    """Empty: a positional argument."""
    value: str
    """The name of its value; empty: it takes none."""
    words: tuple[str, ...]
    """All values that it takes; empty: others."""
    several: bool
    help: str

    @property
    def takes_files(self) -> bool:
        return self.value in _FILES or "FILE" in self.value

    @property
    def takes_folders(self) -> bool:
        return self.value in _FOLDERS


@dataclass(frozen=True, slots=True)
class Page:
    """A command, or an action of one."""

    words: tuple[str, ...]
    """After the program's name; empty: the program itself."""
    summary: str
    description: str
    epilog: str
    """As it is written, of one line or more."""
    flags: tuple[Flag, ...]
    pages: tuple[Page, ...]


def page_of(parser: argparse.ArgumentParser, words: tuple[str, ...] = (), summary: str = "") -> Page:
    """What the parser of a command says of it and of its subcommands."""
    if isinstance(parser, Command):
        parser.fill()
    flags, pages = [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            pages += [page_of(sub, (*words, name), helps[name]) for name, sub in action.choices.items()]
        elif action.help is not argparse.SUPPRESS:
            flags.append(_flag(parser, action))
    text = parser.description or ""
    return Page(words, summary, _one_line(text), parser.epilog or "", tuple(flags), tuple(pages))


def _flag(parser: argparse.ArgumentParser, action: argparse.Action) -> Flag:
    value = ""
    if action.nargs != 0:
        default = action.dest if action.option_strings == [] else action.dest.upper()
        metavar = action.metavar if isinstance(action.metavar, str) else default
        value = metavar
    words: tuple[str, ...] = tuple(map(str, action.choices or ()))
    if words:
        value = "|".join(words)
    elif _WORDS.fullmatch(value):
        words = tuple(value.split("|"))
    several = isinstance(action.nargs, str) and action.nargs in "+*"
    help_text = parser._get_formatter()._expand_help(action) if action.help else ""
    return Flag(tuple(action.option_strings), value, words, several, _one_line(help_text))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def all_pages(page: Page) -> Iterator[Page]:
    """The page and those below it."""
    yield page
    for one in page.pages:
        yield from all_pages(one)


def manual(page: Page) -> str:
    """A manual page in roff: of a command with all its actions, or of the program with the list of its commands."""
    name = "-".join((PROGRAM, *page.words))
    summary = page.summary or "which NCCL collectives run, and what they put on each rail"
    lines = [
        f'.TH {_roff(name.upper())} 1 "" "{PROGRAM} {version()}" "User Commands"',
        ".SH NAME",
        f"{_roff(name)} \\- {_roff(summary)}",
        ".SH SYNOPSIS",
        *(line for one in (page, *page.pages) if page.words for line in _synopsis(one)),
    ]
    if not page.words:
        lines += [".B railscope", ".I COMMAND", "[\\fIOPTION\\fR ...]"]
    lines += [".SH DESCRIPTION", _roff(page.description)]
    if page.words:
        lines += [line for one in page.pages for line in (f".SS {_roff(' '.join(one.words))}", _roff(one.description))]
    else:
        lines += [".SH COMMANDS"]
        for one in page.pages:
            also = f"\\fB{_roff('-'.join((PROGRAM, *one.words)))}\\fR(1)"
            lines += [".TP", also, _roff(_sentence(one.summary))]
    shown = [one for one in (page, *page.pages) if page.words or one is page]
    if any(one.flags for one in shown):
        lines.append(".SH OPTIONS")
    for one in shown:
        if one is not page and one.flags:
            lines.append(f".SS {_roff(' '.join(one.words))}")
        for flag in one.flags:
            lines += [".TP", _heading(flag), _roff(_sentence(flag.help))]
    if examples := [one.epilog for one in shown if one.epilog]:
        lines += [".SH EXAMPLES", *(line for text in examples for line in (".PP", _roff(_sentence(_one_line(text)))))]
    lines += [
        ".SH EXIT STATUS",
        "0: fine.  1: a problem was found.  2: it could not run; one line on standard error says why.  130: Ctrl-C.",
        ".SH SEE ALSO",
        _see_also(page),
    ]
    return "\n".join(lines) + "\n"


def _synopsis(page: Page) -> Iterator[str]:
    if page.pages:
        return
    positional = [flag for flag in page.flags if not flag.names]
    yield f".B {_roff(' '.join((PROGRAM, *page.words)))}"
    yield "[\\fIOPTION\\fR ...]" + "".join(
        f" [\\fI{_roff(flag.value)}\\fR{' ...' if flag.several else ''}]" for flag in positional
    )
    yield ".br"


def _heading(flag: Flag) -> str:
    value = f" \\fI{_roff(flag.value)}\\fR" if flag.value else ""
    more = " ..." if flag.several else ""
    if not flag.names:
        return f"\\fI{_roff(flag.value)}\\fR{more}"
    return ", ".join(f"\\fB{_roff(name)}\\fR" for name in flag.names) + value + more


def _see_also(page: Page) -> str:
    if page.words:
        return ".BR railscope (1)"
    return "The documents in /usr/share/doc/railscope."


def _sentence(text: str) -> str:
    """With a capital and a full stop, unless it ends in a command to type."""
    if not text or text.startswith(("--", "example:")):
        return text
    return text[0].upper() + text[1:] + ("" if text.endswith((".", ")", "?")) else ".")


def _roff(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("\N{HORIZONTAL ELLIPSIS}", "...")
    return re.sub(r"^([.'])", r"\\&\1", escaped)


def bash(page: Page) -> str:
    """Completion for bash."""
    cases = []
    for one in all_pages(page):
        words = " ".join([*(sub.words[-1] for sub in one.pages), *(name for flag in one.flags for name in flag.names)])
        values = "".join(
            f"            {'|'.join(flag.names)}) {_bash_value(flag)} return ;;\n"
            for flag in one.flags
            if flag.names and flag.value
        )
        files = any(not flag.names and (flag.takes_files or flag.takes_folders) for flag in one.flags)
        cases.append(
            f"    '{' '.join(one.words)}')\n"
            + (f"        case $previous in\n{values}        esac\n" if values else "")
            + f"        words='{words}'\n"
            + (f"        files={'yes' if files else ''}\n" if files else "")
            + "        ;;\n"
        )
    actions = "|".join(one.words[0] for one in page.pages if one.pages)
    return (
        "# Completion of railscope for bash, made of its parser.\n"
        "_railscope() {\n"
        "    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}\n"
        "    local command= words= files=\n"
        "    [ \"$previous\" = '=' ] && previous=${COMP_WORDS[COMP_CWORD-2]}\n"
        "    [ \"$current\" = '=' ] && previous=${COMP_WORDS[COMP_CWORD-1]} current=''\n"
        "    [ \"$COMP_CWORD\" -gt 1 ] && command=${COMP_WORDS[1]}\n"
        f"    case $command in {actions}) [ \"$COMP_CWORD\" -gt 2 ] && command+=\" ${{COMP_WORDS[2]}}\" ;; esac\n"
        "    case $command in\n"
        + "".join(cases)
        + "    esac\n"
        "    mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$current\")\n"
        "    if [ -n \"$files\" ] && [[ $current != -* ]]; then\n"
        "        compopt -o filenames 2>/dev/null\n"
        "        mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -f -- \"$current\")\n"
        "    fi\n"
        "}\n"
        "complete -F _railscope railscope\n"
    )  # fmt: skip


def _bash_value(flag: Flag) -> str:
    if flag.words:
        return f"mapfile -t COMPREPLY < <(compgen -W '{' '.join(flag.words)}' -- \"$current\");"
    if flag.takes_files or flag.takes_folders:
        kind = "-d" if flag.takes_folders else "-f"
        return f'compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen {kind} -- "$current");'
    return "COMPREPLY=();"


def zsh(page: Page) -> str:
    """Completion for zsh."""
    functions = [_zsh_function(one) for one in all_pages(page)]
    return (
        "#compdef railscope\n# Completion of railscope for zsh, made of its parser.\n\n"
        + "\n".join(functions)
        + '\n_railscope "$@"\n'
    )


def _zsh_function(page: Page) -> str:
    name = "_".join(("_railscope", *page.words))
    specs = [spec for flag in page.flags for spec in _zsh_specs(flag)]
    if page.pages:
        specs += ["'1: :->command'", "'*:: :->rest'"]
    body = "    local context state line\n    typeset -A opt_args\n" if page.pages else ""
    body += "    _arguments -S \\\n        " + " \\\n        ".join(specs) + "\n"
    if page.pages:
        commands = "\n".join(f"            {_zsh(one.words[-1] + ':' + one.summary)}" for one in page.pages)
        calls = "\n".join(
            f"            {one.words[-1]}) {'_'.join(('_railscope', *one.words))} ;;" for one in page.pages
        )
        body += (
            "    case $state in\n"
            "    command)\n"
            f"        local -a commands=(\n{commands}\n        )\n"
            "        _describe command commands ;;\n"
            f"    rest)\n        case $line[1] in\n{calls}\n        esac ;;\n"
            "    esac\n"
        )
    return f"{name}() {{\n{body}}}\n"


def _zsh_specs(flag: Flag) -> Iterator[str]:
    if flag.words:
        values = f":{_zsh_text(flag.value)}:({' '.join(flag.words)})"
    elif flag.takes_files:
        values = f":{_zsh_text(flag.value)}:_files"
    elif flag.takes_folders:
        values = f":{_zsh_text(flag.value)}:_files -/"
    else:
        values = f":{_zsh_text(flag.value)}: " if flag.value else ""
    if not flag.names:
        yield _zsh(("*" if flag.several else "") + (values or ": :"))
    for name in flag.names:
        yield _zsh(f"{'*' if flag.several else ''}{name}[{_zsh_text(flag.help)}]{values}")


def _zsh_text(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


def _zsh(text: str) -> str:
    return shlex.quote(text)


def fish(page: Page) -> str:
    """Completion for fish."""
    lines = ["# Completion of railscope for fish, made of its parser.", "complete -c railscope -f"]
    for one in all_pages(page):
        seen = [f"__fish_seen_subcommand_from {word}" for word in one.words]
        siblings = " ".join(sub.words[-1] for sub in one.pages)
        if siblings:
            none_yet = "__fish_use_subcommand" if not one.words else f"not __fish_seen_subcommand_from {siblings}"
            condition = "; and ".join([*seen, none_yet])
            lines += [
                f"complete -c railscope -n {_fish(condition)} -a {sub.words[-1]} -d {_fish(sub.summary)}"
                for sub in one.pages
            ]
        condition = "; and ".join(seen) or "__fish_use_subcommand"
        lines += [line for flag in one.flags for line in _fish_flag(flag, condition)]
    return "\n".join(lines) + "\n"


def _fish_flag(flag: Flag, condition: str) -> Iterator[str]:
    names = "".join(
        f" -l {_fish(name[2:])}" if name.startswith("--") else f" -s {_fish(name[1:])}" for name in flag.names
    )
    value = " -r" if flag.names and flag.value else ""
    if flag.words:
        value = f" -x -a {_fish(' '.join(flag.words))}"
    elif flag.takes_files:
        value += " -F"
    elif flag.takes_folders:
        value += " -a '(__fish_complete_directories)'"
    if names or value:
        yield f"complete -c railscope -n {_fish(condition)}{names}{value} -d {_fish(flag.help)}"


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def files() -> dict[str, str]:
    """Every file's text by its name."""
    program = page_of(make_parser())
    return {
        **{f"man/{'-'.join((PROGRAM, *page.words))}.1": manual(page) for page in (program, *program.pages)},
        "completion/railscope.bash": bash(program),
        "completion/_railscope": zsh(program),
        "completion/railscope.fish": fish(program),
    }


def main(arguments: Sequence[str]) -> int:
    """Write the files below a folder; returns the exit status."""
    (folder,) = map(Path, arguments)
    for name, text in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
