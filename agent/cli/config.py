"""`railscope config check|show`: what is wrong with a configuration, and what an agent would run with.

Both read what `railscope agent` would read: defaults, the file, the environment, and the agent's own options, of which
all are taken.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from railscope.agent.config.command_parser import CommandParser
from railscope.agent.config.effective import Effective, Setting, Source, effective_settings
from railscope.agent.config.keys import ConfigError
from railscope.agent.config.options import ENVIRONMENT_KEYS, FILE_KEYS, RELOADABLE, add_arguments
from railscope.agent.config.unmatched import require_processes
from railscope.agent.config.written import format_value
from railscope.probes.printable import printable

SERVICE_FILE: Final = Path("/etc/railscope/railscope.yml")
"""What the shipped unit names."""
_FILE_VARIABLE: Final = "RAILSCOPE_CONFIG_FILE"
_OF_NO_FILE: Final = "# Without a key in the file:"


def add_config_arguments(parser: CommandParser) -> None:
    """The options of `railscope config`."""
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION", parser_class=CommandParser)

    def add(name: str, act: Callable[[Any, TextIO], int], help: str, description: str, epilog: str) -> CommandParser:
        action = actions.add_parser(name, help=help, description=description, epilog=epilog)
        before = len(action._actions)
        add_arguments(action)
        for option in action._actions[before:]:
            option.help = argparse.SUPPRESS
        action.add_argument(
            "file",
            nargs="?",
            type=Path,
            metavar="FILE",
            help=f"configuration file (default: what --config.file or {_FILE_VARIABLE} names, else {SERVICE_FILE})",
        )
        action.set_defaults(act=act, parser=action)
        return action

    add(
        "check",
        _check,
        help="all errors of a configuration at once",
        description="Read a configuration as the agent would, and print one line for each error, with file, key and "
        "what to write.  The environment and the file that web.config_file names are checked, too.  Every option of "
        "'railscope agent' is taken.  Exit status 0: the agent would take it; 2: it would not.",
        epilog="example: railscope config check /etc/railscope/railscope.yml && systemctl reload railscope",
    )
    show = add(
        "show",
        _show,
        help="the effective settings, and where each comes from",
        description="Print every setting that an agent with this command line, environment and file would run with, "
        "as a configuration file, and beside each where it comes from: default, file, environment or command line.  "
        "Every option of 'railscope agent' is taken.",
        epilog="example: railscope config show --stall.after 1m",
    )
    show.add_argument("--json", action="store_true", help="one JSON object instead of a configuration file")


def take_service_file(parsed: Any, environment: Mapping[str, str]) -> None:
    """Let a command read the service's configuration file, unless its command line or environment names another."""
    if "config_file" not in parsed and _FILE_VARIABLE not in environment and SERVICE_FILE.exists():
        parsed.config_file = SERVICE_FILE


def run_config(parsed: Any, out: TextIO) -> int:
    """Run `railscope config`; returns the exit status.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    if parsed.file is not None and "config_file" in parsed:
        raise ConfigError("FILE and --config.file name the file twice: leave one out")
    if parsed.file is not None:
        parsed.config_file = parsed.file
    else:
        take_service_file(parsed, os.environ)
    status: int = parsed.act(parsed, out)
    return status


def _check(parsed: Any, out: TextIO) -> int:
    effective = effective_settings(parsed, os.environ)
    if problems := _find_problems(effective):
        raise ConfigError(*problems)
    sources = {source: 0 for source in Source if source is not Source.DEFAULT}
    for setting in effective.settings:
        if setting.source in sources and setting.field != "config_file":
            sources[setting.source] += 1
    told = ", ".join(f"{count} set by the {source.value}" for source, count in sources.items() if count)
    file = effective.config.config_file
    # Without a name the service's file was looked for.
    name = printable(str(file)) if file is not None else f"{SERVICE_FILE} does not exist"
    rest = f"{told}; every other setting has its default" if told else "all settings have their defaults"
    print(f"{name}: no error; {rest}", file=out)
    return 0


def _find_problems(effective: Effective) -> list[str]:
    """What stops an agent with settings that are right by themselves, one line each."""
    config = effective.config
    problems = [
        f"{one.place or one.name}: {one.value} is not a folder; name where it is mounted"
        for one in effective.settings
        if one.field in ("procfs", "sysfs") and isinstance(one.value, Path) and not one.value.is_dir()
    ]
    if config.web_config_file is not None:
        # TLS and passwords are 6 MB of code.
        from railscope.exporters.web.config import WebConfigError, WebConfigFile

        try:
            WebConfigFile(config.web_config_file)
        except WebConfigError as error:
            problems.append(str(error))
    try:
        require_processes(config.procfs, config.pids)
    except ConfigError as error:
        problems += error.problems
    return problems


def _show(parsed: Any, out: TextIO) -> int:
    effective = effective_settings(parsed, os.environ)
    if parsed.json:
        json.dump(_as_json(effective), out, indent=2)
        print(file=out)
    else:
        print(format_effective(effective), file=out)
    return 0


def _as_json(effective: Effective) -> dict[str, object]:
    variables = {key.name: variable for variable, key in ENVIRONMENT_KEYS.items()}
    return {
        "settings": [
            {
                "name": one.name,
                "value": format_value(one.field, one.value),
                "source": one.source.value,
                "place": one.place,
                "variable": variables[one.name],
                "reloadable": one.name in RELOADABLE,
            }
            for one in effective.settings
        ]
    }


def format_effective(effective: Effective) -> str:
    """A configuration file that sets everything as it is, with the origin of each value beside it."""
    groups: dict[str, list[Setting]] = {}
    for setting in effective.settings:
        group = setting.name.partition(".")[0] if setting.name in FILE_KEYS else ""
        groups.setdefault(group, []).append(setting)
    without_key = groups.pop("", [])
    rows: list[tuple[str, str]] = []
    for group, settings in groups.items():
        rows.append((f"{group}:", ""))
        rows += [
            (f"  {one.name.partition('.')[2]}: {format_value(one.field, one.value)}", f"# {_origin(one)}")
            for one in settings
        ]
    rows.append((_OF_NO_FILE, ""))
    rows += [(f"#   --{one.name} {format_value(one.field, one.value)}", f"# {_origin(one)}") for one in without_key]
    width = max(len(left) for left, right in rows if right)
    return "\n".join(printable(f"{left:{width}}  {right}".rstrip()) for left, right in rows)


def _origin(setting: Setting) -> str:
    match setting.source:
        case Source.DEFAULT:
            return "default"
        case Source.FILE:
            return setting.place
        case _:
            return f"{setting.source.value}: {setting.place}"
