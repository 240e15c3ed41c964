"""Lay the kit (kit.py) out on a machine that has nothing but Python.

    python3 tests/gpu/unpack.py KIT FOLDER

Checks every file against the manifest, and that the kit's wheel was built from the sources beside it.  FOLDER then has
`site/` for PYTHONPATH, `lib/` for LD_LIBRARY_PATH of the agent, `bin/` with `ip` and `tc` for PATH, and `stamps/`.
Standard library only: nothing else is there yet.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

MANIFEST = "manifest.json"
_TESTS = "tests"
_SOURCES = frozenset({".py", ".c", ".h", ".json", ".yml", ".md"})
_TOOLS = ("ip", "tc")
_LOADER = "/lib64/ld-linux-x86-64.so.2"


class UnpackError(RuntimeError):
    """The kit cannot be used; one line says what to do."""


def product_folders(repository: Path) -> list[str]:
    """The folders that the project's wheel is built from, as setup.py finds them."""
    return sorted({file.parent.name for file in repository.glob("*/__init__.py")} - {_TESTS})


def source_digest(repository: Path) -> str:
    """A digest of the names and contents of the product's sources."""
    digest = hashlib.sha256()
    for top in product_folders(repository):
        for path in sorted((repository / top).rglob("*")):
            if path.suffix in _SOURCES and path.is_file():
                digest.update(f"{path.relative_to(repository)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def unpack(kit: Path, folder: Path, repository: Path) -> str:
    """Lay the kit out in `folder`; returns the revision that it was made of.

    Raises:
        UnpackError: a file is missing, damaged, or older than the sources.
    """
    try:
        manifest = json.loads((kit / MANIFEST).read_text())
    except FileNotFoundError:
        raise UnpackError(f"{kit} is missing: run 'make gpu-kit' where the registries are, and carry it here") from None
    for name, wanted in manifest["files"].items():
        path = kit / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
            raise UnpackError(f"{path} is missing or damaged: run 'make gpu-kit' and carry it here again")
    if manifest["sources"] != source_digest(repository):
        raise UnpackError("the kit was made of other sources than those beside it: run 'make gpu-kit' again")
    site, library, programs = folder / "site", folder / "lib", folder / "bin"
    for made in (site, library, programs):
        made.mkdir(parents=True)
    for wheel in sorted(kit.glob("wheels/*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    for package in sorted(kit.glob("debs/*.deb")):
        _unpack_deb(package, library)
    for tool in _TOOLS:
        # By way of the loader, so that what `ip netns exec` runs does not inherit these libraries.
        (programs / tool).write_text(f'#!/bin/sh\nexec {_LOADER} --library-path {library} {library / tool} "$@"\n')
        (programs / tool).chmod(0o755)
    shutil.copytree(kit / "stamps", folder / "stamps")
    revision: str = manifest["revision"]
    return revision


def _unpack_deb(package: Path, folder: Path) -> None:
    """Shared libraries and tools of a Debian package, flat into `folder` (deb(5): an ar archive of tar archives)."""
    content = package.read_bytes()
    at = 8  # behind "!<arch>\n"
    while at < len(content):
        name, size = content[at : at + 16].rstrip(b" /").decode(), int(content[at + 48 : at + 58])
        at += 60
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(content[at : at + size])) as archive:
                for member in archive:
                    _take(archive, member, folder)
        at += size + size % 2


def _take(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    name = Path(member.name).name
    tool = name in _TOOLS and Path(member.name).parent.name in ("bin", "sbin")
    if not tool and ".so" not in name:
        return
    target = folder / name
    if member.issym() and ".so" in name:
        target.unlink(missing_ok=True)
        target.symlink_to(Path(member.linkname).name)
    elif member.isfile() and (source := archive.extractfile(member)) is not None:
        target.write_bytes(source.read())
        target.chmod(0o755)


if __name__ == "__main__":
    try:
        print(unpack(Path(sys.argv[1]), Path(sys.argv[2]), Path(__file__).resolve().parents[2]))
    except (UnpackError, OSError) as error:
        sys.exit(f"tests/gpu/run: {error}")
