"""What Grafana is given of the alerts: it cannot query in a template."""

from __future__ import annotations

import re

from railscope.dashboards import alerts, rules_files
from railscope.dashboards.alerting.alert import PREFIX


def test_templates_of_alerts_are_said_in_grafanas_terms() -> None:
    prometheus = (
        "{{ $labels.comm }} has {{ $value | humanize }}. "
        "{{ range printf \"a{b='%s'}\" $labels.b | query -}}"
        "{{ .Labels.c }}{{- with .Labels.d }}, {{ . }}{{ end }}{{ end }} Done {{ with $labels.x }}{{ . }}{{ end }}"
    )
    assert alerts.to_grafana_template(prometheus) == (
        "{{ $labels.comm }} has {{ $values.query.Value | humanize }}. Done {{ with $labels.x }}{{ . }}{{ end }}"
    )


def test_what_grafana_cannot_ask_leaves_whole_sentences() -> None:
    (stalled,) = [one for one in rules_files.make_alerts() if one.name == "RailscopeCollectiveStalled"]
    told = {name: alerts.to_grafana_template(text) for name, text in stalled.annotations("").items()}
    assert told == {
        "summary": '{{ if eq $labels.comm "unknown" }}A process of no known communicator{{ else }}Communicator '
        "{{ $labels.comm }}{{ end }} is stalled",
        "description": (
            "For the verdict on all hosts run: railscope diagnose --prometheus URL"
            '{{ if ne $labels.comm "unknown" }} --comm {{ $labels.comm }}{{ end }}'
        ),
    }


def test_names_say_whose_alerts_they_are_and_fit_into_grafanas_identifiers() -> None:
    names = [one.name for one in rules_files.make_alerts()]
    assert [name for name in names if not name.startswith(PREFIX)] == []
    assert len(set(names)) == len(names)
    rules = alerts.make_alert_group("all", rules_files.make_alerts(), "folder", "source", None, "")["rules"]
    assert max(len(rule["uid"]) for rule in rules) <= 40


def test_nothing_that_grafana_is_given_asks_a_question() -> None:
    rules = alerts.make_alert_group("all", rules_files.make_alerts(), "folder", "source", None, "")["rules"]
    told = [text for rule in rules for name in ("labels", "annotations") for text in rule[name].values()]
    assert told
    assert not [text for text in told if re.search(r"\|\s*query\b", text)]
    (stalled,) = [rule for rule in rules if rule["title"] == "RailscopeCollectiveStalled"]
    assert stalled["labels"] == {"severity": "critical"}
