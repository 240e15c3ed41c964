"""The command line's own words: which help an error names, and what the doctor's help lists."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from importlib import metadata

import pytest

from railscope.agent.cli import main as cli
from railscope.agent.cli.main import main


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    """Exit status and everything printed."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    printed = capsys.readouterr()
    return left.value.code, printed.out + printed.err


@pytest.mark.parametrize("command", ["agent", "doctor", "demo"])
def test_an_unknown_option_of_a_command_names_that_command_s_help(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = said(capsys, command, "--bogus")
    assert status == 2
    assert text == f"railscope {command}: error: unknown option --bogus (see railscope {command} --help)\n"


def test_a_mistyped_option_is_compared_with_the_options_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = said(capsys, "agent", "--web.listen-adress", ":9779")
    assert "--web.listen-address" in text


@pytest.mark.parametrize(
    ("option", "value", "what"),
    [
        ("--seconds", "x", "'x' is not a number of seconds between 1 and 86400"),
        ("--seconds", "0.5", "'0.5' is not a number of seconds between 1 and 86400"),
        ("--seconds", "nan", "'nan' is not a number of seconds between 1 and 86400"),
        ("--hosts", "two", "'two' is not a whole number: allowed is 2 to 8"),
        ("--hosts", "9", "9 is out of range: allowed is 2 to 8"),
        ("--ranks-per-host", "0.5", "'0.5' is not a whole number: allowed is 1 to 8"),
    ],
)
def test_an_option_of_the_demo_says_what_it_takes(
    option: str, value: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = said(capsys, "demo", option, value)
    assert status == 2
    assert text == f"railscope demo: error: argument {option}: {what} (see railscope demo --help)\n"


@pytest.mark.parametrize(
    ("words", "names"), [((), ("agent", "doctor", "top", "report")), (("config",), ("check", "show"))]
)
def test_without_a_command_there_is_the_list_of_them(
    words: tuple[str, ...], names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("usage: railscope ")
    listed = {line.split()[0] for line in told.err.splitlines() if line.startswith("    ")}
    assert set(names) <= listed


def test_a_word_that_is_no_command_names_the_help_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "--bogus")
    assert status == 2
    assert "(see railscope --help)" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["agnet"], "there is no command 'agnet'; did you mean agent?"),
        (["Doctor"], "there is no command 'Doctor'; did you mean doctor?"),
        (["dash"], "there is no command 'dash'; did you mean dashboards?"),
        (["help"], "there is no command 'help'; did you mean --help?"),
        (["version"], "there is no command 'version'; did you mean --version?"),
        (["--verison"], "unknown option --verison; did you mean --version?"),
        (["config", "chekc"], "there is no action 'chekc'; did you mean check?"),
        (["dashboards", "biuld"], "there is no action 'biuld'; did you mean build?"),
        (["demo", "--pattern", "tensor"], "argument --pattern: 'tensor' is no choice; did you mean tensor-parallel?"),
        (["demo", "--pattern", "x"], "argument --pattern: 'x' is no choice; choose from all, ddp, "),
        (["--json", "doctor"], "--json stands before doctor: write the options of a command behind it"),
        (["config", "--json", "show"], "--json stands before show: write the options of a command behind it"),
        (["agent", "-web.listen-address", ":1"], "unknown option -web.listen-address; did you mean --web.listen-add"),
    ],
)
def test_a_mistyped_word_gets_the_nearest_right_one(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = said(capsys, *words)
    assert status == 2
    assert text.count("\n") == 1
    assert f"error: {says}" in text


def test_every_command_is_found_with_two_letters_swapped(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = said(capsys, "--help")
    commands = re.findall(r"^    ([a-z]+)(?:\s|$)", text, re.MULTILINE)
    for command in commands:
        swapped = command[0] + command[2] + command[1] + command[3:]
        _, text = said(capsys, swapped)
        assert swapped == command or f"did you mean {command}?" in text


def test_no_option_is_suggested_to_who_wrote_it(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--web.listen-address", ":1", "agent"], ["--json", "config", "show"], ["--help-me"]):
        _, text = said(capsys, *words)
        assert f"did you mean {words[0]}?" not in text


def test_the_doctor_s_help_lists_what_matters_to_it_and_takes_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = said(capsys, "doctor", "--help")
    for flag in ("--json", "--pid", "--rail.devices", "--loader", "--probe.attach", "--path.procfs", "--config.file"):
        assert flag in text
    for flag in ("--web.listen-address", "--limit.series", "--once", "--collector.netdev", "--rail.window", "--log"):
        assert flag not in text
    status, text = said(capsys, "doctor", "--web.listen-address", ":9779", "--log.level", "debug", "--bogus")
    assert (status, "unknown option --bogus" in text) == (2, True)


def test_the_help_of_record_lists_what_matters_to_a_recording_and_takes_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, text = said(capsys, "record", "--help")
    for flag in ("--output", "--level", "--rail.sample-interval", "--collector.rdma", "--log.level"):
        assert flag in text
    for flag in ("--web.listen-address", "--stall.after", "--once", "--collector.tcp", "--collector.nvlink"):
        assert flag not in text
    status, text = said(capsys, "record", "-o", "x.npz", "--no-collector.tcp", "--bogus")
    assert (status, "unknown option --bogus" in text) == (2, True)


def test_a_folder_that_is_not_there_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agent", "--once", "--path.procfs", "/nonexistent"]) == 2
    assert capsys.readouterr().err == (
        "railscope agent: --path.procfs: /nonexistent is not a folder; name its mount point\n"
    )


@pytest.mark.parametrize("words", [["report"], ["place"], ["record", "--describe"], ["export", "--perfetto", "x"]])
def test_a_file_name_that_is_too_long_is_one_line_and_status_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = "n" * 300
    assert main([*words, name]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("railscope")
    assert f"{name}: {os.strerror(errno.ENAMETOOLONG)}" in complaint
    assert complaint.count("\n") == 1


def test_the_version_is_that_of_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.version() == metadata.version("railscope")
    monkeypatch.setattr(sys, "path", ["", "/nonexistent"])
    assert cli.version() == "unknown"


def test_every_command_has_options_of_its_own_and_is_known_by_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = said(capsys, "--help")
    commands = re.findall(r"^    ([a-z]+)(?:\s|$)", text, re.MULTILINE)
    assert {"agent", "doctor", "top", "record", "report", "diagnose", "dashboards"} <= set(commands)
    for command in commands:
        status, text = said(capsys, command, "--help")
        assert status == 0
        usage, _, _ = text.partition("\n\n")
        assert usage.startswith(f"usage: railscope {command} [-h]")
        assert usage.split() != ["usage:", "railscope", command, "[-h]"], "it has options of its own"


def test_examples_in_help_stand_on_lines_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    _, text = said(capsys, "doctor", "--help")
    assert text.endswith("\nexample: railscope doctor --json\n")
    _, text = said(capsys, "record", "--help")
    assert any(line.startswith("example: ") and len(line) > 60 for line in text.splitlines())


def test_an_error_that_is_of_no_named_file_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_parsed: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(cli, "_report", broken)
    with pytest.raises(OSError, match="Invalid argument"):
        main(["report", "x"])


def test_what_the_terminal_s_encoding_lacks_is_shown_as_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(cli, "_report", lambda _parsed: print("–") or 0)
    assert main(["report", "x"]) == 0
    assert terminal.buffer.getvalue() == b"\\u2013\n"
