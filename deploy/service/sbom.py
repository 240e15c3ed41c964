"""The bill of materials of the service's environment, as CycloneDX JSON.

It lists every package with the hash of the wheel that was installed, and of railscope's own the files that are machine
code: the BPF objects and the library that reads counters.  Why by hand: the tools that write one for Python know the
packages of an environment but neither which files they came from nor what a package holds, and bring twenty packages
of their own to list seven.

Source: the CycloneDX 1.5 specification (ECMA-424's predecessor), core metadata of Python packages 2.4.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import uuid
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, PackageMetadata, distributions
from pathlib import Path
from typing import Any, Final

OWN: Final = "railscope"
COMPILED: Final = ("bpf/*.bpf.o", "native/*.so")
"""Files of ours that are machine code, below railscope/probes."""
BPF_LICENCE: Final = "GPL-2.0-only OR BSD-2-Clause"
OWN_LICENCE: Final = "Apache-2.0"
_CLASSIFIER: Final = "License :: OSI Approved :: "


def write(path: Path, site_packages: Path, wheels: Path) -> None:
    """Write the bill of what is installed, with the hashes of the wheels that it came from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(bill(site_packages, wheels), indent=2, sort_keys=True) + "\n")


def bill(site_packages: Path, wheels: Path) -> dict[str, Any]:
    """The whole document; equal for equal wheels.

    Raises:
        ValueError: a package came from no wheel there.
    """
    hashes = {_wheel_name(wheel): _hash(wheel) for wheel in wheels.glob("*.whl")}
    packages = sorted(distributions(path=[str(site_packages)]), key=lambda one: _normal(one.metadata["Name"]))
    components = [_package(one, hashes) for one in packages]
    (own,) = (one for one in components if one["name"] == OWN)
    own["components"] = list(_compiled(site_packages / OWN / "probes"))
    others = [one for one in components if one is not own]
    content = json.dumps(components, sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, content)}",
        "version": 1,
        "metadata": {
            "component": own,
            "properties": [{"name": "railscope:python", "value": platform.python_version()}],
        },
        "components": others,
        "dependencies": [
            {"ref": own["bom-ref"], "dependsOn": [one["bom-ref"] for one in others]},
            *({"ref": one["bom-ref"]} for one in others),
        ],
    }


def _package(package: Distribution, hashes: Mapping[str, str]) -> dict[str, Any]:
    name, version = _normal(package.metadata["Name"]), package.version
    wheel = hashes.get(f"{name}-{version}")
    if wheel is None:
        raise ValueError(f"{name} {version} came from no wheel")
    reference = f"pkg:pypi/{name}@{version}"
    return {
        "type": "application" if name == OWN else "library",
        "bom-ref": reference,
        "name": name,
        "version": version,
        "purl": reference,
        "hashes": [{"alg": "SHA-256", "content": wheel}],
        "licenses": [_licence(OWN_LICENCE)] if name == OWN else _licences(package.metadata),
    }


def _licences(metadata: PackageMetadata) -> list[dict[str, Any]]:
    """As the package says them: an SPDX expression where it has one, else a name."""
    if "License-Expression" in metadata:
        return [_licence(metadata["License-Expression"])]
    classified = [
        one.removeprefix(_CLASSIFIER) for one in metadata.get_all("Classifier") or () if one.startswith(_CLASSIFIER)
    ]
    first_line = metadata["License"].strip().partition("\n")[0] if "License" in metadata else ""
    names: Iterable[str] = classified or [first_line or "unknown"]
    return [{"license": {"name": name}} for name in names]


def _licence(expression: str) -> dict[str, Any]:
    return {"expression": expression}


def _compiled(probes: Path) -> Iterable[dict[str, Any]]:
    for pattern in COMPILED:
        for file in sorted(probes.glob(pattern)):
            place = f"{OWN}/probes/{file.relative_to(probes)}"
            yield {
                "type": "file",
                "bom-ref": place,
                "name": place,
                "hashes": [{"alg": "SHA-256", "content": _hash(file)}],
                "licenses": [_licence(BPF_LICENCE if file.suffix == ".o" else OWN_LICENCE)],
            }


def _wheel_name(wheel: Path) -> str:
    name, version = wheel.name.split("-")[:2]
    return f"{_normal(name)}-{version}"


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _normal(name: str) -> str:
    """See PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()
