"""Dashboards as code: what is committed is what is built, what check finds, and what publish asks of a Grafana.

Grafana is a stand-in that checks the shape of each call (grafana_server).
"""

from __future__ import annotations

import importlib
import io
import json
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from railscope.agent.cli import main as cli
from railscope.agent.facts.catalogue import METRICS
from railscope.agent.node.targets.jobs import JobFacts
from railscope.dashboards import build, check, documents, expressions, rules_files
from railscope.dashboards.alerting.alert import RUNBOOKS
from railscope.dashboards.alerting.thresholds import Thresholds, parse_thresholds
from railscope.dashboards.command import run_dashboards
from railscope.dashboards.publish import contains
from tests.unit.grafana_server import PASSWORD, TOKEN, FakeGrafana, serving

ROOT: Final = Path(__file__).parents[2]
NODE: Final = "railscope-node.json"


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    """A copy of the committed files."""
    folder = tmp_path / "dashboards"
    shutil.copytree(build.COMMITTED, folder)
    return folder


def changed(folder: Path, change: Callable[[dict[str, Any]], object], name: str = NODE) -> list[str]:
    """What check says after a change of one file."""
    file = folder / name
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return list(check.find_problems(documents.read_documents(folder)))


def first_panel(content: dict[str, Any]) -> dict[str, Any]:
    panel: dict[str, Any] = next(one for one in content["panels"] if one["type"] == "timeseries")
    return panel


def asking(expression: str) -> Callable[[dict[str, Any]], object]:
    """A change that makes a panel ask this."""
    return lambda it: first_panel(it)["targets"][0].update(expr=expression)


def offering(query: str) -> Callable[[dict[str, Any]], object]:
    """A change that makes a variable ask this."""
    return lambda it: it["templating"]["list"][1].update(query=query)


def test_committed_files_are_what_the_code_builds() -> None:
    assert list(check.find_differences(build.COMMITTED)) == []
    assert build.render_dashboards() == build.render_dashboards()


def test_a_built_file_that_was_edited_or_lost_is_named(committed: Path) -> None:
    (committed / NODE).write_text("{}")
    (committed / "railscope-job.json").unlink()
    (committed / "mine.json").write_text("{}")
    assert [line.partition(":")[0] for line in check.find_differences(committed)] == [
        "railscope-job.json",
        NODE,
        "mine.json",
    ]


def test_building_writes_only_what_changed(tmp_path: Path) -> None:
    def write() -> list[Path]:
        return build.write_all(tmp_path / "new", Thresholds(), RUNBOOKS)

    assert len(write()) == 9
    (tmp_path / "new" / NODE).write_text("{}")
    assert write() == [tmp_path / "new" / NODE]


def test_committed_files_are_dashboards_for_grafanas_own_sdk() -> None:
    for file in build.COMMITTED.glob("*.json"):
        content = json.loads(file.read_text())
        assert json.loads(json.dumps(Dashboard.from_json(deepcopy(content)), cls=JSONEncoder)) == content


def test_nothing_is_wrong_with_what_is_committed() -> None:
    assert list(check.find_problems(documents.read_documents(build.COMMITTED))) == []


