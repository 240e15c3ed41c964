"""The Helm chart: what Helm's own engine makes of it, checked against Kubernetes' schemas, without a cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.nccl.library import REPOSITORY

helm = pytest.importorskip("helm_python", reason="Helm's library is missing: run 'make test-packages'")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="schemas are missing: run 'make test-packages'")

from tests.packages.manifests import CHART, MANIFEST, NAME, objects, plain, render  # noqa: E402

ALL: Final[dict[str, Any]] = {
    "image": {"repository": "registry.example/railscope", "digest": "sha256:" + "0" * 64},
    "config": {
        "series": {"profile": "lean"},
        "node": {"cluster": "a"},
        "web": {"telemetry_path": "/m"},
        "limits": {"series": 60_000},
    },
    "webConfigSecret": "railscope-web",
    "olderKernels": True,
    "networkModules": True,
    "extraCapabilities": ["CHECKPOINT_RESTORE"],
    "seLinuxOptions": {"type": "spc_t"},
    "nvidia": {"runtimeClassName": "nvidia"},
    "hostPaths": {"state": "", "recordings": ""},
    "imagePullSecrets": [{"name": "registry"}],
    "priorityClassName": "system-node-critical",
    "affinity": {"nodeAffinity": {}},
    "podLabels": {"team": "fabric"},
    "podAnnotations": {"note": "x"},
    "commonLabels": {"part-of": "telemetry"},
    "extraEnv": [{"name": "RAILSCOPE_LOGGING_LEVEL", "value": "debug"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "podMonitor": {
        "enabled": True,
        "profile": "lean",
        "labels": {"release": "p"},
        "relabelings": [{"targetLabel": "cluster", "replacement": "a"}],
        "endpoint": {"scheme": "https"},
    },
    "prometheusRule": {
        "enabled": True,
        "joins": True,
        "labels": {"release": "p"},
        "runbooks": "https://wiki.example/railscope/",
        "interval": "",
    },
    "dashboards": {"enabled": True, "annotations": {"folder": "railscope"}, "namespace": "grafana"},
    "networkPolicy": {"enabled": True},
}
KUBERNETES: Final = ("1.25", "1.30", "1.37")
"""The oldest that the chart takes, the first with a field for AppArmor, and the newest that schemas are there for."""
OPERATORS: Final = ("PodMonitor", "PrometheusRule")
"""Kinds that Kubernetes itself does not know."""


HOW_TO: Final = REPOSITORY / "docs/how-to/kubernetes.md"
MONITORED: Final[dict[str, Any]] = {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}}


def only(kind: str, values: dict[str, Any] | None = None) -> dict[str, Any]:
    """The chart's one object of a kind."""
    (found,) = (one for one in objects(values) if one["kind"] == kind)
    return found


