"""Publishes the dashboards to a Grafana over its HTTP interface: folder, data source, dashboards, alert rules.

Everything has an identifier of its own, so that a second run changes nothing: what is there is read first, and written
only where it differs.  What Grafana adds (versions, numbers, defaults) makes no difference.

grafana-client speaks the interface; whatever goes wrong there becomes one line that says what to do.  It was tested
against a recorded stand-in that checks the shape of each call, never against a Grafana server.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from grafana_client.api import GrafanaApi
from grafana_client.client import GrafanaClientError, GrafanaException, GrafanaServerError, GrafanaUnauthorizedError
from niquests.exceptions import ConnectionError as NoConnection
from niquests.exceptions import RequestException
from niquests.exceptions import SSLError as NoCertificate

from railscope.dashboards import alerts, documents, rules_files
from railscope.dashboards.alerts import PanelAddress

FOLDER: Final = "railscope"
DATASOURCE: Final = "railscope-prometheus"
OLDEST_VERSION: Final = 11
"""The dashboards are written for Grafana 11.6."""
_TIMEOUT_SECONDS: Final = 20.0


class PublishError(Exception):
    """Grafana cannot be reached, or does not do what it is asked; the message is one line."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where Grafana is, how to get in, and which Prometheus it is to ask."""

    url: str
    credential: str | tuple[str, str] = field(repr=False)
    """A service account's token, or (user, password)."""
    prometheus: str = ""
    """Address of the Prometheus, as Grafana reaches it: makes a data source; empty: use the one that is there."""
    datasource: str = ""
    """uid of a data source that is there."""
    scrape_interval: str = "15s"
    """How often that Prometheus scrapes: Grafana chooses the range of rates by it."""
    with_alerts: bool = True
    runbooks: str = ""
    """Address before the names of runbooks; empty: alerts have none."""
    verify: bool | str = True
    """False: any certificate is taken; a text: file with the certificates to trust."""


@dataclass(frozen=True, slots=True)
class Done:
    """What was done to one thing."""

    what: str
    how: str
    """`created`, `updated` or `unchanged`."""


def publish(target: Target, folder: Path) -> Iterator[Done]:
    """Publish the dashboards of a folder; yields each thing when it is done.

    Raises:
        PublishError: Grafana is not there, too old, or refuses; or the data source is not there.
        DocumentError: the folder holds no dashboards.
    """
    found = documents.read_documents(folder)
    api = _connected(target)
    try:
        yield from _everything(api, target, found, folder)
    finally:
        api.client.s.close()


def _everything(
    api: GrafanaApi, target: Target, found: Mapping[str, documents.Document], folder: Path
) -> Iterator[Done]:
    with _explained("make data sources (role Admin)"):
        datasource, name, done = _datasource(api, target)
    yield done
    with _explained("make folders (role Editor)"):
        yield _folder(api)
    for file in found:
        with _explained("save dashboards (role Editor)"):
            yield _dashboard(api, json.loads((folder / file).read_text()), datasource, name)
    if target.with_alerts:
        for group_name, rules in groupby(rules_files.make_alerts(), lambda one: one.group):
            panel = _panel(group_name, found)
            wanted = alerts.make_alert_group(group_name, rules, FOLDER, datasource, panel, target.runbooks)
            with _explained("provision alert rules (role Admin, or the permission alert.provisioning:write)"):
                yield _alerts(api, wanted)


