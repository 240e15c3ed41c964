"""What programs of a host are told of stalls, and what they cannot do to the agent."""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.hardware import HardwareEvent, ModuleFacts, NodeCondition
from railscope.agent.facts.hardware_evidence import NodeHardware
from railscope.agent.facts.stall import Diagnosis, Stall
from railscope.agent.node.daemon.verdict_socket import (
    MOST_CLIENTS,
    MOST_OF_A_USER,
    MOST_UNSENT_BYTES,
    VerdictSocket,
)
from railscope.exporters.web.listen import ServerError
from railscope.probes.clock import SystemClock
from railscope.probes.processes.owner import ProcessOwner
from railscope.probes.processes.processes import ProcessIdentity
from tests.unit.json_documents import VERDICTS, checked

DOWN = Diagnosis(Cause.RAIL_DOWN, ("rail 1 has no carrier",), culprit=True, rail="1", device="eth1")
WAITS = Diagnosis(Cause.UNKNOWN, ("nothing explains it",), culprit=False)


def stall(instance: int = 7, diagnosis: Diagnosis = DOWN, user: str = "ada") -> Stall:
    owner = ProcessOwner(ProcessIdentity(100 + instance, 1), user, "train")
    return Stall(
        *(instance, "0xabc", "0", "2", 100 + instance, "AllReduce", 1024, 5_000, 9_000, 0, "strong", diagnosis),
        owner=owner,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "verdicts.sock"


@pytest.fixture
def verdicts(path: Path) -> Iterator[VerdictSocket]:
    with closing(VerdictSocket(path, "gpu-1", "0.1", SystemClock())) as opened:
        yield opened


class Reader:
    def __init__(self, verdicts: VerdictSocket, path: Path) -> None:
        self._channel = socket.socket(socket.AF_UNIX)
        self._channel.connect(os.fspath(path))
        self._channel.settimeout(5)
        verdicts.serve()
        self._file = self._channel.makefile("r")

    def line(self) -> dict[str, Any]:
        fields = checked(VERDICTS, self._file.readline())
        assert fields["version"] == 1
        return fields

    def close(self) -> None:
        self._file.close()
        self._channel.close()


def test_a_reader_is_told_what_stands_and_then_what_changes(verdicts: VerdictSocket, path: Path) -> None:
    verdicts.publish([stall()])
    with closing(Reader(verdicts, path)) as reader:
        hello = reader.line()
        assert (hello["event"], hello["host"], hello["stalls"], hello["lost"]) == ("hello", "gpu-1", 1, 0)
        standing = reader.line()
        assert (standing["event"], standing["confidence"]) == ("standing", "high")
        assert standing["verdict"]["evidence"] == ["rail 1 has no carrier"]
        verdicts.publish([stall()])
        verdicts.publish([stall(diagnosis=WAITS), stall(8, replace(DOWN, rail="2"))])
        verdicts.publish([stall(8, replace(DOWN, rail="2"))])
        told = [reader.line() for _ in range(3)]
    assert [(one["event"], one["verdict"]["cause"], one["confidence"]) for one in told] == [
        ("changed", "unknown", "medium"),
        ("begun", "rail_down", "high"),
        ("ended", "unknown", "medium"),
    ]
    ended = told[-1]
    assert ended["id"] == standing["id"]
    assert ended["verdict"]["ended_realtime_ns"] is not None


def test_hardware_that_failed_just_before_comes_first_also_for_who_comes_later(
    verdicts: VerdictSocket, path: Path
) -> None:
    began = stall().since_realtime_ns / 1e9
    xid = HardwareEvent("xid", "79", "0000:1b:00.0", "page", 1, began - 12)
    alarm = ModuleFacts("2", "eth2", "osfp", alarms=(("", "temperature_high"),))
    hardware = NodeHardware(NodeCondition(modules=(alarm,), events=(xid,)))
    told = [
        "NVIDIA's driver told of XID 79 of the GPU 0000:1b:00.0 12 s before the stall",
        "rail 1 has no carrier",
        "the module of rail 2 (eth2) reports temperature high",
    ]
    with closing(Reader(verdicts, path)) as reader:
        reader.line()
        verdicts.publish([stall()], lambda: hardware)
        assert reader.line()["verdict"]["evidence"] == told
        with closing(Reader(verdicts, path)) as later:
            later.line()
            assert later.line()["verdict"]["evidence"] == told
        verdicts.publish([], lambda: hardware)
        assert reader.line()["verdict"]["evidence"] == told[:2]


def test_hardware_is_asked_for_only_where_there_is_a_stall_to_tell_of(verdicts: VerdictSocket, path: Path) -> None:
    asked = []

    def hardware() -> NodeHardware:
        asked.append(1)
        return NodeHardware()

    with closing(Reader(verdicts, path)) as reader:
        reader.line()
        for _ in range(3):
            verdicts.publish([], hardware)
            assert asked == []
        verdicts.publish([stall(), stall(8)], hardware)
        verdicts.publish([stall(), stall(8)], hardware)
    assert asked == [1]


def test_the_next_operation_of_a_communicator_is_another_stall(verdicts: VerdictSocket, path: Path) -> None:
    with closing(Reader(verdicts, path)) as reader:
        reader.line()
        verdicts.publish([stall()])
        verdicts.publish([replace(stall(), since_ns=6_000)])
        told = [reader.line() for _ in range(3)]
    assert [one["event"] for one in told] == ["begun", "ended", "begun"]
    assert told[0]["id"] == told[1]["id"] != told[2]["id"]


def test_who_does_not_read_loses_lines_and_is_told_how_many(verdicts: VerdictSocket, path: Path) -> None:
    large = replace(DOWN, evidence=("x" * 1000,) * 4)
    published = 2 * MOST_UNSENT_BYTES // 4000
    with closing(Reader(verdicts, path)) as reader:
        for number in range(published):
            verdicts.publish([stall(number + 1, large)])
        lines = [reader.line()]
        while "lost" not in lines[-1] or not lines[-1]["lost"]:
            verdicts.serve()
            if len(lines) == 100:  # there is room again
                verdicts.publish([stall()])
            lines.append(reader.line())
    # The greeting, each one's beginning and end; the beginning of the last one comes after this line.
    assert len(lines) + lines[-1]["lost"] == 1 + 2 * published


def test_one_user_crowds_out_no_other(verdicts: VerdictSocket, path: Path) -> None:
    many = [stall(number) for number in range(1, 1000)]
    with closing(Reader(verdicts, path)) as reader:
        reader.line()
        verdicts.publish([*many, stall(5000, user="bob")])
        told = [reader.line() for _ in range(MOST_OF_A_USER + 1)]
    assert told[-1]["verdict"]["process"]["user"] == "bob"
    assert told[-1]["lost"] == len(many) - MOST_OF_A_USER


def test_readers_that_go_and_too_many_of_them_harm_nobody(verdicts: VerdictSocket, path: Path) -> None:
    gone = [Reader(verdicts, path) for _ in range(MOST_CLIENTS)]
    refused = Reader(verdicts, path)
    with pytest.raises(json.JSONDecodeError):
        refused.line()
    refused.close()
    for reader in gone:
        reader.close()
    verdicts.publish([stall()])
    verdicts.serve()
    with closing(Reader(verdicts, path)) as reader:
        assert reader.line()["stalls"] == 1


def test_without_a_descriptor_for_a_client_the_loop_is_left_alone_and_the_client_is_taken_later(
    verdicts: VerdictSocket, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def readable() -> bool:
        return bool(select.select([verdicts], [], [], 0)[0])

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for client in clients:
        client.connect(os.fspath(path))
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(int(one.name) for one in Path("/proc/self/fd").iterdir()) + 1, limit[1])
    )
    spare: list[int] = []
    try:
        with suppress(OSError):
            while True:
                spare.append(os.dup(0))
        for _ in range(3):
            verdicts.publish([])
            assert readable()
            verdicts.serve()
            assert not readable(), "it would be asked again at once"
    finally:
        for one in spare:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert [record.getMessage() for record in caplog.records] == [f"{path}: clients are refused: Too many open files"]
    verdicts.publish([])
    for _ in clients:
        verdicts.serve()
    for client in clients:
        assert json.loads(client.recv(4096))["event"] == "hello"
        client.close()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=f"there is no folder {tmp_path}/absent; make it, or name another one"):
        VerdictSocket(tmp_path / "absent" / "verdicts.sock", "gpu-1", "0.1", SystemClock())


