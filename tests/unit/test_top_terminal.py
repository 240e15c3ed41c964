"""`railscope top` as people use it: on a pseudo-terminal and in a pipe, before an agent's own server.

The node behind the server is simulated; it moves on two seconds with every scrape.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import bcrypt
import pytest

from railscope.agent.facts.snapshot import Snapshot
from railscope.exporters.web.config import WebConfigFile
from railscope.exporters.web.http import MetricsServer, ServerSettings
from tests.unit.exporters_snapshots import full_snapshot
from tests.unit.nodes import later
from tests.unit.pseudo_terminal import HIDE_ALTERNATE, SHOW_ALTERNATE, SHOW_CURSOR, PseudoTerminal

RAILSCOPE = str(Path(sys.executable).with_name("railscope"))
COMM = "00c0ffee00c0ffee"
NOBODY = "http://127.0.0.1:9"
"""The discard port: nothing listens there."""


class MovingNode:
    """A node whose time passes by being looked at."""

    def __init__(self) -> None:
        self.base: Callable[[], Snapshot] = full_snapshot
        self._looks = 0

    def __call__(self) -> Snapshot:
        self._looks += 1
        return later(self.base(), self._looks)


Serve = Callable[..., str]


@pytest.fixture
def node() -> MovingNode:
    return MovingNode()


@pytest.fixture
def serve(node: MovingNode) -> Iterator[Serve]:
    """Starts a server of the node and gives its URL."""
    with ExitStack() as servers:

        def start(web_config: WebConfigFile | None = None) -> str:
            server = servers.enter_context(
                MetricsServer(
                    ServerSettings(listen_address="127.0.0.1:0"),
                    snapshot=node,
                    healthy=lambda: (True, "ok"),
                    ready=lambda: (True, "ready"),
                    web=web_config,
                )
            )
            return f"http://127.0.0.1:{server.port}"

        yield start


def top(url: str, *arguments: str) -> list[str]:
    return [RAILSCOPE, "top", "--url", url, "--interval", "0.2", *arguments]


def plain(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*top(url, "--plain"), *arguments], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )


def ranks(lines: list[str]) -> list[str]:
    return [line.split()[1] for line in lines if line.startswith((COMM, "unknown"))]


def row(lines: list[str], start: str) -> str:
    return next(line for line in lines if line.startswith(start))


def test_ranks_rails_and_a_red_stall_are_on_a_screen_of_80_by_24(serve: Serve) -> None:
    with PseudoTerminal(top(serve())) as terminal:
        lines = terminal.shows("STALL rail_down", "████▊", "quit")
        terminal.until(lambda lines: "30.0 GB" in row(lines, "0     mlx5_0"))
        assert row(lines, f"{COMM} 0/4").split()[-3:] == ["250ms", "1", "0"]
        assert lines[-1].startswith("q quit")
        assert "red" in terminal.colour("STALL")
        assert "red" not in terminal.colour(f"{COMM} 0/4")


def test_keys_change_the_screen(serve: Serve) -> None:
    with PseudoTerminal(top(serve())) as terminal:
        terminal.shows("sort: STATE")
        terminal.until(lambda lines: ranks(lines) == ["1/4", "0/4", "unknow~"])
        terminal.press(b"s")
        terminal.shows("sort: COMM")
        terminal.press(b"s")
        terminal.shows("sort: RANK")
        terminal.press(b"r")
        terminal.shows("sort: RANK reversed")
        terminal.until(lambda lines: ranks(lines) == ["unknow~", "1/4", "0/4"])
        terminal.press(b"\t")
        terminal.shows("Tab rails", "sort: RAIL")
        terminal.press(b"?")
        terminal.shows("any key goes back")
        terminal.press(b"x")
        terminal.until(lambda lines: not any("any key goes back" in line for line in lines))
        terminal.press(b"/")
        terminal.shows("filter:")
        terminal.press(b"mlx5q")
        terminal.shows("filter: mlx5q_")
        terminal.press(b"\x7f\r")
        terminal.shows("only: mlx5", "0     mlx5_0")
        terminal.until(lambda lines: not any(line.startswith(("1     rxe0", f"{COMM} 0/4")) for line in lines))
        terminal.press(b"\x1b")
        terminal.shows("1     rxe0", f"{COMM} 0/4")


def test_pause_freezes_the_moment_until_it_goes_on(serve: Serve) -> None:
    with PseudoTerminal(top(serve())) as terminal:
        terminal.shows("STALL")
        terminal.press(b" ")
        terminal.shows("PAUSED", "go on")
        title = terminal.lines()[0]
        terminal.press(b"?")
        terminal.shows("any key goes back")
        assert terminal.lines()[0] == title
        terminal.press(b"x ")
        terminal.until(lambda lines: "PAUSED" not in lines[0] and lines[0] != title)


def test_a_changed_size_is_used_at_once(serve: Serve) -> None:
    with PseudoTerminal([RAILSCOPE, "top", "--url", serve(), "--interval", "600"]) as terminal:
        terminal.shows("STALL")
        terminal.resize(120, 30)
        lines = terminal.shows("LATE PID", "pretrain")
        assert len(lines) == 30
        terminal.until(lambda lines: lines[-1].startswith("q quit"))
        terminal.resize(60, 12)
        terminal.until(lambda lines: lines[-1].startswith("q quit") and len(lines) == 12)


def restored(terminal: PseudoTerminal) -> bool:
    written = terminal.written
    return (
        terminal.attributes == terminal.attributes_before
        and written.count(SHOW_ALTERNATE) == written.count(HIDE_ALTERNATE) > 0
        and written.rstrip().endswith((HIDE_ALTERNATE, SHOW_CURSOR))
    )


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (lambda terminal: terminal.press(b"q"), 0),
        (lambda terminal: terminal.press(b"\x03"), 128 + signal.SIGINT),
        (lambda terminal: terminal.process.send_signal(signal.SIGTERM), 128 + signal.SIGTERM),
        (lambda terminal: terminal.process.send_signal(signal.SIGHUP), 128 + signal.SIGHUP),
    ],
    ids=["q", "Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_the_terminal_is_as_it_was_after(serve: Serve, end: Callable[[PseudoTerminal], None], status: int) -> None:
    with PseudoTerminal(top(serve())) as terminal:
        terminal.shows("STALL")
        assert terminal.attributes != terminal.attributes_before
        end(terminal)
        assert terminal.ended() == status
        assert restored(terminal)


def test_an_agent_that_is_not_there_is_one_line_on_the_screen() -> None:
    with PseudoTerminal(top(NOBODY)) as terminal:
        lines = terminal.shows("no agent answers at http://127.0.0.1:9")
        assert sum("no agent answers" in line for line in lines) == 1
        terminal.press(b"q")
        assert terminal.ended() == 0


def test_an_agent_that_goes_leaves_what_was_known_and_its_return_is_seen(node: MovingNode, serve: Serve) -> None:
    def broken() -> Snapshot:
        raise RuntimeError("simulated")

    with PseudoTerminal(top(serve())) as terminal:
        terminal.shows("STALL")
        node.base = broken
        lines = terminal.shows("HTTP 500")
        assert row(lines, f"{COMM} 0/4")
        node.base = lambda: replace(full_snapshot(), stalls=replace(full_snapshot().stalls, lengths=()))
        terminal.shows("no stall")


def test_plain_lines_hold_rates_stalls_and_evidence(serve: Serve) -> None:
    ran = plain(serve(), "--count", "2")
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert sum(" kind=node " in line for line in lines) == 2
    # Two pages of one scrape are two looks at the node: more than one step lies between.
    node = next(line for line in lines if " kind=node " in line)
    assert " simulated=true processes=3 ranks=3 ended_ranks=0 rails=2 gpus=2 stalls=2 not_read=ethernet" in node
    rank = next(line for line in lines if f" kind=rank comm={COMM} rank=1 " in line)
    assert " calls_per_second=120 " in rank
    assert " inflight_seconds=0.25 incomplete=1 behind=0 " in rank
    assert rank.endswith(" stalled=rail_down")
    rail = next(line for line in lines if " kind=rail rail=0 device=mlx5_0 " in line)
    assert " speed_bytes_per_second=50000000000 " in rail
    assert " receive_bytes_per_second=15000000000 " in rail
    stall = next(line for line in lines if " kind=stall " in line)
    assert f" comm={COMM} rank=1 nranks=2 op=AllReduce cause=rail_down strength=strong " in stall
    evidence = "the link of rail 1 (rxe0) is being recovered; rail 1 (rail1) has no carrier or is switched off; "
    assert f' rail=1 device=rail1 evidence="{evidence}' in stall
    call = next(line for line in lines if " kind=stall " in line and " op=ncclCommInitRank " in line)
    assert " rank=0 nranks=2 op=ncclCommInitRank cause=inside_call strength=strong " in call
    reduced = next(line for line in lines if " kind=op op=AllReduce " in line)
    assert reduced.endswith(
        " mean_payload_bytes=1048576 algbw_bytes_per_second=251658240 busbw_bytes_per_second=377487360"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", NOBODY], f"no agent answers at {NOBODY} (Connection refused): is 'railscope agent' running there?"),
        (["--url", "ftp://x"], "--url: ftp://x is not a URL of an agent: write http://127.0.0.1:9779"),
        (["--url", "http://ada:secret@x"], "--url: a password in the URL is visible to others"),
        (["--user", "ada"], "--user and --password-file belong together"),
        (["--user", "ada", "--password-file", "/nonexistent"], "--password-file: /nonexistent: No such file"),
        (["--insecure"], "--ca-file and --insecure are for an agent behind TLS"),
        (["--url", "https://x", "--ca-file", "/dev/null"], "--ca-file: /dev/null contains no readable certificate"),
    ],
)
def test_what_cannot_be_asked_is_one_line_and_status_2(arguments: list[str], said: str) -> None:
    ran = subprocess.run(
        [RAILSCOPE, "top", "--plain", *arguments], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith(f"railscope top: {said}")
    assert ran.stderr.count("\n") == 1


def test_a_pipe_instead_of_a_terminal_is_told_of_plain() -> None:
    ran = subprocess.run([RAILSCOPE, "top"], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert ran.returncode == 2
    assert ran.stderr == "railscope top: stdin or stdout is not a terminal, or TERM is dumb: add --plain for lines\n"


def test_without_rich_one_line_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError('No module named rich', name='rich')\n")
    with PseudoTerminal(top(NOBODY), environment={"PYTHONPATH": str(tmp_path)}, columns=200) as terminal:
        assert terminal.ended() == 2
        said = [line for line in terminal.lines() if line]
    assert len(said) == 1
    assert "needs rich: run '" in said[0]
    assert '-m pip install "rich>=13.9"\', or add --plain' in said[0]


def test_a_password_opens_an_agent_that_asks_for_one(serve: Serve, tmp_path: Path) -> None:
    hashed = bcrypt.hashpw(b"open sesame", bcrypt.gensalt(4)).decode()
    (tmp_path / "web.yml").write_text(f"basic_auth_users:\n  ada: {hashed}\n")
    (tmp_path / "password").write_text("open sesame\n")
    url = serve(WebConfigFile(tmp_path / "web.yml"))
    refused = plain(url, "--count", "1")
    assert refused.returncode == 2
    assert "refuses a request without a password (HTTP 401): give --user and --password-file" in refused.stderr
    let_in = plain(url, "--count", "1", "--user", "ada", "--password-file", str(tmp_path / "password"))
    assert (let_in.returncode, let_in.stderr) == (0, "")
    assert " kind=rank " in let_in.stdout