def test_every_metric_is_shown_somewhere() -> None:
    queries = [
        expressions.substitute_variables(query.expression)
        for one in documents.read_documents(build.COMMITTED).values()
        for panel in one.panels
        for query in panel.queries
    ]
    asked = {selector.metric for query in queries for selector in expressions.parse_selectors(query)}
    rules = [
        rule
        for file in rules_files.SHIPPED.glob("*.yml")
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
    ]
    recorded: set[str] = set()
    while new := asked & rules_files.read_recorded_names() - recorded:
        recorded |= new
        for rule in rules:
            if rule.get("record") in new:
                asked |= {selector.metric for selector in expressions.parse_selectors(rule["expr"])}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked} | asked
    assert {metric.name for metric in METRICS} - shown == set()


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("which no metric", asking("railscope_rail_gone_total")),
        (
            "which no metric",
            asking("railscope_rail_rate_bytes_total"),
        ),
        ("which no metric", asking("railscope_rail_up_bucket")),
        ("which no metric", asking("histogram_count(railscope_collective_duration_seconds)")),
        ("is not PromQL", asking("sum by (rail (railscope_rail_up)")),
        ("the label op", asking('railscope_rail_up{op="AllReduce"}')),
        ("the label le", asking('railscope_rail_up{le="1"}')),
        ("series without a name", asking('{instance="a"}')),
        ("has no query", lambda it: first_panel(it).update(targets=[])),
        ("has no description", lambda it: first_panel(it).pop("description")),
        ("has no title", lambda it: first_panel(it).update(title="")),
        ("has no unit", lambda it: first_panel(it)["fieldConfig"]["defaults"].pop("unit")),
        ("overlap", lambda it: first_panel(it)["gridPos"].update(w=13)),
        ("does not fit", lambda it: first_panel(it)["gridPos"].update(x=20)),
        ("the same id", lambda it: first_panel(it).update(id=1)),
        ("no such dashboard", lambda it: it["links"][0].update(url="/d/railscope-elsewhere?a=b")),
        ("label_values", offering("query_result(up)")),
        (
            "which no metric",
            offering("label_values(nothing, instance)"),
        ),
        ("which no metric", lambda it: it["annotations"]["list"][0].update(expr="nothing == 1")),
        ("which railscope-job.json has too", lambda it: it.update(uid="railscope-job")),
        ("has no uid", lambda it: it.update(uid="")),
    ],
)
def test_a_mistake_is_found(committed: Path, what: str, change: Callable[[dict[str, Any]], object]) -> None:
    found = changed(committed, change)
    assert found
    assert any(what in line and line.startswith(NODE) for line in found)


@pytest.mark.parametrize(
    "expression",
    [
        'railscope_collective_size_bytes_bucket{le="1"}',
        "railscope_collective_size_bytes_sum",
        "histogram_count(railscope_collective_size_bytes)",
        'railscope_comm_info{exported_job="7",user="ada",pod="x"}',
        'railscope_rail_up{netns="pod"} and up{job="railscope"}',
        "rail:railscope_transmit_bytes:rate1m",
    ],
)
def test_what_is_exported_or_recorded_may_be_asked_for(committed: Path, expression: str) -> None:
    assert changed(committed, asking(expression)) == []


@pytest.mark.parametrize(
    "text", ["{", "[]", '"x"', '{"uid": "a"}', "[" * 100_000, '{"uid":"a","title":1,"panels":[1]}']
)
def test_a_file_that_is_no_dashboard_is_named_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(documents.DocumentError, match=r"odd\.json: this is not a Grafana dashboard") as refused:
        documents.read_documents(tmp_path)
    assert "\n" not in str(refused.value)


def test_identifiers_never_change() -> None:
    """Bookmarks, links and alerts hold them."""
    assert {one.identifier for one in documents.read_documents(build.COMMITTED).values()} == {
        *("railscope-fleet", "railscope-job", "railscope-node", "railscope-stall", "railscope-agent")
    }


def test_variables_are_put_in_as_grafana_would() -> None:
    query = 'rate(a{b=~"$host",c="${job:regex}"}[$__rate_interval])'
    assert expressions.substitute_variables(query, "30s", {"host": "x|y"}) == 'rate(a{b=~"x|y",c=".*"}[30s])'


def test_jobs_labels_are_those_that_a_rank_is_described_by() -> None:
    labels = {name for name, _ in JobFacts(job="7", user="ada", pod="p").labels()}
    assert labels == {"job", "user", "pod"}
    assert set(expressions.parse_selectors('a{b="c"}')[0].labels) == {"b"}


# The command line


def run(*arguments: str) -> int:
    try:
        return cli.main(["dashboards", *arguments])
    except SystemExit as end:
        return int(end.code or 0)


def test_check_says_how_much_it_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check") == 0
    assert re.fullmatch(r"5 dashboards, \d+ panels, \d+ queries: nothing wrong\n", capsys.readouterr().out)


