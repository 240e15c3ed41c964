"""What the kubelet calls the pod and the container of a process: the names of its folders of logs.

A control group tells the pod's identifier and the container's, and no names.  The kubelet keeps names beside both, for
whatever collects logs: a folder `NAMESPACE_POD_UID` for each pod, in it a folder for each of its containers, and a link
`POD_NAMESPACE_CONTAINER-ID.log` for each container that it has started.  They are there with every container runtime
and need no protocol and no right but to list folders, where the kubelet's socket for device plugins names no identifier
and its checkpoint no pod.  Only the kubelet writes there, and names have no `_`: the API server takes DNS names alone.

A link's name is cut to 255 characters, so a container's name is tried for, not parsed.  A pod that the kubelet knows
under no name here, because its folders lie elsewhere (`podLogsDir`) or were not mounted into the agent's own container,
has none.

Sources: Kubernetes' pkg/kubelet/kuberuntime/helpers.go (`BuildPodLogsDirectory`, `BuildContainerLogsDirectory`) and
legacy.go (`legacyLogSymlink`), pkg/kubelet/apis/podresources.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

FOLDER: Final = Path("/var/log/pods")
"""Where the kubelet has them, unless it is told otherwise."""
_MOST_PODS: Final = 20_000
"""Folders looked at; a kubelet runs 110 pods by default, and those that have gone leave theirs for a while."""
_MOST_CONTAINERS: Final = 256
_LONGEST_LINK: Final = 255
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class PodNames:
    """What people call a container and its pod."""

    namespace: str
    pod: str
    container: str
    """Empty: the pod has several, and it is not known which one this is."""


def find_pod_names(folder: Path, pod_uid: str, container_id: str) -> PodNames | None:
    """The names of a pod and a container, from the kubelet's `folder` of logs; None: it does not know the pod.

    `pod_uid` as the API server writes it, with dashes; `container_id` in full, empty: not known.
    """
    try:
        with os.scandir(folder) as entries:
            found = next((one.name for one in islice(entries, _MOST_PODS) if one.name.endswith(f"_{pod_uid}")), "")
    except OSError:
        return None
    names = found.split("_")
    if len(names) != 3 or not all(map(_NAME.fullmatch, names[:2])):
        return None
    return PodNames(names[0], names[1], _find_container(folder, found, container_id))


def _find_container(folder: Path, of_pod: str, container_id: str) -> str:
    try:
        with os.scandir(folder / of_pod) as entries:
            names = sorted(one.name for one in islice(entries, _MOST_CONTAINERS) if _NAME.fullmatch(one.name))
    except OSError:
        return ""
    namespace, pod, _ = of_pod.split("_")
    # Not followed: where a link leads is for who collects logs.
    links = folder.parent / "containers"
    started = [
        name
        for name in names
        if container_id
        and os.path.lexists(links / (f"{pod}_{namespace}_{name}-{container_id}"[: _LONGEST_LINK - 4] + ".log"))
    ]
    # Two names whose links are cut alike cannot be told apart.
    (only,) = started if len(started) == 1 else names if len(names) == 1 else ("",)
    return only