def agent(values: dict[str, Any] | None = None) -> dict[str, Any]:
    (container,) = only("DaemonSet", values)["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_helm_has_nothing_to_say() -> None:
    from helm_python.chart import lint

    for values in ({}, ALL):
        report = lint(CHART, values, strict=True)
        assert [one for one in report["messages"] if one["severity"] > 1] == report["errors"] == []


def test_versions_are_the_projects() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("values", [{}, ALL], ids=["defaults", "everything"])
def test_manifests_are_valid_by_kubernetes_schemas(values: dict[str, Any], version: str) -> None:
    checked = [one for one in objects(values) if one["kind"] not in OPERATORS]
    assert len(checked) >= 3
    for one in checked:
        if version < "1.30" and one["kind"] == "DaemonSet":  # rendered for the newest
            for container in one["spec"]["template"]["spec"]["containers"]:
                del container["securityContext"]["appArmorProfile"]
        kubernetes_validate.validate(one, version, strict=True)


def test_plain_manifests_are_fresh_and_kustomize_takes_them() -> None:
    assert MANIFEST.read_text() == plain(), "run: .venv/bin/python -m tests.packages.manifests"
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is missing: put it into PATH and run 'make test-packages' again")
    folder = REPOSITORY / "deploy/kustomize"
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    assert {one["kind"] for one in made} == {"Namespace", "ServiceAccount", "ConfigMap", "DaemonSet"}
    assert "image: registry.example/railscope:" in done.stdout


def test_kustomize_makes_the_monitoring_of_the_chart() -> None:
    folder = REPOSITORY / "deploy/kustomize"
    options = "--label release=p --runbooks https://wiki.example/railscope --profile lean --joins".split()
    subprocess.run([folder / "lay-monitoring", *options], check=True, capture_output=True, timeout=60)
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is missing: put it into PATH and run 'make test-packages' again")
    done = subprocess.run(
        ["kubectl", "kustomize", folder / "monitoring"], capture_output=True, text=True, check=True, timeout=60
    )
    made = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout)}
    by_chart = objects(
        {
            "podMonitor": {"enabled": True, "profile": "lean", "labels": {"release": "p"}},
            "prometheusRule": ALL["prometheusRule"] | {"interval": "15s"},
            "dashboards": {"enabled": True},
        }
    )
    wanted = {
        (one["kind"], one["metadata"]["name"]): one
        for one in by_chart
        if one["kind"] in OPERATORS or "grafana_dashboard" in one["metadata"].get("labels", {})
    }
    assert made.keys() == wanted.keys()
    for name, one in wanted.items():
        # The chart names its namespace; there a monitor sees its own alone anyway.
        one.get("spec", {}).pop("namespaceSelector", None)
        assert made[name].get("spec") == one.get("spec"), name
        assert made[name]["metadata"]["labels"]["release"] == "p"
        assert {key: text.strip() for key, text in made[name].get("data", {}).items()} == {
            key: text.strip() for key, text in one.get("data", {}).items()
        }


def test_labels_of_the_monitoring_are_texts_whatever_they_look_like() -> None:
    folder = REPOSITORY / "deploy/kustomize"
    options = "--label on=off --label 1=2 --label null=~".replace("~", "yes").split()
    subprocess.run([folder / "lay-monitoring", *options], check=True, capture_output=True, timeout=60)
    made = yaml.safe_load((folder / "monitoring/kustomization.yaml").read_text())
    assert made["labels"] == [{"pairs": {"on": "off", "1": "2", "null": "yes"}}]