def test_the_socket_is_its_owners_and_what_a_killed_agent_left_is_replaced(path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(os.fspath(path))
    left.close()
    with closing(VerdictSocket(path, "gpu-1", "0.1", SystemClock())):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with pytest.raises(ServerError, match="another agent listens there"):
            VerdictSocket(path, "gpu-1", "0.1", SystemClock())
    assert not path.exists()
    path.write_text("not a socket")
    with pytest.raises(ServerError, match="address already in use"):
        VerdictSocket(path, "gpu-1", "0.1", SystemClock())
    assert path.read_text() == "not a socket"


def run(path: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "railscope.agent.cli.main", "verdicts", "--socket", str(path), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def serve_until(verdicts: VerdictSocket, done: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        verdicts.serve()
        time.sleep(0.01)


def test_the_command_prints_what_stands_and_says_so_with_its_status(verdicts: VerdictSocket, path: Path) -> None:
    for current, options, lines, status in (
        ([stall(), stall(8, WAITS)], (), 2, 1),
        ([stall(), stall(8, WAITS)], ("--confidence", "high"), 1, 1),
        ([], (), 0, 0),
    ):
        verdicts.publish(current)
        command = run(path, "--once", *options)
        serve_until(verdicts, lambda command=command: command.poll() is not None)  # type: ignore[misc]
        out, error = command.communicate()
        assert (len(out.splitlines()), command.returncode, error) == (lines, status, "")


def test_the_command_runs_a_program_for_each_line_and_goes_on_when_it_fails(
    verdicts: VerdictSocket, path: Path, tmp_path: Path
) -> None:
    told, program = tmp_path / "told", tmp_path / "act"
    program.write_text(
        '#!/bin/sh\nread line\nprintf "%s %s %s %s\\n" "$RAILSCOPE_EVENT" "$RAILSCOPE_CAUSE" "$RAILSCOPE_CONFIDENCE" '
        f'"$line" >> {told}\n'
        '[ "$RAILSCOPE_EVENT" != begun ] || sleep 60\nexit 3\n'
    )
    program.chmod(0o755)
    verdicts.publish([stall()])
    command = run(path, "--on-verdict", str(program), "--timeout", "300ms")
    try:
        serve_until(verdicts, lambda: told.exists() and told.read_text().count("\n") == 1)
        verdicts.publish([stall(), stall(8, user="bob")])
        serve_until(verdicts, lambda: told.read_text().count("\n") == 2)
        verdicts.publish([stall()])
        serve_until(verdicts, lambda: told.read_text().count("\n") == 3)
    finally:
        command.terminate()
        _, error = command.communicate()
    events = [line.split(" ", 3) for line in told.read_text().splitlines()]
    assert [(event, cause) for event, cause, *_ in events] == [
        ("standing", "rail_down"),
        ("begun", "rail_down"),
        ("ended", "rail_down"),
    ]
    lines = [json.loads(line) for *_, line in events]
    assert [confidence for _, _, confidence, _ in events] == [line["confidence"] for line in lines]
    assert lines[0]["verdict"]["rail"] == "1"
    assert "exit status 3" in error
    assert "took longer than 0.3 s" in error


def test_without_an_agent_the_command_says_what_to_do(path: Path) -> None:
    command = run(path, "--once")
    _, error = command.communicate(timeout=20)
    assert command.returncode == 2
    assert error.startswith(f"railscope: {path}: no such file or directory; start the agent with --verdicts.socket")


@pytest.mark.parametrize(
    ("program", "tool", "diagnosis", "wanted"),
    [
        ("drain-slurm-node", "scontrol", DOWN, "State=DRAIN Reason=railscope: rail_down on rail 1 (eth1)"),
        ("drain-slurm-node", "scontrol", WAITS, None),
        ("set-kubernetes-condition", "kubectl", DOWN, '"type":"RailscopeStall","status":"True"'),
    ],
)
def test_examples_act_through_their_tools(
    verdicts: VerdictSocket,
    path: Path,
    tmp_path: Path,
    program: str,
    tool: str,
    diagnosis: Diagnosis,
    wanted: str | None,
) -> None:
    said, tools = tmp_path / "said", tmp_path / "tools"
    tools.mkdir()
    simulated = tools / tool
    # kubectl answers with the node.
    simulated.write_text(f"""#!/bin/sh\necho "$@" >> {said}\necho '{{"status": {{}}}}'\n""")
    simulated.chmod(0o755)
    verdicts.publish([stall(diagnosis=diagnosis)])
    with closing(Reader(verdicts, path)) as reader:
        reader.line()
        line = json.dumps(reader.line())
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "NODE_NAME": "gpu-1"}
    action = Path(__file__).parents[2] / "deploy" / "actions" / program
    subprocess.run([action], input=line, text=True, check=True, env=environment, timeout=20)
    assert said.exists() == (wanted is not None)
    if wanted is not None:
        assert wanted in said.read_text()
