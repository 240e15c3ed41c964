"""`railscope dashboards build|check|publish|cost`.

What it needs beside the core (the SDK that builds, the parser that checks, the client that publishes) is the extra
`grafana`, imported only when a command runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TextIO

from railscope.agent.cluster.fleet.prometheus import parse_duration
from railscope.agent.config.values import option_type, whole_number
from railscope.dashboards.alerting.alert import RUNBOOKS
from railscope.dashboards.alerting.thresholds import describe_thresholds, parse_thresholds
from railscope.probes.installation import remedy_for_missing_extra

FINE, PROBLEM, COULD_NOT_RUN = 0, 1, 2

_OF_EXTRA: Final = frozenset({"grafana_foundation_sdk", "grafana_client", "niquests", "promql_parser"})
COMMITTED: Final = Path(__file__).parent / "json"
_TOKEN: Final = "GRAFANA_TOKEN"
_AT_LEAST_NONE: Final = option_type(whole_number(0, 10_000))
_AT_LEAST_ONE: Final = option_type(whole_number(1, 10**18 - 1))


def add_dashboards_arguments(parser: ArgumentParser) -> None:
    """The options of `railscope dashboards`."""
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    build = actions.add_parser(
        "build",
        help="write the dashboards' JSON, the rules and the mixin",
        description="Write the dashboards, as Grafana reads them, the recording and alerting rules, as Prometheus "
        "reads them, into a folder, and with --output a mixin of both, as Jsonnet reads it.",
        epilog=f"thresholds, with their defaults:\n{describe_thresholds()}\n\nexample: railscope dashboards build "
        "--output /tmp/railscope --runbooks https://wiki.example/railscope --threshold plane_hosts=16",
    )
    build.add_argument("--output", type=Path, metavar="FOLDER", help="where to (default: beside the code)")
    build.add_argument(
        "--runbooks",
        default=RUNBOOKS,
        metavar="URL",
        help="URL under which you serve dashboards/runbooks, for the alerts' runbook_url",
    )
    build.add_argument(
        "--threshold",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a number that decides when an alert fires; may be given again for another",
    )
    build.add_argument(
        "--selector",
        default="",
        metavar="MATCHERS",
        help="PromQL's label matchers that choose the agents' series, as in 'job=\"railscope\"' (default: none)",
    )
    build.add_argument(
        "--cluster-label",
        default="cluster",
        metavar="LABEL",
        help="the label by which your Prometheus tells clusters apart (default: cluster)",
    )
    build.set_defaults(act=_build, parser=build)
    check = actions.add_parser(
        "check",
        help="check queries, descriptions, units, layout and links of dashboards",
        description="Check dashboards: every query parses and asks only for what railscope exports or records, "
        "every panel has a description and a unit, none overlap, links lead somewhere; without FOLDER also whether the "
        "files are what the code builds.",
        epilog="example: railscope dashboards check",
    )
    check.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="check these (default: those shipped)")
    check.set_defaults(act=_check, parser=check)
    publish = actions.add_parser(
        "publish",
        help="publish dashboards and alert rules to a Grafana",
        description="Create folder, data source, dashboards and alert rules in a Grafana (11 or newer).  What already "
        "exists and is equal stays unchanged.  Prometheus evaluates the recording rules: load "
        "dashboards/rules/railscope-recording.yml there.",
        epilog=f"The token is read from --token-file, or from the environment variable {_TOKEN}.  "
        "example: railscope dashboards publish --url https://grafana:3000 --prometheus http://prometheus:9090 "
        "--token-file /etc/railscope/grafana-token",
    )
    _add_publish_arguments(publish)
    publish.set_defaults(act=_publish, parser=publish)
    cost = actions.add_parser(
        "cost",
        help="what a fleet costs a Prometheus: series, disk, memory, CPU time",
        description="Series, samples and disk space for fleets of several sizes, in Prometheus and in a long-term "
        "store that keeps a subset; memory and CPU time of a Prometheus, and of a VictoriaMetrics with vmalert, that "
        "hold everything and evaluate the shipped rules.  The node is a typical one (8 GPUs with 18 NVLinks each, 8 "
        "RoCE rails, 64 communicators), or one of yours: curl http://NODE:9779/metrics > FILE.",
        epilog="example: railscope dashboards cost --gpus 512 2048 --scrape-interval 5s --exposition FILE",
    )
    _add_cost_arguments(cost)
    cost.set_defaults(act=_cost, parser=cost)


def _add_publish_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--url", required=True, metavar="URL", help="Grafana's address, its path included")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prometheus", default="", metavar="URL", help="create a data source for this Prometheus")
    source.add_argument("--datasource", default="", metavar="UID", help="use this existing data source (its uid)")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="a file with a service account's token")
    parser.add_argument("--basic-auth", default="", metavar="USER:FILE", help="a user, and a file with its password")
    parser.add_argument("--ca-file", type=Path, metavar="FILE", help="CA certificates to trust instead of the system's")
    parser.add_argument("--insecure", action="store_true", help="accept any certificate of Grafana")
    parser.add_argument(
        "--scrape-interval", default="15s", metavar="15s", help="how often that Prometheus scrapes (default: 15s)"
    )
    parser.add_argument(
        "--no-alerts",
        action="store_true",
        help="publish no alert rules: Prometheus does the alerting",
    )
    parser.add_argument("--runbooks", default="", metavar="URL", help="URL under which dashboards/runbooks is served")
    parser.add_argument("--folder", type=Path, default=COMMITTED, metavar="FOLDER", help="publish these dashboards")


def _add_cost_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--gpus", type=_AT_LEAST_ONE, nargs="+", default=[8, 1_000, 10_000], metavar="N", help="sizes of fleets"
    )
    parser.add_argument("--gpus-per-node", type=_AT_LEAST_ONE, default=8, metavar="N", help="default: 8")
    parser.add_argument(
        "--scrape-interval", type=option_type(parse_duration), default=15.0, metavar="15s", help="default: 15s"
    )
    parser.add_argument(
        "--retention", type=option_type(parse_duration), default=15 * 86_400.0, metavar="15d", help="default: 15d"
    )
    parser.add_argument(
        "--restarts", type=_AT_LEAST_NONE, default=4, metavar="N", help="how often a day jobs start anew (default: 4)"
    )
    parser.add_argument(
        "--profile", choices=("full", "lean"), default="full", help="of the typical node (--series.profile)"
    )
    parser.add_argument("--exposition", type=Path, metavar="FILE", help="/metrics of one of your nodes, as a file")
    parser.add_argument(
        "--metrics", type=int, default=0, metavar="N", help="also list the N metrics with the most series"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")


def run_dashboards(parsed: argparse.Namespace, out: TextIO) -> int:
    """Build, check or publish dashboards; returns the exit status."""
    act: Callable[[Any, TextIO], int] = parsed.act
    try:
        return act(parsed, out)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _OF_EXTRA:
            raise
        return _cannot(f"{error.name} is missing: {remedy_for_missing_extra('grafana')}")


def _cannot(what: str) -> int:
    print(f"railscope dashboards: {what}", file=sys.stderr)
    return COULD_NOT_RUN


def _build(parsed: argparse.Namespace, out: TextIO) -> int:
    from railscope.dashboards import build
    from railscope.dashboards.site import CLUSTER, Site

    if not parsed.runbooks.startswith(("http://", "https://")):
        return _cannot(f"--runbooks {parsed.runbooks}: write an address, as in https://wiki.example/railscope")
    if parsed.output is None and (parsed.selector or parsed.cluster_label != CLUSTER):
        return _cannot("--selector and --cluster-label want --output FOLDER: the shipped rules are what is changed")
    try:
        site = Site(parsed.selector, parsed.cluster_label)
        changed = build.write_all(parsed.output, parse_thresholds(parsed.threshold), parsed.runbooks, site)
    except ValueError as error:
        return _cannot(str(error))
    except OSError as error:
        return _cannot(f"{error.filename}: cannot write dashboards and rules: {error.strerror}")
    for file in changed:
        print(f"wrote {file}", file=out)
    if not changed:
        print("nothing to do: the files are as the code builds them", file=out)
    return FINE


def _check(parsed: argparse.Namespace, out: TextIO) -> int:
    from railscope.dashboards import check, documents

    folder = parsed.folder or COMMITTED
    try:
        found = documents.read_documents(folder)
    except documents.DocumentError as error:
        return _cannot(str(error))
    wrong = list(check.find_problems(found))
    if parsed.folder is None:
        wrong += check.find_differences(folder)
    for line in wrong:
        print(line, file=out)
    if wrong:
        return PROBLEM
    panels = sum(panel.kind != "row" for one in found.values() for panel in one.panels)
    queries = sum(len(panel.queries) for one in found.values() for panel in one.panels)
    print(f"{len(found)} dashboards, {panels} panels, {queries} queries: nothing wrong", file=out)
    return FINE


def _publish(parsed: argparse.Namespace, out: TextIO) -> int:
    from railscope.dashboards.documents import DocumentError
    from railscope.dashboards.publish import PublishError, Target, publish

    try:
        credential = _credential(parsed)
    except (OSError, ValueError) as error:
        return _cannot(str(error))
    target = Target(
        url=parsed.url,
        credential=credential,
        prometheus=parsed.prometheus,
        datasource=parsed.datasource,
        scrape_interval=parsed.scrape_interval,
        with_alerts=not parsed.no_alerts,
        runbooks=parsed.runbooks,
        verify=False if parsed.insecure else str(parsed.ca_file) if parsed.ca_file else True,
    )
    try:
        for done in publish(target, parsed.folder):
            print(f"{done.how:9} {done.what}", file=out)
    except (PublishError, DocumentError) as error:
        return _cannot(str(error))
    return FINE


def _cost(parsed: argparse.Namespace, out: TextIO) -> int:
    from railscope.dashboards import cost

    described = "The typical node"
    try:
        if parsed.exposition is None:
            from railscope.dashboards.typical_node import typical_node

            node = cost.count_series(typical_node(), parsed.profile)
        else:
            described = str(parsed.exposition)
            node = cost.count_exposition_series(parsed.exposition.read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        return _cannot(f"{parsed.exposition}: cannot be read: {why}")
    except cost.NotAnExpositionError as error:
        return _cannot(f"{parsed.exposition}: {error}")
    costs = cost.estimate_costs(node, parsed.gpus, parsed.gpus_per_node, parsed.scrape_interval, parsed.restarts)
    if parsed.json:
        print(cost.as_json(node, costs, parsed.scrape_interval), file=out)
        return FINE
    days = parsed.retention / cost.SECONDS_OF_A_DAY
    print(cost.as_text(node, described, costs, parsed.scrape_interval, days), file=out)
    if parsed.metrics > 0:
        print(f"\n{cost.render_families(node, parsed.metrics)}", file=out)
    return FINE


def _credential(parsed: argparse.Namespace) -> str | tuple[str, str]:
    if parsed.token_file is not None:
        return _secret(parsed.token_file)
    if parsed.basic_auth:
        user, _, file = parsed.basic_auth.partition(":")
        if not user or not file:
            raise ValueError("--basic-auth: write USER:FILE, with the password in the file")
        return user, _secret(Path(file))
    token = os.environ.get(_TOKEN, "").strip()
    if not token:
        raise ValueError(f"no token: give --token-file FILE, or set {_TOKEN}")
    return token


def _secret(file: Path) -> str:
    try:
        secret = file.read_text().strip()
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    if not secret:
        raise ValueError(f"{file}: is empty")
    return secret