def _connected(target: Target) -> GrafanaApi:
    parts = urllib.parse.urlsplit(target.url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.username:
        raise PublishError(
            f"--url: {target.url!r} is not the address of a Grafana: write it as in https://grafana:3000"
        )
    path = parts.path.strip("/")
    api = GrafanaApi(
        target.credential,
        protocol=parts.scheme,
        host=f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname,
        port=port,
        url_path_prefix=f"{path}/" if path else "",
        verify=target.verify,
        timeout=_TIMEOUT_SECONDS,
    )
    try:
        _check_version(api, target.url)
    except PublishError:
        api.client.s.close()
        raise
    return api


def _check_version(api: GrafanaApi, url: str) -> None:
    with _explained("read its settings"):
        try:
            settings = api.client.GET("/frontend/settings")
        except GrafanaUnauthorizedError:
            raise
        except (GrafanaClientError, json.JSONDecodeError):
            settings = None
    build = settings.get("buildInfo") if isinstance(settings, dict) else None
    if not isinstance(build, dict):
        raise PublishError(f"{url} answers, but is not Grafana: give its address with the path it is served under")
    version = str(build.get("version", ""))
    major = version.partition(".")[0]
    if not major.isdigit() or int(major) < OLDEST_VERSION:
        raise PublishError(f"{url} is Grafana {version or 'of an unknown version'}: these dashboards need 11 or newer")


def _datasource(api: GrafanaApi, target: Target) -> tuple[str, str, Done]:
    """The data source's uid and name, and what was done to it."""
    if not target.prometheus:
        there = _read(lambda: api.datasource.get_datasource_by_uid(target.datasource))
        if there is None or there.get("type") != "prometheus":
            raise PublishError(
                f"--datasource: Grafana has no data source of type prometheus with the uid {target.datasource!r}: "
                "take the uid from its page (Connections, Data sources), or give --prometheus URL"
            )
        return target.datasource, there["name"], Done(f"data source {there['name']}", "unchanged")
    wanted = {
        "uid": DATASOURCE,
        "name": "railscope Prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": target.prometheus,
        "jsonData": {"httpMethod": "POST", "timeInterval": target.scrape_interval},
    }
    there = _read(lambda: api.datasource.get_datasource_by_uid(DATASOURCE))
    if there is None:
        api.datasource.create_datasource(wanted)
        how = "created"
    elif contains(there, wanted):
        how = "unchanged"
    else:
        # What an operator added (credentials, custom headers) stays.
        options = (there.get("jsonData") or {}) | {"httpMethod": "POST", "timeInterval": target.scrape_interval}
        kept = {key: value for key, value in there.items() if key not in ("id", "orgId", "version", "readOnly")}
        api.datasource.update_datasource_by_uid(DATASOURCE, {**kept, **wanted, "jsonData": options})
        how = "updated"
    return DATASOURCE, str(wanted["name"]), Done("data source railscope Prometheus", how)


def _folder(api: GrafanaApi) -> Done:
    if _read(lambda: api.folder.get_folder(FOLDER)) is not None:
        return Done("folder railscope", "unchanged")
    api.folder.create_folder("railscope", uid=FOLDER)
    return Done("folder railscope", "created")


def _dashboard(api: GrafanaApi, content: dict[str, Any], datasource: str, name: str) -> Done:
    what = f"dashboard {content['title']}"
    for variable in content["templating"]["list"]:
        if variable["type"] == "datasource":
            variable["current"] = {"selected": True, "text": name, "value": datasource}
    there = _read(lambda: api.dashboard.get_dashboard(content["uid"]))
    if there is not None and there["meta"].get("folderUid") == FOLDER and contains(there["dashboard"], content):
        return Done(what, "unchanged")
    api.dashboard.update_dashboard(
        {"dashboard": {**content, "id": None}, "folderUid": FOLDER, "overwrite": True, "message": "railscope"}
    )
    return Done(what, "created" if there is None else "updated")


def _panel(group_name: str, found: Mapping[str, documents.Document]) -> PanelAddress | None:
    identifier, title = alerts.SHOWN_BY.get(group_name, ("", ""))
    return next(
        (
            PanelAddress(one.identifier, panel.number)
            for one in found.values()
            if one.identifier == identifier
            for panel in one.panels
            if panel.title == title
        ),
        None,
    )


def _alerts(api: GrafanaApi, wanted: dict[str, Any]) -> Done:
    name = wanted["title"]
    what = f"alert rules {name} ({len(wanted['rules'])})"
    there = _read(lambda: api.alertingprovisioning.get_rule_group(FOLDER, name))
    # A rule that a user paused stays paused.
    paused = {rule["uid"] for rule in (there or {}).get("rules", ()) if rule.get("isPaused")}
    for rule in wanted["rules"]:
        rule["isPaused"] = rule["uid"] in paused
    if there is not None and contains(there, wanted):
        return Done(what, "unchanged")
    # Without provenance, or users could not pause a rule in Grafana.
    api.alertingprovisioning.update_rule_group(FOLDER, name, wanted, disable_provenance=True)
    return Done(what, "created" if there is None else "updated")


def contains(there: object, wanted: object) -> bool:
    """Whether what is in Grafana has everything that is wanted; it may have more keys."""
    if isinstance(wanted, dict):
        return isinstance(there, dict) and all(key in there and contains(there[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return (
            isinstance(there, list)
            and len(there) == len(wanted)
            and all(contains(one, other) for one, other in zip(there, wanted, strict=True))
        )
    return there == wanted


def _read(get: Callable[[], Any]) -> dict[str, Any] | None:
    """What Grafana has; None: nothing of the kind."""
    try:
        found: dict[str, Any] = get()
    except GrafanaClientError as error:
        if error.status_code == 404:
            return None
        raise
    return found


@contextmanager
def _explained(doing: str) -> Iterator[None]:
    """An error of grafana-client as one line that says what to do."""
    try:
        yield
    except GrafanaUnauthorizedError:
        raise PublishError(
            "Grafana does not take the token or password: make a token in Administration, Service accounts"
        ) from None
    except GrafanaServerError as error:
        raise PublishError(f"Grafana failed ({_line(error)}): see its log") from None
    except GrafanaException as error:
        if error.status_code == 403:
            raise PublishError(f"Grafana does not let this account {doing}") from None
        raise PublishError(f"Grafana refuses to {doing.partition(' (')[0]}: {_line(error)}") from None
    except NoCertificate:
        raise PublishError("Grafana's certificate is not trusted: give --ca-file FILE, or --insecure") from None
    except NoConnection as error:
        raise PublishError(f"Grafana cannot be reached ({_cause(error)}): look at --url, and whether it runs") from None
    except (RequestException, json.JSONDecodeError) as error:
        raise PublishError(f"Grafana's answer cannot be read ({_line(error)}): look at --url") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _cause(error: BaseException) -> str:
    """The system's own error below the libraries' exceptions."""
    deepest, below = error, _below(error)
    while below is not None:
        deepest, below = below, _below(below)
    return (deepest.strerror if isinstance(deepest, OSError) else None) or _line(deepest)


def _below(error: BaseException) -> BaseException | None:
    # urllib3 puts one error into the next one's arguments, or calls it the reason.
    inside = next((one for one in error.args if isinstance(one, BaseException)), None)
    return inside or getattr(error, "reason", None) or error.__cause__ or error.__context__