def test_check_names_what_is_wrong_and_leaves_with_1(committed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(committed, lambda it: first_panel(it).pop("description"))
    assert run("check", str(committed)) == 1
    assert capsys.readouterr().out == "railscope-node.json: Sent: has no description\n"


def test_check_of_an_empty_folder_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", str(tmp_path)) == 2
    assert "run 'railscope dashboards build' first" in capsys.readouterr().err


def test_build_writes_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("build", "--output", str(tmp_path)) == 0
    assert capsys.readouterr().out.count("wrote ") == 9
    assert run("build", "--output", str(tmp_path)) == 0
    assert "nothing to do" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert run("build", "--output", str(tmp_path / "file")) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_alerts_are_built_with_a_site_s_own_numbers_and_pages(tmp_path: Path) -> None:
    options = ("--threshold", "loop_late_seconds=7", "--threshold", "dark_seconds=60.5")
    assert run("build", "--output", str(tmp_path), "--runbooks", "https://wiki.example/rs/", *options) == 0
    rules = {
        rule["alert"]: rule
        for group in yaml.safe_load((tmp_path / rules_files.ALERTS).read_text())["groups"]
        for rule in group["rules"]
    }
    assert rules["RailscopeLoopLate"]["expr"].endswith("> 7\n")
    assert rules["RailscopeDark"]["expr"].endswith("> 60.5\n")
    for one in rules_files.make_alerts():
        assert rules[one.name]["annotations"]["runbook_url"] == f"https://wiki.example/rs/{one.page}.md"
        assert (ROOT / f"dashboards/runbooks/{one.page}.md").is_file()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--threshold", "loop_late=7"), "there is no 'loop_late'; there are rail_used_bytes_per_second, "),
        (("--threshold", "loop_late_seconds"), "write a number above 0, as in loop_late_seconds=1"),
        (("--threshold", "loop_late_seconds=-1"), "write a number above 0"),
        (("--threshold", "loop_late_seconds=inf"), "write a number above 0"),
        (("--runbooks", "wiki/rs"), "write an address, as in https://"),
        (("--selector", "job=railscope"), "write label matchers, as in job="),
        (("--selector", 'a="b"} or x{c="d"'), "write label matchers, as in job="),
        (("--cluster-label", "k8s-cluster"), "write a label's name"),
    ],
)
def test_what_is_no_threshold_and_no_address_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, str], said: str
) -> None:
    assert run("build", "--output", str(tmp_path), *options) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_site_s_own_selector_and_label_are_in_every_query(tmp_path: Path) -> None:
    options = ("--selector", 'job=~"rail.*",env="prod"', "--cluster-label", "k8s_cluster")
    assert run("build", "--output", str(tmp_path), *options) == 0
    queries = [
        text
        for one in documents.read_documents(tmp_path).values()
        for text in (
            *(query.expression for panel in one.panels for query in panel.queries),
            *(expressions.parse_label_values(each.query)[0] for each in one.variables if each.kind == "query"),
            *one.annotations,
        )
    ]
    rules = [
        str(rule["expr"])
        for file in tmp_path.glob("*.yml")
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
    ]
    for text in (*map(expressions.substitute_variables, queries), *rules):
        assert not re.search(r"(?<!\w)cluster(?!\w)", text), text
        for selector in expressions.parse_selectors(text):
            if selector.metric.startswith("railscope_"):
                assert {"job", "env"} <= set(selector.labels), text
    alerts = yaml.safe_load((tmp_path / rules_files.ALERTS).read_text())
    said = json.dumps([rule["annotations"] for group in alerts["groups"] for rule in group["rules"]])
    assert "$labels.cluster" not in said
    assert "$labels.k8s_cluster" in said
    table = json.loads((tmp_path / "railscope-fleet.json").read_text())
    assert '"k8s_cluster": ' in json.dumps(table)


def test_the_mixin_has_every_dashboard_and_rule(tmp_path: Path) -> None:
    assert run("build", "--output", str(tmp_path)) == 0
    named = re.findall(r"import '([^']+)'", (tmp_path / build.MIXIN).read_text())
    assert sorted(named) == sorted(build.render_dashboards())
    assert all((tmp_path / name).is_file() for name in named)
    if shutil.which("jsonnet") is None:
        pytest.skip("jsonnet is missing: run 'make packages-test' as root")
    shown = f"local m = import '{tmp_path / build.MIXIN}'; [m.grafanaDashboards, m.prometheusRules, m.prometheusAlerts]"
    done = subprocess.run(["jsonnet", "--exec", shown], capture_output=True, text=True, check=True)
    dashboards, *rules = json.loads(done.stdout)
    assert {name: one["uid"] for name, one in dashboards.items()} == {
        name: name.removesuffix(".json") for name in build.render_dashboards()
    }
    assert rules == [
        yaml.safe_load((tmp_path / name).read_text()) for name in (rules_files.RECORDING, rules_files.ALERTS)
    ]


