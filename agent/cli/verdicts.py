"""`railscope verdicts`: prints each stall that a running agent tells of, or runs a program for it.

The agent has rights that an operator's script needs none of, and must not wait for it: so the agent only tells
(agent/node/daemon/verdict_socket.py), and what acts is this command, in a unit of its own, as a user of its own.
Programs run one after the other, each with a time limit; meanwhile lines wait in the socket, and the agent counts those
that it cannot keep.  When the agent ends, the command waits for the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from railscope.agent.cli.log import print_error
from railscope.agent.config.command_parser import CommandParser
from railscope.agent.config.keys import ConfigError
from railscope.agent.config.values import duration_ns, one_of, option_type
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.stall import CONFIDENCES, VERDICT_VERSION

SERVICE_SOCKET: Final = Path("/run/railscope/verdicts.sock")
"""Where the shipped unit's agent listens."""
_AGAIN_SECONDS: Final = 1.0
_MOST_LINE_BYTES: Final = 1 << 20
_OF_STALLS: Final = frozenset({"standing", "begun", "changed", "ended"})


def add_verdicts_arguments(parser: CommandParser) -> None:
    """The options of `railscope verdicts`."""
    parser.add_argument(
        "--socket", type=Path, default=SERVICE_SOCKET, metavar="PATH", help=f"the agent's (default: {SERVICE_SOCKET})"
    )
    parser.add_argument(
        "--once", action="store_true", help="print or act on the stalls that stand, then end; exit status 1: there are"
    )
    parser.add_argument(
        "--on-verdict",
        type=Path,
        metavar="PROGRAM",
        help="run this program for each line, which it gets on its standard input; without a shell, and with "
        "RAILSCOPE_EVENT, RAILSCOPE_CAUSE and RAILSCOPE_CONFIDENCE in its environment",
    )
    parser.add_argument(
        "--timeout",
        type=option_type(duration_ns("100ms", "1h")),
        default=60_000_000_000,
        metavar="TIME",
        help="end a program that takes longer (default: 60s)",
    )
    parser.add_argument(
        "--confidence",
        type=option_type(one_of(*CONFIDENCES)),
        default="low",
        metavar="|".join(CONFIDENCES),
        help="leave out what is less sure (default: low)",
    )


def run_verdicts(parsed: Any, out: TextIO) -> int:
    """Run `railscope verdicts`; returns the exit status.

    Raises:
        ConfigError: no agent listens there, or the program cannot be run.
    """
    program: Path | None = parsed.on_verdict
    if program is not None and not (program.is_file() and os.access(program, os.X_OK)):
        raise ConfigError(f"--on-verdict: {program} is not a program that may be run; name an executable file")
    channel = _connect(parsed.socket)
    least = CONFIDENCES.index(parsed.confidence)
    stalls = 0
    while True:
        for line, fields in _lines(channel, once=parsed.once):
            if fields["event"] not in _OF_STALLS or CONFIDENCES.index(fields["confidence"]) < least:
                continue
            stalls += 1
            if program is None:
                print(line, file=out, flush=True)
            else:
                _act(program, line, fields, parsed.timeout / 1e9)
        channel.close()
        if parsed.once:
            return 1 if stalls else 0
        print_error(f"railscope verdicts: {parsed.socket}: the agent has ended; waiting for the next one")
        channel = _connect_again(parsed.socket)


def _connect(path: Path) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        channel.connect(os.fspath(path))
    except OSError as error:
        channel.close()
        raise ConfigError(
            f"{path}: {(error.strerror or str(error)).lower()}; start the agent with --verdicts.socket, or name its "
            "socket with --socket"
        ) from None
    return channel


def _connect_again(path: Path) -> socket.socket:
    while True:
        time.sleep(_AGAIN_SECONDS)
        try:
            return _connect(path)
        except ConfigError:
            continue


def _lines(channel: socket.socket, *, once: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lines until the agent ends; `once`: those of stalls that stand.

    Raises:
        ConfigError: what comes is not from such an agent.
    """
    left: int | None = None
    data = b""
    while left is None or left > 0 or not once:
        whole, newline, rest = data.partition(b"\n")
        if not newline:
            if len(data) > _MOST_LINE_BYTES:
                raise ConfigError("what listens there is no agent of this version: its line has no end")
            if once and left is not None and not select.select([channel], [], [], _AGAIN_SECONDS)[0]:
                return  # the agent left out some
            try:
                more = channel.recv(1 << 16)
            except ConnectionError:
                more = b""
            if not more:
                return
            data += more
            continue
        data = rest
        line = whole.decode(errors="replace")
        fields = _fields(line)
        if fields["lost"]:
            print_error(f"railscope verdicts: lost {format_count(fields['lost'], 'line')} before this one: read faster")
        if fields["event"] == "hello":
            left = fields["stalls"]
            continue
        if left:
            left -= 1
        yield line, fields


def _fields(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
        if (
            fields["version"] == VERDICT_VERSION
            and isinstance(fields["event"], str)
            and isinstance(fields["lost"], int)
        ):
            if fields["event"] in _OF_STALLS and fields["confidence"] not in CONFIDENCES:
                raise ValueError("confidence")
            return dict(fields)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise ConfigError("what listens there is no agent of this version; install the same version of both")


def _act(program: Path, line: str, fields: dict[str, Any], seconds: float) -> None:
    """Run the program for one line; what goes wrong is said, and the next line is read."""
    told = {
        "RAILSCOPE_EVENT": fields["event"],
        "RAILSCOPE_CAUSE": str(fields["verdict"].get("cause", "")),
        "RAILSCOPE_CONFIDENCE": fields["confidence"],
    }
    try:
        running = subprocess.Popen([program], stdin=subprocess.PIPE, env=os.environ | told, start_new_session=True)
    except OSError as error:
        print_error(f"railscope verdicts: {program}: {error.strerror}")
        return
    try:
        running.communicate(line.encode() + b"\n", seconds)
    except subprocess.TimeoutExpired:
        print_error(f"railscope verdicts: {program} was ended: it took longer than {seconds:g} s")
    finally:
        # With what it has started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    if running.wait() > 0:
        print_error(f"railscope verdicts: {program}: exit status {running.returncode}")
