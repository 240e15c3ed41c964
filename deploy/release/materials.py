"""The bill of materials of a release, as CycloneDX JSON: its files, and what they bring from elsewhere.

Of the images these are Debian's packages, as they lie in /var/lib/dpkg/status.d of each; of the Debian packages,
NVIDIA's bindings; of the wheels, which bring nothing, the packages that deploy/service/requirements.txt pins for who
installs them.  What a wheel holds that is machine code, the service's own bill lists (deploy/service/sbom.py).

Source: the CycloneDX 1.5 specification; purl-spec (types deb, oci and pypi).
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
import uuid
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any, Final

_PINNED: Final = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)
_STATUS: Final = "var/lib/dpkg/status.d/"
_DEBIAN: Final = "debian"
_LICENCE: Final = "Apache-2.0 AND (GPL-2.0-only OR BSD-2-Clause)"


def write(path: Path, source: Path, output: Path, version: str) -> None:
    """Write the bill of the files in `output`; equal for equal files."""
    path.write_text(json.dumps(bill(source, output, version), indent=2, sort_keys=True) + "\n")


def bill(source: Path, output: Path, version: str) -> dict[str, Any]:
    """The whole document.

    Args:
        source: the checkout that the release is built of.
        output: the release's files.
    """
    pinned = dict(_PINNED.findall((source / "deploy/service/requirements.txt").read_text()))
    components: dict[str, dict[str, Any]] = {}
    needs: dict[str, list[str]] = {}
    for file in sorted(output.iterdir()):
        reference = f"file:{file.name}"
        parts = list(_parts(file, pinned))
        components[reference] = {
            "type": "container" if file.name.endswith(".oci.tar") else "file",
            "bom-ref": reference,
            "name": file.name,
            "version": version,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()}],
            "licenses": [{"expression": _LICENCE}],
        }
        components |= {part["bom-ref"]: part for part in parts}
        needs[reference] = sorted(part["bom-ref"] for part in parts)
    listed = [components[reference] for reference in sorted(components)]
    own = f"pkg:generic/railscope@{version}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(listed, sort_keys=True))}",
        "version": 1,
        "metadata": {"component": {"type": "application", "bom-ref": own, "name": "railscope", "version": version}},
        "components": listed,
        "dependencies": [
            {"ref": own, "dependsOn": sorted(needs)},
            *({"ref": reference, "dependsOn": needs[reference]} for reference in sorted(needs)),
        ],
    }


def _parts(file: Path, pinned: dict[str, str]) -> Iterator[dict[str, Any]]:
    if file.name.endswith(".whl"):
        yield from (_library("pypi", name, version) for name, version in pinned.items())
    elif file.suffix == ".deb":
        yield _library("pypi", "nvidia-ml-py", pinned["nvidia-ml-py"])
    elif file.name.endswith(".oci.tar"):
        yield _library("pypi", "nvidia-ml-py", pinned["nvidia-ml-py"])
        yield from (
            _library(f"deb/{_DEBIAN}", field["Package"], field["Version"], f"?arch={field['Architecture']}")
            for field in packages_of(file)
            if field["Package"] != "railscope"
        )


def packages_of(image: Path) -> list[dict[str, str]]:
    """The control fields of each Debian package in an OCI archive, sorted by name."""
    found = {}
    for name, content in files_of(image):
        if name.removeprefix("./").startswith(_STATUS):
            fields = Parser().parsestr(content.decode())
            found[fields["Package"]] = dict(fields.items())
    return [found[name] for name in sorted(found)]


def files_of(image: Path) -> Iterator[tuple[str, bytes]]:
    """Path and content of each regular file in an OCI archive's layers, the lowest layer first."""
    with tarfile.open(image) as archive:

        def blob(digest: str) -> Any:
            return archive.extractfile(f"blobs/{digest.replace(':', '/')}")

        index = json.load(archive.extractfile("index.json"))  # type: ignore[arg-type]
        manifest = json.load(blob(index["manifests"][0]["digest"]))
        for layer in manifest["layers"]:
            with tarfile.open(fileobj=blob(layer["digest"])) as files:
                for member in files:
                    if member.isfile():
                        yield member.name, files.extractfile(member).read()  # type: ignore[union-attr]


def _library(kind: str, name: str, version: str, qualifier: str = "") -> dict[str, Any]:
    reference = f"pkg:{kind}/{name}@{version}{qualifier}"
    return {"type": "library", "bom-ref": reference, "purl": reference, "name": name, "version": version}