def test_every_threshold_decides_of_some_alert() -> None:
    shipped = rules_files.render_rules()[rules_files.ALERTS]
    for one in fields(Thresholds):
        changed = rules_files.render_rules(parse_thresholds([f"{one.name}=123.25"]))[rules_files.ALERTS]
        assert changed != shipped
        assert "123.25" in changed


def test_rules_that_are_not_what_the_code_builds_are_found(
    committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(rules_files.SHIPPED, tmp_path / "rules")
    monkeypatch.setattr(rules_files, "SHIPPED", tmp_path / "rules")
    (tmp_path / "rules" / rules_files.ALERTS).write_text("groups: []\n")
    assert list(check.find_differences(committed)) == [
        "railscope-alerts.yml: is not what the code builds: run 'railscope dashboards build'"
    ]


def test_without_the_extra_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith(("railscope.dashboards.", "grafana_foundation_sdk"))]:
        if name != "railscope.dashboards.command":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(importlib.import_module("railscope.dashboards"), "build", raising=False)
    monkeypatch.setitem(sys.modules, "grafana_foundation_sdk", None)
    monkeypatch.setitem(sys.modules, "grafana_foundation_sdk.builders.dashboard", None)
    monkeypatch.setitem(sys.modules, "grafana_foundation_sdk.cog.encoder", None)
    assert run("build") == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert re.search(r"run '.* -m pip install .*grafana-foundation-sdk==", said)


def test_a_module_of_ours_that_is_missing_is_an_error_of_ours() -> None:
    def act(*_: object) -> int:
        raise ModuleNotFoundError("no module", name="numpy")

    with pytest.raises(ModuleNotFoundError):
        run_dashboards(Namespace(act=act), io.StringIO())


# Publishing


@pytest.fixture
def token(tmp_path: Path) -> str:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return str(file)


def publish(grafana: FakeGrafana, *more: str) -> int:
    with serving(grafana) as url:
        return run("publish", "--url", url, *more)


def with_prometheus(token: str) -> tuple[str, ...]:
    return ("--prometheus", "http://prometheus:9090", "--token-file", token)


def test_a_first_run_makes_everything(token: str, capsys: pytest.CaptureFixture[str]) -> None:
    grafana = FakeGrafana()
    assert publish(grafana, *with_prometheus(token), "--runbooks", "https://wiki/railscope/") == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["created"] * len(said)
    assert grafana.datasources["railscope-prometheus"]["url"] == "http://prometheus:9090"
    assert grafana.dashboards.keys() == {one.identifier for one in documents.read_documents(build.COMMITTED).values()}
    rules = [rule for group in grafana.groups.values() for rule in group["rules"]]
    assert [rule["title"] for rule in rules] == [one.name for one in rules_files.make_alerts()]
    for rule in rules:
        page = rule["annotations"]["runbook_url"].removeprefix("https://wiki/railscope/")
        assert (ROOT / "dashboards/runbooks" / page).is_file()
        shown_by = grafana.dashboards[rule["annotations"]["__dashboardUid__"]]["dashboard"]
        assert rule["annotations"]["__panelId__"] in {
            str(panel["id"]) for one in shown_by["panels"] for panel in (one, *one.get("panels", ()))
        }


def test_a_second_run_changes_nothing(token: str, capsys: pytest.CaptureFixture[str]) -> None:
    grafana = FakeGrafana()
    assert publish(grafana, *with_prometheus(token)) == 0
    before = deepcopy((grafana.datasources, grafana.folders, grafana.dashboards, grafana.groups))
    grafana.calls.clear()
    capsys.readouterr()
    assert publish(grafana, *with_prometheus(token)) == 0
    assert grafana.written() == []
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"unchanged"}
    assert (grafana.datasources, grafana.folders, grafana.dashboards, grafana.groups) == before


