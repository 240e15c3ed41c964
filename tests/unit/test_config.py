"""The configuration from command lines and files, and the errors that stop a wrong one."""

from __future__ import annotations

import argparse
import errno
import os
import re
import struct
from dataclasses import fields, replace
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from railscope.agent.config.command_parser import CommandParser
from railscope.agent.config.effective import config_from
from railscope.agent.config.keys import Key
from railscope.agent.config.options import (
    COLLECTORS,
    FILE_KEYS,
    OPTIONS,
    Config,
    ConfigError,
    ListenAddress,
    add_arguments,
)
from railscope.agent.config.probe_settings import program_settings
from railscope.agent.config.rail_patterns import RailPattern, parse_rail_pattern
from railscope.agent.config.values import duration_ns, listen_address, size_bytes
from railscope.probes.nccl.programs.calls import EnqueueTime, constants

SAMPLE = Path(__file__).parents[2] / "deploy" / "railscope.yml"


def parser() -> CommandParser:
    parser = CommandParser(prog="railscope")
    commands = parser.add_subparsers(dest="command", required=True)
    add_arguments(commands.add_parser("agent"))
    return parser


def config(*words: str) -> Config:
    return config_from(parser().parse_args(["agent", *words]), {})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "railscope.yml"


def error_of(file: Path, text: str | bytes) -> str:
    """The one line that refuses this file, without the file's name."""
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as caught:
        config("--config.file", str(file))
    message = str(caught.value)
    assert message.isprintable()
    assert message.startswith(f"{file}: ")
    return message.removeprefix(f"{file}: ")


OTHERS = ("nvlink", "rdma", "qp", "lldp", "ethtool", "qdisc", "tcp", "pcie", "module", "kmsg")
"""Collectors besides those of calls and of network devices."""


def refusal(file: Path) -> str | None:
    """Why this file is refused, if it is."""
    try:
        config(f"--config.file={file}")
    except ConfigError as error:
        return str(error)
    return None


