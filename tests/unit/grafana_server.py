"""A stand-in for Grafana's HTTP interface: it checks the shape of every call, keeps what it is given, and records.

It was written from Grafana's documentation of its HTTP interface (11.6), not from a running Grafana.  Like Grafana it
gives back more than it was given (numbers, versions, defaults).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any, Final

from tests.serving import QuietHandler, running

TOKEN: Final = "glsa_made-up"
PASSWORD: Final = ("ada", "made-up")
_UID: Final = re.compile(r"[a-zA-Z0-9_-]{1,40}")
_DURATION: Final = re.compile(r"(\d+[smhd])+")


class Refused(Exception):
    """A call that Grafana would not take."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass
class FakeGrafana:
    """What is in this Grafana, and what it was asked."""

    version: str = "11.6.0"
    prefix: str = ""
    """The path it is served under, as in `/grafana`."""
    forbidden: str = ""
    """A path that the account may not write to."""
    broken: str = ""
    """A path that fails."""
    is_grafana: bool = True
    datasources: dict[str, dict[str, Any]] = field(default_factory=dict)
    folders: dict[str, dict[str, Any]] = field(default_factory=dict)
    dashboards: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    """(method, path) in order."""

    def written(self) -> list[tuple[str, str]]:
        """The calls that change something."""
        return [call for call in self.calls if call[0] != "GET"]

    def answer(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Any:
        if not path.startswith(f"{self.prefix}/api/"):
            raise Refused(404, "Not found")
        path = path.removeprefix(f"{self.prefix}/api")
        self.calls.append((method, path))
        accepted = {f"Bearer {TOKEN}", "Basic " + base64.b64encode(":".join(PASSWORD).encode()).decode()}
        if headers.get("authorization") not in accepted:
            raise Refused(401, "Invalid API key")
        if self.forbidden and method != "GET" and path.startswith(self.forbidden):
            raise Refused(403, "You'll need additional permissions to perform this action")
        if self.broken and path.startswith(self.broken):
            raise Refused(500, "database is locked")
        if method != "GET" and not headers.get("content-type", "").startswith("application/json"):
            raise Refused(415, "not JSON")
        routes: list[tuple[str, str, Callable[..., Any]]] = [
            (
                "GET",
                r"/frontend/settings",
                lambda _: {"buildInfo": {"version": self.version}},
            ),
            ("GET", r"/datasources/uid/([\w-]+)", lambda _, uid: self._found(self.datasources, uid)),
            ("POST", r"/datasources", self._datasource),
            ("PUT", r"/datasources/uid/([\w-]+)", self._datasource),
            ("GET", r"/folders/([\w-]+)", lambda _, uid: self._found(self.folders, uid)),
            ("POST", r"/folders", self._folder),
            ("GET", r"/dashboards/uid/([\w-]+)", lambda _, uid: self._found(self.dashboards, uid)),
            ("POST", r"/dashboards/db", self._dashboard),
            (
                "GET",
                r"/v1/provisioning/folder/(\w+)/rule-groups/([\w-]+)",
                lambda _, folder, name: self._found(self.groups, f"{folder}/{name}"),
            ),
            (
                "PUT",
                r"/v1/provisioning/folder/(\w+)/rule-groups/([\w-]+)",
                lambda body, folder, name: self._group(body, folder, name, headers),
            ),
        ]
        for wanted, pattern, act in routes:
            found = re.fullmatch(pattern, path)
            if wanted == method and found is not None:
                return act(body, *found.groups())
        raise Refused(404, f"no such call: {method} {path}")

    @staticmethod
    def _found(kept: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
        if name not in kept:
            raise Refused(404, "not found")
        return kept[name]

    def _datasource(self, body: Any, uid: str | None = None) -> Any:
        _shape(body, uid=str, name=str, type=str, access=str, url=str, jsonData=dict)
        if uid is None and body["uid"] in self.datasources:
            raise Refused(409, "data source with the same name already exists")
        if uid is not None and (uid != body["uid"] or uid not in self.datasources):
            raise Refused(404, "Data source not found")
        if body["access"] not in ("proxy", "direct"):
            raise Refused(400, "bad request data")
        _address(body["url"])
        kept = self.datasources[body["uid"]] = {"id": 1, "orgId": 1, "isDefault": False, "basicAuth": False, **body}
        return {"datasource": kept, "id": 1, "message": "Datasource added", "name": body["name"]}

    def _folder(self, body: Any) -> Any:
        _shape(body, title=str, uid=str)
        _identifier(body["uid"])
        if body["uid"] in self.folders:
            raise Refused(412, "a folder with the same uid already exists")
        self.folders[body["uid"]] = {"id": 1, "version": 1, **body}
        return self.folders[body["uid"]]

    def _dashboard(self, body: Any) -> Any:
        _shape(body, dashboard=dict, folderUid=str, overwrite=bool, message=str)
        content = body["dashboard"]
        _shape(content, uid=str, title=str, panels=list, templating=dict, schemaVersion=int)
        _identifier(content["uid"])
        if body["folderUid"] not in self.folders:
            raise Refused(404, "folder not found")
        there = self.dashboards.get(content["uid"])
        if there is not None and not body["overwrite"]:
            raise Refused(412, "The dashboard has been changed by someone else")
        version = 1 if there is None else there["dashboard"]["version"] + 1
        self.dashboards[content["uid"]] = {
            "dashboard": {**content, "id": 7, "version": version},
            "meta": {"folderUid": body["folderUid"], "slug": "made-up", "provisioned": False},
        }
        return {"id": 7, "uid": content["uid"], "status": "success", "version": version}

    def _group(self, body: Any, folder: str, name: str, headers: dict[str, str]) -> Any:
        _shape(body, title=str, folderUid=str, interval=int, rules=list)
        if body["title"] != name or body["folderUid"] != folder or folder not in self.folders:
            raise Refused(400, "the group's name or folder is another one in the path")
        if body["interval"] % 10:
            raise Refused(400, "interval should be a multiple of 10 seconds")
        if headers.get("x-disable-provenance") != "true":
            raise Refused(400, "nobody could edit these rules")
        for rule in body["rules"]:
            self._check_rule(rule, folder, name)
        rules = [{"id": 1, "orgID": 1, "updated": "2025-01-01T00:00:00Z", **rule} for rule in body["rules"]]
        self.groups[f"{folder}/{name}"] = {**body, "rules": rules}
        return self.groups[f"{folder}/{name}"]

    def _check_rule(self, rule: Any, folder: str, group: str) -> None:
        _shape(rule, uid=str, title=str, folderUID=str, ruleGroup=str, condition=str, data=list, noDataState=str)
        _shape(rule, execErrState=str, labels=dict, annotations=dict, isPaused=bool)
        _identifier(rule["uid"])
        if rule["folderUID"] != folder or rule["ruleGroup"] != group or not _DURATION.fullmatch(rule["for"]):
            raise Refused(400, "invalid alert rule")
        asked: set[str] = set()
        for query in rule["data"]:
            _shape(query, refId=str, relativeTimeRange=dict, datasourceUid=str, model=dict)
            if query["datasourceUid"] == "__expr__":
                used = set(re.findall(r"\$(\w+)", query["model"]["expression"])) or {query["model"]["expression"]}
                if not used <= asked:
                    raise Refused(400, f"an expression uses {used - asked}, which no query before it is")
            elif query["datasourceUid"] not in self.datasources:
                raise Refused(400, "data source not found")
            asked.add(query["refId"])
        if rule["condition"] not in asked:
            raise Refused(400, "the condition is none of the queries")
        for text in rule["annotations"].values():
            if "| query" in text or re.search(r"\$value\b", text) or text.count("{{") != text.count("}}"):
                raise Refused(400, f"invalid template: {text}")
        shown_by = rule["annotations"].get("__dashboardUid__", "")
        if bool(shown_by) != bool(rule["annotations"].get("__panelId__")):
            raise Refused(400, "both annotations __dashboardUid__ and __panelId__ must be specified")
        if shown_by and shown_by not in self.dashboards:
            raise Refused(400, "no such dashboard")


def _shape(body: Any, **kinds: type) -> None:
    for name, kind in kinds.items():
        if not isinstance(body, dict) or not isinstance(body.get(name), kind):
            raise Refused(400, f"{name} is missing or no {kind.__name__}")


def _identifier(uid: str) -> None:
    if not _UID.fullmatch(uid):
        raise Refused(400, "uid contains illegal characters or is longer than 40")


def _address(url: str) -> None:
    if not re.match(r"https?://[\w.-]+", url):
        raise Refused(400, "validation error, invalid URL")


class _Handler(QuietHandler):
    server: _Server

    def _do(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        text = self.rfile.read(length)
        grafana = self.server.grafana
        if not grafana.is_grafana:
            return self.answer(200, "text/html", b"<html>a router's page</html>")
        try:
            headers = {name.lower(): value for name, value in self.headers.items()}
            answer = grafana.answer(self.command, self.path, json.loads(text) if text else None, headers)
        except Refused as refused:
            return self.answer(refused.status, "application/json", json.dumps({"message": refused.message}).encode())
        return self.answer(200, "application/json", json.dumps(answer).encode())

    do_GET = do_POST = do_PUT = _do


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    grafana: FakeGrafana


@contextmanager
def serving(grafana: FakeGrafana) -> Iterator[str]:
    """Serve it; yields its address."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.grafana = grafana
    with running(server):
        yield f"http://127.0.0.1:{server.server_port}{grafana.prefix}"