def test_only_what_differs_is_written_again(token: str) -> None:
    grafana = FakeGrafana()
    assert publish(grafana, *with_prometheus(token)) == 0
    grafana.calls.clear()
    first_panel(grafana.dashboards["railscope-node"]["dashboard"])["title"] = "edited"
    grafana.dashboards["railscope-job"]["meta"]["folderUid"] = "elsewhere"
    grafana.groups["railscope/railscope-rails"]["rules"].pop()
    grafana.datasources["railscope-prometheus"] |= {"url": "http://old:9090", "basicAuth": True}
    grafana.datasources["railscope-prometheus"]["jsonData"]["customQueryParameters"] = "tenant=a"
    assert publish(grafana, *with_prometheus(token)) == 0
    assert grafana.written() == [
        ("PUT", "/datasources/uid/railscope-prometheus"),
        ("POST", "/dashboards/db"),
        ("POST", "/dashboards/db"),
        ("PUT", "/v1/provisioning/folder/railscope/rule-groups/railscope-rails"),
    ]
    assert first_panel(grafana.dashboards["railscope-node"]["dashboard"])["title"] == "Sent"
    assert grafana.dashboards["railscope-job"]["meta"]["folderUid"] == "railscope"
    changed_source = grafana.datasources["railscope-prometheus"]
    assert changed_source["url"] == "http://prometheus:9090"
    # What the operator added stays.
    assert changed_source["basicAuth"] is True
    assert changed_source["jsonData"]["customQueryParameters"] == "tenant=a"


def test_a_rule_that_somebody_paused_stays_paused(token: str) -> None:
    grafana = FakeGrafana()
    assert publish(grafana, *with_prometheus(token)) == 0
    rails = grafana.groups["railscope/railscope-rails"]
    rails["rules"][0]["isPaused"] = True
    grafana.calls.clear()
    assert publish(grafana, *with_prometheus(token)) == 0
    assert grafana.written() == []
    rails["interval"] = 60
    assert publish(grafana, *with_prometheus(token)) == 0
    written = grafana.groups["railscope/railscope-rails"]
    assert written["interval"] == 10
    assert [rule["isPaused"] for rule in written["rules"]] == [True] + [False] * (len(rails["rules"]) - 1)


def test_a_data_source_that_is_there_is_used(token: str) -> None:
    source = {"uid": "own", "name": "Mimir", "type": "prometheus"}
    grafana = FakeGrafana(datasources={"own": source})
    assert publish(grafana, "--datasource", "own", "--token-file", token) == 0
    assert grafana.datasources == {"own": source}
    chosen = grafana.dashboards["railscope-fleet"]["dashboard"]["templating"]["list"][0]["current"]
    assert (chosen["value"], chosen["text"]) == ("own", "Mimir")
    queries = [rule["data"][0] for group in grafana.groups.values() for rule in group["rules"]]
    assert {one["datasourceUid"] for one in queries} == {"own"}


def test_without_alerts_there_are_none(token: str) -> None:
    grafana = FakeGrafana()
    assert publish(grafana, *with_prometheus(token), "--no-alerts") == 0
    assert grafana.groups == {}
    assert len(grafana.dashboards) == 5