def test_pods_that_set_the_nodes_condition_have_the_right_to_do_that_and_no_other() -> None:
    values = {"nodeCondition": {"enabled": True, "confidence": "medium"}}
    assert not any("node-condition" in one["metadata"]["name"] for one in objects(ALL))
    made = {one["kind"]: one for one in objects(values) if "node-condition" in one["metadata"]["name"]}
    for version in KUBERNETES:
        for one in made.values():
            kubernetes_validate.validate(one, version, strict=True)
    assert made["ClusterRole"]["rules"] == [{"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]}]
    spec = made["DaemonSet"]["spec"]["template"]["spec"]
    assert "hostPID" not in spec
    (refresh,), (verdicts,) = spec["initContainers"], spec["containers"]
    for container in (refresh, verdicts):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {one["name"]: one.get("value") for one in container["env"]}["RAILSCOPE_LEAST_CONFIDENCE"] == "medium"
        assert all(mount["readOnly"] for mount in container["volumeMounts"])
    assert "--confidence=medium" in verdicts["args"]
    # Neither the service of the agents nor its monitor takes these pods for agents.
    assert made["DaemonSet"]["spec"]["selector"] != only("DaemonSet")["spec"]["selector"]
    action = made["ConfigMap"]["data"]["set-kubernetes-condition"]
    assert action.strip() == (REPOSITORY / "deploy/actions/set-kubernetes-condition").read_text().strip()
    with pytest.raises(helm.HelmError, match=r"nodeCondition needs hostPaths\.state"):
        render(values | {"hostPaths": {"state": ""}})


def test_each_capability_is_one_of_the_services_and_has_its_reason_beside_it() -> None:
    documented = (REPOSITORY / "deploy/README.md").read_text()
    lines = [line.strip() for line in render(ALL | {"extraCapabilities": []})["daemonset"].splitlines()]
    begin = lines.index("add:") + 1
    end = lines.index("volumeMounts:")
    reasons, names = lines[begin:end:2], lines[begin + 1 : end : 2]
    assert names == ["- BPF", "- PERFMON", "- DAC_READ_SEARCH", "- SYS_PTRACE", "- SYS_ADMIN", "- NET_ADMIN"]
    assert all(reason.startswith("# ") for reason in reasons)
    assert all(f"CAP_{name.removeprefix('- ')}" in documented for name in names)
    context = agent()["securityContext"]
    assert context["capabilities"] == {"drop": ["ALL"], "add": ["BPF", "PERFMON", "DAC_READ_SEARCH", "SYS_PTRACE"]}
    assert context["readOnlyRootFilesystem"]
    assert not context["allowPrivilegeEscalation"]


def test_the_agents_variables_and_configuration_are_those_it_takes(tmp_path: Path) -> None:
    for values in ({}, ALL):
        (tmp_path / "railscope.yml").write_text(only("ConfigMap", values | {"dashboards": {}})["data"]["railscope.yml"])
        environment = {one["name"]: one.get("value", "node-1") for one in agent(values)["env"]}
        environment = {name: value for name, value in environment.items() if name.startswith("RAILSCOPE_")}
        command = [sys.executable, "-m", "railscope.agent.cli.main", "config", "show", str(tmp_path / "railscope.yml")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        for expected in ("node-1", "/run/railscope", ":9779"):
            assert expected in done.stdout


@pytest.mark.parametrize(("profile", "name"), [("Unconfined", "unconfined"), ("RuntimeDefault", "runtime/default")])
def test_before_kubernetes_1_30_an_annotation_names_the_profile_as_these_versions_do(
    profile: str, name: str, tmp_path: Path
) -> None:
    """Helm's library renders for the newest Kubernetes alone: here the template takes that for an older one."""
    shutil.copytree(CHART, tmp_path / "chart")
    template = tmp_path / "chart/templates/daemonset.yaml"
    text = template.read_text()
    assert '"<1.30.0-0"' in text
    template.write_text(text.replace('"<1.30.0-0"', '">=1.30.0-0"'))
    made = yaml.safe_load(render({"appArmorProfile": profile}, tmp_path / "chart")["daemonset"])
    annotations = made["spec"]["template"]["metadata"]["annotations"]
    assert annotations["container.apparmor.security.beta.kubernetes.io/agent"] == name


def test_gpus_are_the_runtimes_only_where_it_is_named() -> None:
    assert "runtimeClassName" not in only("DaemonSet")["spec"]["template"]["spec"]
    assert not [one for one in agent()["env"] if one["name"].startswith("NVIDIA_")]
    assert only("DaemonSet", ALL)["spec"]["template"]["spec"]["runtimeClassName"] == "nvidia"
    assert {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"} in agent(ALL)["env"]


def test_the_pod_monitor_honours_the_ranks_labels_and_names_hosts_by_their_nodes() -> None:
    monitor = only("PodMonitor", ALL)
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True
    assert endpoint["params"] == {"profile": ["lean"]}
    assert endpoint["scheme"] == "https"
    assert [one["targetLabel"] for one in endpoint["relabelings"]] == ["instance", "cluster"]
    assert endpoint["path"] == "/m"
    assert (monitor["spec"]["sampleLimit"], only("PodMonitor", MONITORED)["spec"]["sampleLimit"]) == (75_000, 25_000)
    assert endpoint["port"] in {port["name"] for port in agent(ALL)["ports"]}
    assert monitor["spec"]["selector"]["matchLabels"] == only("DaemonSet", ALL)["spec"]["selector"]["matchLabels"]


def test_rules_and_dashboards_are_what_the_project_ships() -> None:
    rules = {one["metadata"]["name"]: one["spec"] for one in objects(ALL) if one["kind"] == "PrometheusRule"}
    for name in ("recording", "alerts", "joins"):
        text = (REPOSITORY / f"dashboards/rules/railscope-{name}.yml").read_text()
        ours = text.replace("https://railscope.example/runbooks/", "https://wiki.example/railscope/")
        assert rules[f"railscope-{name}"] == yaml.safe_load(ours)
        assert (ours != text) == (name == "alerts")
    groups = [group for one in objects(MONITORED) if one["kind"] == "PrometheusRule" for group in one["spec"]["groups"]]
    assert {group["interval"] for group in groups} == {"15s"}
    boards = [one for one in objects(ALL) if one["kind"] == "ConfigMap" and "railscope.yml" not in one["data"]]
    texts = {name: text for one in boards for name, text in one["data"].items()}
    shipped_boards = {file.name: file.read_text() for file in (REPOSITORY / "dashboards/json").glob("*.json")}
    assert {name: json.loads(text) for name, text in texts.items()} == {
        name: json.loads(text) for name, text in shipped_boards.items()
    }
    assert all(one["metadata"]["labels"]["grafana_dashboard"] == "1" for one in boards)
    assert {one["metadata"]["namespace"] for one in boards} == {"grafana"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prot": 9780}, "prot"),
        ({"port": 0}, "port"),
        ({"extraCapabilities": ["CAP_SYSLOG"]}, "extraCapabilities"),
        ({"config": {"web": {"listen_address": ":1"}}}, "config"),
        ({"config": {"weB": {}}}, "weB"),
        ({"config": {"series": {"profil": "lean"}}}, "profil"),
        ({"config": {"rails": {"devices": "mlx5_*"}}}, "devices"),
        ({"config": {"probes": {"scan_interval": 3}}}, "scan_interval"),
        # What YAML makes of an unquoted `off`.
        ({"config": {"probes": {"enqueue_time": False}}}, "enqueue_time"),
        ({"config": {"node": {"name": "gpu-1"}}}, "name"),
        ({"hostPaths": {"state": "run"}}, "hostPaths"),
        ({"podMonitor": {"profile": "thin"}}, "profile"),
        # The chart has written these keys already.
        ({"podMonitor": {"endpoint": {"relabelings": []}}}, "relabelings"),
        ({"prometheusRule": {"runbooks": "wiki.example"}}, "runbooks"),
    ],
)
def test_wrong_values_are_refused_by_their_names(values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError) as refused:
        render(values)
    assert re.search(rf"\b{said}\b", str(refused.value))


@pytest.mark.parametrize(
    ("value", "lost"), [("prometheusRule", "railscope-recording.yml"), ("dashboards", "dashboards")]
)
def test_a_chart_whose_links_were_left_behind_is_refused_and_not_rendered_without_them(
    value: str, lost: str, tmp_path: Path
) -> None:
    shutil.copytree(CHART, tmp_path / "chart", ignore=shutil.ignore_patterns("files"))
    with pytest.raises(helm.HelmError, match=lost):
        render({value: {"enabled": True}}, tmp_path / "chart")


def test_an_agent_that_pushes_may_ask_the_network() -> None:
    policy = {"networkPolicy": {"enabled": True}}
    assert only("NetworkPolicy", policy)["spec"]["egress"] == []
    pushes = only("NetworkPolicy", policy | {"config": {"otlp": {"endpoint": "http://collector:4318"}}})["spec"]
    assert pushes["policyTypes"] == ["Ingress"]
    assert "egress" not in pushes


@pytest.mark.parametrize(
    ("values", "said", "unsaid"),
    [
        ({}, ("No PodMonitor", "No NVML", "no password"), ("no pod starts", "release", "railscope.example")),
        (
            MONITORED,
            ("railscope.example", "`release` (podMonitor.labels)", "(prometheusRule.labels)"),
            ("No PodMonitor",),
        ),
        ({"nvidia": {"runtimeClassName": "nvidia"}}, ('without the runtime "nvidia" no pod starts',), ("No NVML",)),
        (
            {"nvidia": {"runtimeClassName": "nvidia"}, "nodeSelector": {"nvidia.com/gpu.present": "true"}},
            (),
            ("No NVML", "no pod starts"),
        ),
        (ALL, (), ("No PodMonitor", "No NVML", "no pod starts", "`release`", "railscope.example", "no password")),
    ],
)
def test_notes_say_what_is_missing(values: dict[str, Any], said: tuple[str, ...], unsaid: tuple[str, ...]) -> None:
    from helm_python.chart import Chart

    rendered = Chart.load(CHART).render(values, name=NAME, namespace=NAME)
    (notes,) = (text for path, text in rendered.items() if path.endswith("NOTES.txt"))
    assert [one for one in said if one not in notes] == [one for one in unsaid if one in notes] == []


def shown(what: str) -> str:
    """The YAML that the how-to shows after a mark."""
    (text,) = re.findall(rf"^<!-- {what}: .*? -->\n```yaml\n(.*?)^```$", HOW_TO.read_text(), re.MULTILINE | re.DOTALL)
    return str(text)


def test_values_of_the_how_to_make_what_it_says() -> None:
    values = yaml.safe_load(shown("values"))
    pod = only("DaemonSet", values)["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"].startswith("registry.example/railscope:")
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux", "nvidia.com/gpu.deploy.client": "true"}
    assert {"key": "dedicated", "operator": "Equal", "value": "training"} in pod["tolerations"]
    assert only("PodMonitor", values)["spec"]["podMetricsEndpoints"][0]["params"] == {"profile": ["lean"]}
    taken = [one for one in objects(values) if one["metadata"]["labels"].get("release") == "kube-prometheus-stack"]
    assert sorted(one["kind"] for one in taken) == ["PodMonitor", *["PrometheusRule"] * 3]
    assert only("NetworkPolicy", values)["spec"]["ingress"][0]["from"]


def test_the_overlay_of_the_how_to_makes_what_it_says(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is missing: put it into PATH and run 'make test-packages' again")
    checkout = tmp_path / "railscope/deploy/kustomize"
    shutil.copytree(REPOSITORY / "deploy/kustomize", checkout, ignore=shutil.ignore_patterns("monitoring"))
    shutil.copytree(REPOSITORY / "dashboards", tmp_path / "railscope/dashboards")
    line = next(line for line in HOW_TO.read_text().splitlines() if line.startswith("deploy/kustomize/lay-monitoring"))
    subprocess.run(line.split(), cwd=tmp_path / "railscope", check=True, capture_output=True, timeout=60)
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay/kustomization.yaml").write_text(shown("overlay"))
    command = ["kubectl", "kustomize", str(tmp_path / "overlay")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    made = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout)}
    daemons = made["DaemonSet", "railscope"]
    kubernetes_validate.validate(daemons, KUBERNETES[-1], strict=True)
    pod = daemons["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"].startswith("registry.mine/railscope:")
    assert {"name": "RAILSCOPE_SERIES_PROFILE", "value": "lean"} in container["env"]
    assert (pod["runtimeClassName"], pod["nodeSelector"]["nvidia.com/gpu.deploy.client"]) == ("nvidia", "true")
    # Nothing that the chart gives with a runtime class is left out.
    by_chart = agent({"nvidia": {"runtimeClassName": "nvidia"}})["env"]
    assert [one for one in by_chart if one not in container["env"]] == []
    assert made["PodMonitor", "railscope"]["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    assert ("PrometheusRule", "railscope-joins") in made
