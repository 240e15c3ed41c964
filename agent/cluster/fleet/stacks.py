"""Asks agents where the Python code of blamed ranks stands: `/stalls` has it where they run with --stall.stacks.

The store names their addresses (the label `instance`), and no stack is in it: what it holds is read by more people than
may see a program's code.  Agents are asked once, in parallel; one that does not answer blanks none of the others.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from railscope.agent.cluster.fleet.timed_http import read_body, timed_response
from railscope.probes.printable import printable

PORT: Final = 9779
"""Of agents, where the label `instance` has none."""
_PATH: Final = "/stalls"
_MOST_BYTES: Final = 8 << 20
_MOST_LINES: Final = 64
_MOST_LETTERS: Final = 300
_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class AgentAccess:
    """How agents are asked."""

    scheme: str = "http"
    """`http` or `https`."""
    authorization: str = field(default="", repr=False)
    """Value of the Authorization header; empty: none."""
    ca_file: Path | None = None
    """Certificates to trust instead of the system's."""
    timeout_seconds: float = 5.0
    """For one answer, however it comes."""


@dataclass(frozen=True, slots=True)
class RankStack:
    """Where the main thread of a blamed rank stood."""

    comm: str
    rank: int
    host: str
    taken: float
    """Seconds since the Unix epoch, by that host's clock."""
    lines: tuple[str, ...]
    """`function (file:line)`, innermost first; none: `why` says so."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """What one agent says."""

    stacks: tuple[RankStack, ...] = ()
    trouble: str = ""
    """Why it says nothing, in one line; empty: it answered."""


def read_stacks(addresses: Mapping[str, str], access: AgentAccess) -> dict[str, AgentAnswer]:
    """The stacks that the agents of some hosts have, by host; `addresses`: of their agents, by host."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="stacks") as threads:
        answers = threads.map(lambda host: _read(host, addresses[host], access), addresses)
        return dict(zip(addresses, answers, strict=True))


def _read(host: str, address: str, access: AgentAccess) -> AgentAnswer:
    name, port = _split(address)
    shown = f"{access.scheme}://{name}:{port}"
    try:
        status, text = _exchange(name, port, access)
    except ssl.SSLCertVerificationError as error:
        return AgentAnswer(trouble=f"the certificate of {shown} is not trusted ({error.verify_message}): --ca-file")
    except TimeoutError:
        return AgentAnswer(trouble=f"{shown} did not answer within {access.timeout_seconds:g} s")
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
        return AgentAnswer(trouble=_one_line(f"cannot reach {shown}, as the store's label instance has it: {why}"))
    if status != 200:
        wants = ": it wants credentials, --stacks-auth USER:FILE" if status in (401, 403) else ""
        return AgentAnswer(trouble=f"{shown} answers with HTTP {status}{wants}")
    try:
        return AgentAnswer(tuple(_stacks(json.loads(text), host)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return AgentAnswer(trouble=f"{shown} does not answer as an agent of railscope does")


def _split(address: str) -> tuple[str, int]:
    """Host and port of an address: `host1:9779`, `host1`, `[2001:db8::1]:9779`."""
    name, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and not (":" in name and not name.endswith("]")):
        return name.strip("[]"), int(port)
    return address.strip("[]"), PORT


def _exchange(name: str, port: int, access: AgentAccess) -> tuple[int, bytes]:
    connection: http.client.HTTPConnection
    if access.scheme == "https":
        context = ssl.create_default_context(cafile=access.ca_file)
        connection = http.client.HTTPSConnection(name, port, timeout=access.timeout_seconds, context=context)
    else:
        connection = http.client.HTTPConnection(name, port, timeout=access.timeout_seconds)
    headers = {"Accept": "application/json", "User-Agent": "railscope"}
    if access.authorization:
        headers["Authorization"] = access.authorization
    until = time.monotonic() + access.timeout_seconds
    try:
        connection.request("GET", _PATH, headers=headers)
        with closing(timed_response(connection, "GET", until)) as response:
            text = read_body(response, _MOST_BYTES)
            return response.status, text if len(text) <= _MOST_BYTES else b""
    finally:
        connection.close()


def _stacks(document: Any, host: str) -> Collection[RankStack]:
    """Every stack on the page, once."""
    found: dict[tuple[str, int], RankStack] = {}
    for stall in document["stalls"]:
        stack = stall.get("blamed_stack")
        if stack is None:
            continue
        lines = tuple(_one_line(str(line)) for line in stack.get("lines", ())[:_MOST_LINES])
        why = _one_line(str(stack.get("unknown", "")))
        comm, rank = str(stall["comm"]), int(stall["blamed_rank"])
        found[comm, rank] = RankStack(comm, rank, host, int(stack["taken_realtime_ns"]) / 1e9, lines, why)
    return found.values()


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))[:_MOST_LETTERS]