def test_a_grafana_below_a_path_is_reached_and_a_user_gets_in(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text(PASSWORD[1])
    grafana = FakeGrafana(prefix="/monitoring/grafana")
    assert publish(grafana, "--prometheus", "http://p:9090", "--basic-auth", f"{PASSWORD[0]}:{secret}") == 0
    assert len(grafana.dashboards) == 5


def test_the_token_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    grafana = FakeGrafana()
    assert publish(grafana, "--prometheus", "http://p:9090") == 0
    assert len(grafana.dashboards) == 5


@pytest.mark.parametrize(
    ("grafana", "says"),
    [
        (FakeGrafana(is_grafana=False), "is not Grafana: give its address"),
        (FakeGrafana(prefix="/grafana-elsewhere"), "is not Grafana: give its address"),
        (FakeGrafana(version="10.4.19"), "is Grafana 10.4.19: these dashboards need 11 or newer"),
        (FakeGrafana(version=""), "of an unknown version"),
        (FakeGrafana(forbidden="/datasources"), "does not let this account make data sources (role Admin)"),
        (FakeGrafana(forbidden="/folders"), "does not let this account make folders"),
        (FakeGrafana(forbidden="/dashboards"), "does not let this account save dashboards"),
        (FakeGrafana(forbidden="/v1/provisioning"), "does not let this account provision alert rules"),
        (FakeGrafana(broken="/folders"), "Grafana failed (Server Error 500: database is locked): see its log"),
    ],
)
def test_what_goes_wrong_is_one_line_that_says_what_to_do(
    grafana: FakeGrafana, says: str, token: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(grafana) as url:
        url = url.removesuffix("/grafana-elsewhere")
        assert run("publish", "--url", url, *with_prometheus(token)) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1
    assert TOKEN not in said


def test_a_wrong_token_says_where_to_make_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("glsa_old")
    grafana = FakeGrafana()
    assert publish(grafana, *with_prometheus(str(tmp_path / "token"))) == 2
    said = capsys.readouterr().err
    assert "does not take the token or password" in said
    assert "glsa_old" not in said
    assert grafana.written() == []


def test_a_data_source_that_is_not_there_says_where_to_look(token: str, capsys: pytest.CaptureFixture[str]) -> None:
    grafana = FakeGrafana(datasources={"logs": {"uid": "logs", "name": "Loki", "type": "loki"}})
    for uid in ("logs", "none"):
        assert publish(grafana, "--datasource", uid, "--token-file", token) == 2
        assert f"no data source of type prometheus with the uid '{uid}'" in capsys.readouterr().err
    assert grafana.written() == []


@pytest.mark.parametrize(
    "url", ["grafana:3000", "ftp://grafana", "http://", "http://host:port", "http://user:secret@host"]
)
def test_what_is_no_address_is_refused(url: str, token: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("publish", "--url", url, *with_prometheus(token)) == 2
    assert "is not the address of a Grafana" in capsys.readouterr().err


def test_a_grafana_that_does_not_run_says_so(token: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeGrafana()) as url:
        pass
    assert run("publish", "--url", url, *with_prometheus(token)) == 2
    assert "cannot be reached (Connection refused)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no token: give --token-file FILE"),
        (("--token-file", "/nowhere/token"), "/nowhere/token: cannot be read: No such file or directory"),
        (("--token-file", "/dev/null"), "/dev/null: is empty"),
        (("--basic-auth", "ada"), "write USER:FILE"),
    ],
)
def test_a_missing_credential_says_how_to_give_one(
    arguments: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GRAFANA_TOKEN", raising=False)
    assert run("publish", "--url", "http://127.0.0.1:1", "--datasource", "x", *arguments) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1


def test_more_keys_make_no_difference_and_other_values_do() -> None:
    wanted = {"a": [{"b": 1}], "c": None}
    assert contains({"a": [{"b": 1, "id": 7}], "c": None, "version": 3}, wanted)
    assert not contains({"a": [{"b": 2}], "c": None}, wanted)
    assert not contains({"a": [{"b": 1}, {"b": 1}], "c": None}, wanted)
    assert not contains({"a": [{"b": 1}]}, wanted)


# Files that Grafana reads by itself


def test_provisioning_files_and_dashboards_agree() -> None:
    folder = ROOT / "deploy/grafana/provisioning"
    (source,) = yaml.safe_load((folder / "datasources/railscope.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards/railscope.yml").read_text())["providers"]
    assert (source["type"], source["access"], source["uid"]) == ("prometheus", "proxy", "railscope-prometheus")
    assert provider["type"] == "file"
    # The manual puts the files where the provider looks.
    manual = (ROOT / "deploy/grafana/README.md").read_text()
    assert f"{provider['options']['path']} dashboards/json/*.json" in manual
    for file in folder.rglob("*.yml"):
        assert f"/etc/grafana/provisioning/{file.parent.name} deploy/grafana/provisioning/{file.parent.name}" in manual


def test_every_query_is_of_the_chosen_clusters_and_keeps_them_apart() -> None:
    """Hosts of two clusters in one store may have the same name."""
    seen = 0
    for document in documents.read_documents(build.COMMITTED).values():
        assert document.variables[1].name == "cluster", "after the data source"
        asked = [query.expression for panel in document.panels for query in panel.queries]
        chosen = [one.query for one in document.variables if one.kind == "query" and one.name != "cluster"]
        asked += [expressions.parse_label_values(one)[0] for one in chosen]
        for expression in (*asked, *document.annotations):
            selectors = expressions.parse_selectors(expressions.substitute_variables(expression))
            assert [one.metric for one in selectors if "cluster" not in one.labels] == [], expression
            for labels in re.findall(r"\b(?:by|on) \(([^)]+)\)", expression):
                names = set(labels.split(", "))
                assert "cluster" in names or not names & {"instance", "comm", "job"}, expression
            seen += len(selectors)
    assert seen > 200
