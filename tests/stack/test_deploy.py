"""What operators copy from deploy/: Prometheus' and Alertmanager's tools accept it, and alerts go where they say."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from railscope.dashboards import rules_files
from railscope.dashboards.alerting.alert import Alert
from tests.stack.prometheus import tool
from tests.stack.stack import ALERTMANAGER_PORT, WEBHOOK_PORT, lay_out

pytestmark = pytest.mark.stack


@pytest.fixture
def laid_out(tmp_path: Path) -> Path:
    lay_out(tmp_path)
    return tmp_path


def said(program: str, package: str, *arguments: str) -> str:
    done = subprocess.run([tool(program, package), *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["prometheus.yml", "remote-write.yml", "federation.yml"])
def test_promtool_accepts_what_is_shipped(laid_out: Path, name: str) -> None:
    assert "is valid prometheus config file syntax" in said(
        "promtool", "prometheus", "check", "config", str(laid_out / name)
    )


def test_remote_write_is_appended_as_its_comment_says(laid_out: Path) -> None:
    whole = laid_out / "prometheus.yml"
    whole.write_text(whole.read_text() + (laid_out / "remote-write.yml").read_text())
    answer = said("promtool", "prometheus", "check", "config", str(whole))
    assert "2 rule files found" in answer
    assert yaml.safe_load(whole.read_text()).keys() >= {"scrape_configs", "remote_write", "rule_files", "alerting"}


def test_prometheus_and_alertmanager_find_each_other(laid_out: Path) -> None:
    configuration = yaml.safe_load((laid_out / "prometheus.yml").read_text())
    (alertmanager,) = configuration["alerting"]["alertmanagers"]
    assert alertmanager["static_configs"][0]["targets"] == [f"127.0.0.1:{ALERTMANAGER_PORT}"]
    # Joins are for who has the other exporters.
    shipped = {file.name for file in rules_files.SHIPPED.glob("*.yml")} - {rules_files.JOINS}
    assert set(configuration["rule_files"]) == shipped
    (job,) = configuration["scrape_configs"]
    assert all((laid_out / file).is_file() for one in job["file_sd_configs"] for file in one["files"])


def test_amtool_accepts_what_is_shipped(laid_out: Path) -> None:
    answer = said("amtool", "prometheus-alertmanager", "check-config", str(laid_out / "alertmanager.yml"))
    assert "3 receivers" in answer
    urls = [
        hook["url"]
        for receiver in yaml.safe_load((laid_out / "alertmanager.yml").read_text())["receivers"]
        for hook in receiver.get("webhook_configs", ())
    ]
    assert [url for url in urls if not url.startswith(f"http://127.0.0.1:{WEBHOOK_PORT}/")] == []


@pytest.mark.parametrize("job", ["unknown", "4711"])
@pytest.mark.parametrize("alert", rules_files.make_alerts(), ids=lambda alert: alert.name)
def test_severity_decides_who_is_told(laid_out: Path, alert: Alert, job: str) -> None:
    labels = {"alertname": alert.name, **alert.labels}
    # What is found out when the alert comes: see tests/stack/test_alert_path.py.
    labels |= {name: job for name in labels if name == "exported_job"}
    assert not any("{{" in value for value in labels.values())
    receiver = {"critical": "on-call", "warning": "team", "info": "none"}[labels["severity"]]
    pairs = [f"{name}={value}" for name, value in labels.items()]
    arguments = ["config", "routes", "test", f"--config.file={laid_out / 'alertmanager.yml'}"]
    said("amtool", "prometheus-alertmanager", *arguments, f"--verify.receivers={receiver}", *pairs)


def test_inhibitions_and_routes_name_alerts_that_there_are(laid_out: Path) -> None:
    known = {alert.name for alert in rules_files.make_alerts()}
    configuration = yaml.safe_load((laid_out / "alertmanager.yml").read_text())
    matchers = [
        matcher
        for rule in configuration["inhibit_rules"]
        for side in ("source_matchers", "target_matchers")
        for matcher in rule[side]
    ]
    matchers += [matcher for route in configuration["route"]["routes"] for matcher in route["matchers"]]
    named = [name for one in matchers if one.startswith("alertname") for name in one.split('"')[1].split("|")]
    assert len(named) > 10
    assert set(named) <= known
