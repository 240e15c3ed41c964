"""`railscope config check|show`, and settings from the environment."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.cli import config as config_command
from railscope.agent.cli.main import main
from railscope.agent.config.effective import Source, config_from, effective_settings
from railscope.agent.config.keys import ConfigError
from railscope.agent.config.options import (
    COLLECTORS,
    ENVIRONMENT_KEYS,
    FILE_KEYS,
    OPTIONS,
    RELOADABLE,
    Config,
    add_arguments,
)
from railscope.agent.config.rail_patterns import RailPattern
from railscope.agent.config.values import ListenAddress
from railscope.agent.config.written import format_value

WRONG = """\
wbe: {}
web:
  listen_address: localhost
  telemetry_paht: /m
rails:
  devices: ['eth*=1', eth0, [a]]
  window: 10s
  window: 20s
limits:
  series: many
"""


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def config(environment: Mapping[str, str], *words: str) -> Config:
    return config_from(parsed(*words), environment)


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in set(os.environ) & set(ENVIRONMENT_KEYS):
        monkeypatch.delenv(variable)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "railscope.yml"


def test_every_option_has_a_variable_of_its_own() -> None:
    names = [key.name for key in ENVIRONMENT_KEYS.values()]
    assert sorted(names) == sorted([*(one.name for one in OPTIONS), *(one.key for one in COLLECTORS)])
    assert {variable for variable in ENVIRONMENT_KEYS if not re.fullmatch(r"RAILSCOPE(_[A-Z]+)+", variable)} == set()
    assert ENVIRONMENT_KEYS["RAILSCOPE_WEB_LISTEN_ADDRESS"].name == "web.listen_address"


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(file: Path) -> None:
    file.write_text("rails: {window: 10s, sample_interval: 1s, devices: [a]}\nstalls: {after: 10s}\n")
    environment = {
        "RAILSCOPE_CONFIG_FILE": str(file),
        "RAILSCOPE_RAILS_WINDOW": "20s",
        "RAILSCOPE_RAILS_DEVICES": "b, c=3 d",
        "RAILSCOPE_STALLS_AFTER": "20s",
    }
    found = config(environment, "--stall.after", "30s")
    assert found.config_file == file
    assert found.sample_interval_ns == 1_000_000_000
    assert found.correlation_window_ns == 20_000_000_000
    assert found.rails == (RailPattern("b", ""), RailPattern("c", "3"), RailPattern("d", ""))
    assert found.stall_after_ns == 30_000_000_000
    assert config(environment, "--config.file=").sample_interval_ns == Config().sample_interval_ns


@pytest.mark.parametrize(
    ("text", "runs"), [("true", True), ("1", True), ("ON", True), ("no", False), ("0", False), ("False", False)]
)
def test_a_collector_is_switched_by_the_environment(text: str, runs: bool) -> None:
    assert ("tcp" in config({"RAILSCOPE_COLLECTORS_TCP": text}).collectors) is runs
    assert "tcp" not in config({"RAILSCOPE_COLLECTORS_TCP": text}, "--no-collector.tcp").collectors


def test_an_empty_variable_is_an_empty_value() -> None:
    assert config({"RAILSCOPE_RECORDINGS_DIRECTORY": ""}).recordings_directory is None
    assert config({"RAILSCOPE_RAILS_DEVICES": ""}).rails == ()


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("RAILSCOPE_WEB_LISTEN_ADRESS", ":1", "sets no key; did you mean RAILSCOPE_WEB_LISTEN_ADDRESS?"),
        ("RAILSCOPE_STALL_AFTER", "5s", "sets no key; did you mean RAILSCOPE_STALLS_AFTER?"),
        ("RAILSCOPE_LOG_LEVEL", "debug", "sets no key; did you mean RAILSCOPE_LOGGING_LEVEL?"),
        ("RAILSCOPE_WBE_LISTEN_ADDRESS", ":1", "sets no key; did you mean RAILSCOPE_WEB_LISTEN_ADDRESS?"),
        ("RAILSCOPE_COLLECTOR_TCP", "0", "sets no key; did you mean RAILSCOPE_COLLECTORS_TCP?"),
        ("RAILSCOPE_LIMITS_ZZZZZZZZZZZZZZZZZZZZZ", "1", "sets no key; unset it"),
        ("RAILSCOPE_STALLS_AFTER", "5", "'5' is not a duration: write a number with its unit"),
        ("RAILSCOPE_COLLECTORS_TCP", "maybe", "'maybe' is not true or false"),
        ("RAILSCOPE_PROBES_PIDS", "1,x", "'x' is not a whole number"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^environment: {variable}:? {re.escape(message)}"):
        config({variable: text})


@pytest.mark.parametrize(
    "variable",
    [
        *("RAILSCOPE_SERVICE_HOST", "RAILSCOPE_PORT", "RAILSCOPE_PORT_9779_TCP", "RAILSCOPE_PORT_9779_TCP_ADDR"),
        *("RAILSCOPE_WEB_SERVICE_HOST", "RAILSCOPE_WEB_SERVICE_PORT_METRICS", "RAILSCOPE_WEB_PORT_80_TCP_PROTO"),
        *("RAILSCOPE_TEST_EXAMPLES", "RAILSCOPE_JOB_LIBRARY_PATH", "RAILSCOPE", "PATH"),
    ],
)
def test_variables_of_kubernetes_and_of_others_are_left_alone(variable: str) -> None:
    assert config({variable: "tcp://10.0.0.1:9779"}) == Config()


def test_all_errors_of_file_and_environment_are_told_at_once(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(WRONG)
    monkeypatch.setenv("RAILSCOPE_STALLS_AFTER", "5")
    assert main(["config", "check", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    told = printed.err.splitlines()
    expected = [
        "environment: RAILSCOPE_STALLS_AFTER: '5' is not a duration",
        f"{file}: line 1: wbe is no group of this file; did you mean web?",
        f"{file}: line 3: web.listen_address: 'localhost' is not an address: write HOST:PORT",
        f"{file}: line 4: web.telemetry_paht is no key of this file; did you mean telemetry_path?",
        f"{file}: line 6: rails.devices: a list is not a text",
        f"{file}: line 6: rails.devices: rail pattern 'eth*=1'",
        f"{file}: line 8: rails.window is set a second time; line 7 has it too: remove one",
        f"{file}: line 10: limits.series: 'many' is not a whole number",
    ]
    assert len(told) == len(expected)
    for line, begin in zip(told, expected, strict=True):
        assert line.startswith(f"railscope: {begin}")


def test_the_agent_tells_all_errors_too(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(WRONG)
    assert main(["agent", "--config.file", str(file)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 7


def test_what_only_shows_when_the_agent_starts_is_checked_too(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    web = tmp_path / "web.yml"
    web.write_text("basic_auth_users: {ada: no-hash}\n")
    file.write_text(f"web: {{config_file: {web}}}\npath: {{sysfs: /nonexistent}}\nprobes: {{pids: [4194304]}}\n")
    assert main(["config", "check", str(file)]) == 2
    told = capsys.readouterr().err
    assert f"railscope: {file} line 2: /nonexistent is not a folder" in told
    assert str(web) in told
    assert "no process has the pid 4194304" in told


def test_a_right_file_is_one_line_and_status_0(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("rails: {window: 10s}\n")
    assert main(["config", "check", str(file), "--stall.after", "1m"]) == 0
    told = capsys.readouterr().out
    counted = "1 set by the file, 1 set by the command line"
    assert told == f"{file}: no error; {counted}; every other setting has its default\n"


@pytest.mark.parametrize(
    ("options", "rest"),
    [
        ((), "all settings have their defaults"),
        (("--stall.after", "1m"), "1 set by the command line; every other setting has its default"),
    ],
)
def test_without_a_file_it_says_which_one_does_not_exist(
    options: tuple[str, ...],
    rest: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config_command, "SERVICE_FILE", tmp_path / "railscope.yml")
    assert main(["config", "check", *options]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/railscope.yml does not exist: no error; {rest}\n"


def test_a_file_that_is_named_twice_is_an_error(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(file), "--config.file", str(file)]) == 2
    assert "leave one out" in capsys.readouterr().err


def test_show_tells_each_value_with_its_origin_and_reads_back_as_the_same(file: Path, tmp_path: Path) -> None:
    file.write_text("rails:\n  devices: ['eth*', ib0=3]\n  window: 90s\nweb: {listen_address: ':80'}\n")
    words = ["--stall.factor", "2.5", "--no-collector.tcp", "--config.file", str(file)]
    environment = {"RAILSCOPE_PROBES_BUDGET": "0.3%", "RAILSCOPE_PATH_PROCFS": "/a b"}
    done = subprocess.run(
        [sys.executable, "-m", "railscope.agent.cli.main", "config", "show", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = {line.split(":")[0].strip(): line for line in done.stdout.splitlines() if line.startswith("  ")}
    for key, value, origin in (
        ("devices", '["eth*", ib0=3]', f"{file} line 2"),
        ("window", "1m", "default"),
        ("listen_address", '":80"', f"{file} line 4"),
        ("factor", "2.5", "command line: --stall.factor"),
        ("tcp", "false", "command line: --no-collector.tcp"),
        ("budget", "0.3%", "environment: RAILSCOPE_PROBES_BUDGET"),
        ("procfs", '"/a b"', "environment: RAILSCOPE_PATH_PROCFS"),
        ("peers", "0", "default"),
    ):
        assert re.fullmatch(rf"  {key}: {re.escape(value)} +# {re.escape(origin)}", lines[key]), lines[key]
    shown = tmp_path / "shown.yml"
    shown.write_text(done.stdout)
    before = config(environment, *words)
    again = config({}, "--config.file", str(shown))
    assert {one.name for one in effective_settings(parsed("--config.file", str(shown)), {}).settings} >= set(FILE_KEYS)
    for field in Config.__dataclass_fields__:
        if field != "config_file":
            assert getattr(again, field) == getattr(before, field), field


def test_show_as_json_tells_variable_and_whether_a_reload_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--json", "--config.file=", "--stall.after", "1m"]) == 0
    settings = {one["name"]: one for one in json.loads(capsys.readouterr().out)["settings"]}
    assert settings["stalls.after"] == {
        "name": "stalls.after",
        "value": "1m",
        "source": Source.COMMAND_LINE.value,
        "place": "--stall.after",
        "variable": "RAILSCOPE_STALLS_AFTER",
        "reloadable": True,
    }
    assert {name for name, one in settings.items() if one["reloadable"]} == RELOADABLE
    assert settings.keys() == {key.name for key in ENVIRONMENT_KEYS.values()}


@given(nanoseconds=st.integers(1_000_000, 10_000_000_000), size_bytes=st.integers(0, 1 << 30))
def test_times_and_sizes_are_written_as_they_are_read(nanoseconds: int, size_bytes: int) -> None:
    read = {option.field: option.read for option in OPTIONS}
    field = "sample_interval_ns"
    assert read[field](format_value(field, nanoseconds)) == nanoseconds
    field = "small_payload_bytes"
    assert read[field](format_value(field, size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("scan_interval_ns", 5_400_000_000_000, "1h30m"),
        ("comm_lifetime_ns", 0, "0s"),
        ("recordings_memory_bytes", 0, "0"),
        ("recordings_directory", None, '""'),
        ("recordings_directory", Path("/a: b"), '"/a: b"'),
        ("budget_ratio", 0.0025, "0.25%"),
        ("listen", ListenAddress("::1", 80), '"[::1]:80"'),
        ("log_level", "null", '"null"'),
        ("rails", (RailPattern("eth[0,2]", ""),), '["eth[0,2]"]'),
    ],
)
def test_values_are_written_as_a_person_would(field: str, value: object, text: str) -> None:
    assert format_value(field, value) == text


@pytest.mark.parametrize("page", ["docs/reference/flags.md", "deploy/railscope.yml"])
def test_what_a_reload_takes_over_is_told_where_settings_are(page: str) -> None:
    (told,) = re.findall(r"(?:Taken over are|takes? over) ([^;:]*?recordings\.max_bytes)", _text_of(page))
    groups = {"logging", "stalls"}
    assert (
        set(re.findall(r"[a-z_]+\.[a-z_]+", told)) | {key for key in RELOADABLE if key.partition(".")[0] in groups}
        == RELOADABLE
    )


def _text_of(page: str) -> str:
    text = (Path(__file__).parents[2] / page).read_text()
    return re.sub(r"\n(?:# )?", " ", text)


def test_a_variable_made_of_any_flag_is_taken_or_told_of() -> None:
    for option in (*OPTIONS, *COLLECTORS):
        variable = "RAILSCOPE_" + re.sub("[.-]", "_", option.flag.removeprefix("--")).upper()
        if variable not in ENVIRONMENT_KEYS:
            with pytest.raises(ConfigError, match=rf"{variable} sets no key; did you mean RAILSCOPE_\w+\?"):
                config({variable: "1"})


@pytest.mark.parametrize("variable", ["RAILSCOPE_EVENT", "RAILSCOPE_CAUSE", "RAILSCOPE_VERSION", "RAILSCOPE_IMAGE_TAG"])
def test_variables_of_others_that_begin_with_our_name_are_left_alone(variable: str) -> None:
    config({variable: "1"})


def test_the_doctor_reads_the_services_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = tmp_path / "railscope.yml"
    served.write_text("rails: {devices: ['mlx5_*']}\n")
    monkeypatch.setattr(config_command, "SERVICE_FILE", served)
    named = parsed()
    config_command.take_service_file(named, {})
    assert config({}, "--config.file", str(named.config_file)).rails == (RailPattern("mlx5_*", ""),)
    other = parsed("--config.file", str(tmp_path / "mine.yml"))
    config_command.take_service_file(other, {})
    assert other.config_file == tmp_path / "mine.yml"
    by_variable = parsed()
    config_command.take_service_file(by_variable, {"RAILSCOPE_CONFIG_FILE": str(tmp_path / "mine.yml")})
    assert "config_file" not in by_variable