def command_error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a wrong command line prints, which must be one line, with status 2."""
    with pytest.raises(SystemExit) as caught:
        config(*words)
    assert caught.value.code == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    return output


def test_without_options_everything_has_its_default() -> None:
    assert config() == Config()


def test_the_default_that_help_shows_is_the_default() -> None:
    for option in OPTIONS:
        value = getattr(Config(), option.field)
        if option.default in ("none", "found", "all processes of the scope"):
            assert value in (None, ())
        else:
            assert option.read(option.default) == value


def test_every_field_can_be_set_by_some_option_but_for_what_the_demo_sets() -> None:
    settable = {option.field for option in OPTIONS} | {"collectors", "once", "namespaces"}
    assert settable == {field.name for field in fields(Config)}


@pytest.mark.parametrize("words", [["--web.listen-address=[::1]:80"], ["--web.listen-address", "[::1]:80"]])
def test_values_follow_their_flag_with_or_without_an_equals_sign(words: list[str]) -> None:
    assert config(*words) == replace(Config(), listen=ListenAddress("::1", 80))


@pytest.mark.parametrize(
    ("words", "rails"),
    [
        (["--rail.devices", "eth0,eth1"], ["eth0", "eth1"]),
        (["--rail.devices", "eth0, eth1=3", "ib*"], ["eth0", "eth1=3", "ib*"]),
        (["--rail.devices", "eth0", "--rail.devices", "eth1,eth2"], ["eth0", "eth1", "eth2"]),
        (["--rail.devices", "eth[0,2]"], ["eth[0,2]"]),
    ],
)
def test_entries_of_a_list_stand_between_spaces_or_commas(words: list[str], rails: list[str]) -> None:
    assert config(*words) == replace(Config(), rails=tuple(parse_rail_pattern(text) for text in rails))


def test_every_flag_reaches_its_field() -> None:
    assert config(
        "--web.telemetry-path=/m", "--web.config.file=/etc/w.yml", "--scope=netns", "--pid", "1", "2", "--pid=3",
        "--probe.scan-interval=1m30s", "--probe.attach=multi", "--probe.enqueue-time=off", "--probe.sample-every=1",
        "--rail.devices", "eth*", "ib0=3", "--rail.sample-interval=1ms", "--rail.window=1m",
        "--rail.small-message=1KiB", "--limit.series=500", "--limit.communicator-lifetime=1h",
        "--series.detail", "counters", "nvlinks",
        "--limit.aggregates=2048", "--limit.communicators=100", "--limit.ring=1MiB", "--path.sysfs=/a",
        "--recordings.directory=", "--recordings.max-bytes=1GiB", "--recordings.window=5m", "--recordings.memory=0",
        "--path.procfs=/b", "--path.pod-logs=/c", "--node.name=n",
        "--node.cluster=c",
        "--log.level=debug", "--log.format=json", "--no-collector.netdev", "--once",
        "--once.settle=0s",
    ) == Config(
        telemetry_path="/m", web_config_file=Path("/etc/w.yml"), scope="netns", pids=(1, 2, 3),
        scan_interval_ns=90_000_000_000, probe_attach="multi", probe_enqueue_time="off", probe_sample_every=1,
        rails=(RailPattern("eth*", ""), RailPattern("ib0", "3")),
        sample_interval_ns=1_000_000, correlation_window_ns=60_000_000_000,
        small_payload_bytes=1024, series_limit=500, comm_lifetime_ns=3_600_000_000_000, aggregate_entries=2048,
        series_detail=("counters", "nvlinks"),
        communicator_entries=100, ring_bytes=1 << 20, recordings_directory=None, recordings_max_bytes=1 << 30,
        recordings_window_ns=300_000_000_000, recordings_memory_bytes=0, sysfs=Path("/a"), procfs=Path("/b"),
        pod_logs=Path("/c"), node_name="n", node_cluster="c",
        log_level="debug",
        log_format="json", collectors=frozenset({"collective", *OTHERS}), once=True, once_settle_ns=0,
    )  # fmt: skip


@pytest.mark.parametrize(("every", "shift"), [(1, 0), (16, 4), (65536, 16)])
def test_sampling_is_told_to_the_kernel_as_a_shift(every: int, shift: int) -> None:
    settings = program_settings(config(f"--probe.sample-every={every}"))
    assert struct.unpack_from("<QQIII", constants(settings, EnqueueTime.PAIR))[4] == shift
    assert struct.unpack_from("<QQIII", constants(settings, EnqueueTime.OFF))[4] > 16


def test_the_file_goes_before_defaults_and_the_command_line_before_the_file(file: Path) -> None:
    file.write_text("rails:\n  sample_interval: 1s\n  window: 10s\n  devices: [eth0, eth1]\nprobes: {pids: [7]}\n")
    merged = config(f"--config.file={file}", "--rail.window=20s", "--rail.devices=ib0")
    assert merged.sample_interval_ns == 1_000_000_000
    assert merged.correlation_window_ns == 20_000_000_000
    assert merged.rails == (RailPattern("ib0", ""),)
    assert merged.pids == (7,)
    assert merged.config_file == file


def test_collectors_are_switched_by_default_file_and_flag_in_that_order(file: Path) -> None:
    file.write_text("collectors:\n  netdev: no\n  collective: off\n" + "".join(f"  {name}: no\n" for name in OTHERS))
    assert config(f"--config.file={file}").collectors == frozenset()
    assert config(f"--config.file={file}", "--collector.netdev").collectors == {"netdev"}
    assert config("--no-collector.netdev", "--collector.netdev").collectors == Config().collectors


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n...\n", "web:\nrails: {}\n", "~\n"])
def test_a_file_without_keys_changes_nothing(file: Path, text: str) -> None:
    file.write_text(text)
    assert config(f"--config.file={file}") == replace(Config(), config_file=file)


def test_a_word_that_yaml_takes_for_something_else_is_still_a_word(file: Path) -> None:
    file.write_text("probes:\n  enqueue_time: off\nweb:\n  listen_address: 10:20\n")
    found = config(f"--config.file={file}")
    assert found.probe_enqueue_time == "off"
    assert found.listen == ListenAddress("10", 20)


def uncommented(sample: str) -> str:
    return re.sub(r"^( +)#(?=[a-z])", r"\1", sample, flags=re.MULTILINE)


def test_the_sample_file_as_shipped_changes_nothing() -> None:
    assert config(f"--config.file={SAMPLE}") == replace(Config(), config_file=SAMPLE)


def test_the_sample_file_shows_every_key_with_its_default(file: Path) -> None:
    text = uncommented(SAMPLE.read_text())
    file.write_text(text)
    assert config(f"--config.file={file}") == replace(Config(), config_file=file)
    shown: list[str] = []
    group = ""
    for indent, name in re.findall(r"^( *)([a-z_]+):", text, flags=re.MULTILINE):
        if indent:
            shown.append(f"{group}.{name}")
        else:
            group = name
    assert sorted(shown) == sorted(FILE_KEYS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wbe:\n", "line 1: wbe is no group of this file; did you mean web?"),
        (
            "\nweb:\n  listen_adress: x\n",
            "line 3: web.listen_adress is no key of this file; did you mean listen_address?",
        ),
        (
            "web:\n  listen-address: x\n",
            "line 2: web.listen-address is no key of this file; did you mean listen_address?",
        ),
        (
            "probes:\n  telemetry_path: /m\n",
            "line 2: probes.telemetry_path is no key of this file; did you mean web.telemetry_path?",
        ),
        ("format: json\n", "line 1: format is no group of this file; did you mean logging.format?"),
        (
            "web:\n  1: 2\n",
            "line 2: web.1 is no key of this file (allowed: listen_address, telemetry_path, config_file)",
        ),
        ("web:\n  ? [a]\n  : b\n", "line 2: web.? is no key"),
        ("rails:\n  window: 10s\n  window: 20s\n", "line 3: rails.window is set a second time; line 2 has it too"),
        ("web: {}\nrails: {}\nweb: {}\n", "line 3: web is set a second time; line 1 has it too"),
        (
            "- a\n",
            "line 1: the file must hold keys with values "
            "(collectors, limits, logging, node, otlp, path, probes, rails, recordings, series, stalls, state, "
            "verdicts, web)",
        ),
        ("hello\n", "line 1: the file must hold keys with values"),
        ("web: 9779\n", "line 1: web must hold keys with values (listen_address, telemetry_path, config_file)"),
        ("web: [a]\n", "line 1: web must hold keys with values"),
        ("limits:\n  series: many\n", "line 2: limits.series: 'many' is not a whole number"),
        ("limits:\n  series: '500'\n", "line 2: limits.series: '500' in quotes is not a whole number"),
        ("limits:\n  series: 5.5\n", "line 2: limits.series: '5.5' is not a whole number"),
        (
            "limits:\n  series: 0x1000\n",
            "line 2: limits.series: '0x1000' is not a whole number: allowed is 100 to 10000000",
        ),
        ("limits:\n  series: 5\n", "line 2: limits.series: 5 is out of range: allowed is 100 to 10000000"),
        ("limits:\n  series: [500]\n", "line 2: limits.series: a list is not a whole number"),
        ("limits:\n  series: {a: 1}\n", "line 2: limits.series: a group of keys is not a whole number"),
        ("limits:\n  series:\n", "line 2: limits.series has no value: write a whole number, or remove the line"),
        ("limits:\n  ring: 3MiB\n", "line 2: limits.ring: 3MiB is not a power of two"),
        ("collectors:\n  netdev: 1\n", "line 2: collectors.netdev: '1' is not true or false"),
        ("collectors:\n  netdev: 'true'\n", "line 2: collectors.netdev: 'true' in quotes is not true or false"),
        ("rails:\n  devices: eth0\n", "line 2: rails.devices: 'eth0' is not a list, such as [a, b]"),
        ("rails:\n  devices:\n    - eth0\n    - [eth1]\n", "line 4: rails.devices: a list is not a text"),
        (
            "rails:\n  devices:\n    - eth0\n    -\n",
            "line 4: rails.devices has no value: write a text, or remove the line",
        ),
        ("rails:\n  devices: ['eth*=1']\n", "line 2: rails.devices: rail pattern 'eth*=1'"),
        (
            "rails:\n  sample_interval: 100\n",
            "line 2: rails.sample_interval: '100' is not a duration: write a number with its unit",
        ),
        (
            "rails:\n  sample_interval: 1us\n",
            "line 2: rails.sample_interval: 1us is out of range: allowed is 1ms to 10s",
        ),
        ("probes:\n  scope: node\n", "line 2: probes.scope: 'node' is not allowed: choose all or netns"),
        ("probes:\n  sample_every: 12\n", "line 2: probes.sample_every: 12 is not a power of two"),
        ("probes:\n  scope: !!python/object:os.system all\n", "line 2: probes.scope: 'all' is not a text"),
        ("web: [\n", "line 2, column 1: this is not YAML:"),
        ("web:\n\tlisten_address: x\n", "line 2, column 1: this is not YAML:"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1: this is not YAML: but found another document"),
        ("web: *nowhere\n", "line 1, column 6: this is not YAML: found undefined alias 'nowhere'"),
        (b"web: \xff\n", "this is not YAML:"),
        ("web: \x07\n", "this is not YAML:"),
        ("[" * 50_000, "this is not a configuration file: it is nested too deeply"),
        ("#" * ((1 << 20) + 1), "this is not a configuration file: it has more than 1048576 bytes"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line_its_key_and_what_is_allowed(
    file: Path, text: str | bytes, message: str
) -> None:
    assert error_of(file, text).startswith(message)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"absent\.yml: cannot read the configuration file: No such file or directory$"
    ):
        config(f"--config.file={tmp_path}/absent.yml")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file: Is a directory$"):
        config(f"--config.file={tmp_path}")


def test_a_file_without_permission_says_so(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)  # root, who runs these tests, may read every file
    with pytest.raises(ConfigError, match=r"Permission denied$"):
        config(f"--config.file={file}")


@given(
    text=st.text(st.sampled_from("web:rails \n\t-[]{}#'\"&*!|>%@`,?limtsx0129"), max_size=60) | st.binary(max_size=60)
)
@example(text="web: &a\n  telemetry_path: *a\n")
@example(text="web: &a {telemetry_path: &b [*a, *b]}")
def test_any_file_is_read_or_refused_with_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, text: str | bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    problem = refusal(file)
    lines = problem.split("\n") if problem is not None else []
    assert all(line.startswith(f"{file}: ") and line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--web.listen-adress=x"], "unknown option --web.listen-adress; did you mean --web.listen-address?"),
        (["--no-collector.rmda"], "unknown option --no-collector.rmda; did you mean --no-collector.rdma?"),
        (
            ["--no-collector.foo"],
            "unknown option --no-collector.foo; there are --no-collector.collective, --no-collector.netdev, ",
        ),
        (["--frobnicate"], "unknown option --frobnicate (see railscope --help)"),
        (["--web.listen"], "unknown option --web.listen"),
        (["stray"], "unknown argument stray"),
        (["--web.listen-address=localhost"], "'localhost' is not an address: write HOST:PORT"),
        (["--web.listen-address=a:65536"], "'a:65536' is not an address"),
        (["--web.telemetry-path=/healthz"], "'/healthz' is not a path for metrics"),
        (["--web.telemetry-path=metrics"], "'metrics' is not a path for metrics"),
        (["--scope=node"], "argument --scope: 'node' is not allowed: choose all or netns"),
        (["--pid=0"], "argument --pid: 0 is out of range: allowed is 1 to 4194304"),
        (["--pid=self"], "argument --pid: 'self' is not a whole number"),
        (["--rail.sample-interval=5"], "'5' is not a duration: write a number with its unit, such as 100ms"),
        (["--rail.sample-interval=11s"], "11s is out of range: allowed is 1ms to 10s"),
        (["--rail.devices", "eth*=0"], "give a rail number to one device name"),
        (["--probe.sample-every=3"], "3 is not a power of two"),
        (["--collector.rdm"], "unknown option --collector.rdm"),
        (["--log.level"], "argument --log.level: expected one argument"),
        (["--path.sysfs="], "argument --path.sysfs: '' is not a folder's path"),
    ],
)
def test_a_wrong_command_line_prints_one_line_and_leaves_with_2(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in command_error(capsys, *words)


def test_help_shows_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        config("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in OPTIONS:
        assert f"{option.flag} {option.metavar}" in text
        assert f"(default: {option.default})" in text
    for collector in COLLECTORS:
        assert f"--collector.{collector.name}" in text
        assert f"--no-collector.{collector.name}" in text


def test_a_plain_parser_takes_the_options_too() -> None:
    plain = argparse.ArgumentParser()
    add_arguments(plain)
    assert config_from(plain.parse_args([]), {}) == Config()


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("1ms", 1_000_000),
        ("1.5s", 1_500_000_000),
        ("1m30s", 90_000_000_000),
        ("2h", 7_200_000_000_000),
        ("250µs", 250_000),
    ],
)
def test_durations_are_written_as_in_other_exporters(text: str, nanoseconds: int) -> None:
    assert duration_ns("1ns", "1d")(text) == nanoseconds


@pytest.mark.parametrize("text", ["", "s", "1", "-1s", "1 s", "1s ", "1.s", "1e3s", "1S", "١s", "1week"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        duration_ns("1ns", "1d")(text)


def test_sizes_have_binary_units() -> None:
    read = size_bytes("0", "1GiB")
    assert [read(text) for text in ("0", "512", "512B", "64KiB", "8MiB", "1GiB")] == [
        0,
        512,
        512,
        65_536,
        8_388_608,
        1 << 30,
    ]
    with pytest.raises(ValueError, match="is not a size"):
        read("64KB")


@pytest.mark.parametrize("text", ["127.0.0.1:9779", "[::1]:9779", ":9779", "node-1.example:0"])
def test_an_address_is_shown_as_it_was_written(text: str) -> None:
    assert str(listen_address(text)) == text


@pytest.mark.parametrize("text", ["", "9779", "::1:9779", "[::1]", "a:", "a b:1", "http://a:1", "a:1\n", "a:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        listen_address(text)


def wrong_spellings(name: str, flag: str) -> dict[str, str]:
    """Files that name a key as people do who know its name and not its place; by the word that they wrote."""
    group, _, key = name.partition(".")
    return {
        name: f"{name}: 1\n",
        flag: f"{flag}: 1\n",
        flag.removeprefix("--"): f"{flag.removeprefix('--')}: 1\n",
        name.replace("_", "-"): f"{name.replace('_', '-')}: 1\n",
        key.upper(): f"{group}:\n  {key.upper()}: 1\n",
        f"{group}.{name}": f"{group}:\n  {name}: 1\n",
        group.capitalize(): f"{group.capitalize()}:\n  {key}: 1\n",
    }


@pytest.mark.parametrize("key", FILE_KEYS.values(), ids=lambda key: key.name)
def test_a_key_in_the_wrong_place_is_told_its_place_and_never_what_was_written(file: Path, key: Key) -> None:
    group, _, member = key.name.partition(".")
    for written, text in wrong_spellings(key.name, key.flag).items():
        said = error_of(file, text)
        assert f"did you mean {written}?" not in said
        assert f"write {written}:" not in said
        _, _, hint = said.partition("; ")
        assert f"{group}: {{{member}: …}}" in hint or hint.startswith(
            (f"did you mean {member}?", f"did you mean {group}?")
        ), said
