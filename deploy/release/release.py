"""Builds all of a release into one folder: `make release`.  It comes out the same for a commit.

    python3 deploy/release/release.py OUTPUT [--only PART…] [--snapshot]

Parts: Debian and RPM packages, wheels and a source distribution, the images, the Helm chart and the manifests.  Beside
them come a bill of materials (CycloneDX), the changelog's section, and SHA256SUMS over all.  Everything is built of a
copy of the files that git knows at this commit, in a folder of another name each time: what depended on it would
show.  Times are the commit's.  The standard library does, but for pip, which fetches what the service's build-
requirements.txt pins.

Sources: reproducible-builds.org (SOURCE_DATE_EPOCH), PEP 517 (the build backend's hooks).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parent))

import materials

CHECKOUT: Final = Path(__file__).resolve().parents[2]
ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
COMPILERS: Final = {machine: f"{machine}-linux-gnu-gcc" for machine in ARCHITECTURES}
PARTS: Final = ("debs", "rpms", "wheels", "images", "chart")
SUMS: Final = "SHA256SUMS"
LONGEST_SECONDS: Final = 1800


class NoRelease(Exception):
    """The release cannot be built; the message says in a line what to do."""


def build(output: Path, parts: Sequence[str] = PARTS, *, snapshot: bool = False) -> list[Path]:
    """Build the parts, and what lies beside them; returns the files.

    `snapshot`: of a version whose section in the changelog is not written yet, and of changed files.

    Raises:
        NoRelease: files are not committed, the changelog has no such version, or a part cannot be built.
    """
    version = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
    changed = git("status", "--porcelain", "--untracked-files=no").splitlines()
    if changed and not snapshot:
        raise NoRelease(f"commit first: {changed[0].strip()} is changed")
    notes = changelog_section((CHECKOUT / "CHANGELOG.md").read_text(), version, snapshot=snapshot)
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct").strip() or "0"
    output.mkdir(parents=True, exist_ok=True)
    if left := sorted(output.iterdir()):
        raise NoRelease(f"{output} holds {left[0].name}: remove what is in it, or name an empty folder")
    os.umask(0o022)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch, "LC_ALL": "C.UTF-8", "TZ": "UTC"}
    with tempfile.TemporaryDirectory(prefix="railscope-release-") as scratch:
        source = Path(scratch, "source")
        lay_source(source, environment)
        if "debs" in parts:
            build_debs(source, output, environment)
        if "rpms" in parts:
            build_rpms(source, output, environment)
        if "wheels" in parts:
            build_wheels(source, output, Path(scratch, "tool"), environment)
        if "images" in parts:
            build_images(source, output, environment)
        if "chart" in parts:
            pack(source / "deploy/helm/railscope", output / f"railscope-chart-{version}.tgz", "railscope", int(epoch))
            run([source / "deploy/kustomize/lay-monitoring"], source, environment)
            pack(source / "deploy/kustomize", output / f"railscope-kustomize-{version}.tgz", "railscope", int(epoch))
        materials.write(output / f"railscope-{version}.cdx.json", source, output, version)
    (output / f"CHANGES-{version}.md").write_text(notes)
    made = sorted(output.iterdir())
    (output / SUMS).write_text("".join(f"{sha256(file)}  {file.name}\n" for file in made))
    return [*made, output / SUMS]


def lay_source(folder: Path, environment: Mapping[str, str]) -> None:
    """The files that git knows, as they are here, and what is compiled of them, anew."""
    names = git("ls-files", "-z").split("\0")
    for name in filter(None, names):
        if (CHECKOUT / name).exists() or (CHECKOUT / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, folder / name, follow_symlinks=False)
    revision = git("rev-parse", "--short=12", "HEAD").strip()
    if git("status", "--porcelain", "--untracked-files=no"):
        revision += "-dirty"
    (folder / "probes/revision.txt").write_text(f"{revision}\n")
    objects = [
        f"probes/bpf/{file.name.removesuffix('.bpf.c')}.{machine}.bpf.o"
        for file in sorted((folder / "probes/bpf").glob("*.bpf.c"))
        for machine in ("x86", "arm64")
    ]
    run(["make", "--silent", "-f", "build.mk", f"-j{os.cpu_count()}", *objects], folder, environment)
    # What Python it is that lays pages and fetches wheels for packages.
    (folder / ".venv").symlink_to(CHECKOUT / ".venv")


def build_debs(source: Path, output: Path, environment: Mapping[str, str]) -> None:
    """Debian packages for both architectures."""
    run([source / "deploy/debian/build"], source, {**environment, "RAILSCOPE_DEB_OUTPUT": str(output)})


def build_rpms(source: Path, output: Path, environment: Mapping[str, str]) -> None:
    """RPM packages for both architectures, of the Debian packages where those are there already."""
    of_debs = {"RAILSCOPE_DEBS": str(output)} if list(output.glob("railscope_*.deb")) else {}
    run([source / "deploy/rpm/build"], source, {**environment, **of_debs, "RAILSCOPE_RPM_OUTPUT": str(output)})


def build_wheels(source: Path, output: Path, tool: Path, environment: Mapping[str, str]) -> None:
    """A source distribution, and a wheel for each machine, by the pinned backend."""
    venv.create(tool, with_pip=True)
    pinned = source / "deploy/service/build-requirements.txt"
    install = "-m pip install --quiet --disable-pip-version-check --only-binary :all: --require-hashes --requirement"
    run([tool / "bin/python", *install.split(), pinned], source, environment)
    hook = "import sys, setuptools.build_meta as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"
    made = Path(run([tool / "bin/python", "-c", hook, "build_sdist", output], source, environment).split()[-1])
    repack(output / made.name, int(environment["SOURCE_DATE_EPOCH"]))
    for machine in ARCHITECTURES:
        shutil.rmtree(source / "build", ignore_errors=True)
        for_machine = {**environment, "RAILSCOPE_MACHINE": machine, "CC": COMPILERS[machine]}
        run([tool / "bin/python", "-c", hook, "build_wheel", output], source, for_machine)


def build_images(source: Path, output: Path, environment: Mapping[str, str]) -> None:
    """An OCI archive for each architecture, of the Debian packages where those are there already."""
    of_debs = {"RAILSCOPE_DEBS": str(output)} if list(output.glob("railscope_*.deb")) else {}
    environment = {**environment, **of_debs, "RAILSCOPE_IMAGE_OUTPUT": str(output)}
    run([source / "deploy/image/build", *ARCHITECTURES.values()], source, environment)


def pack(folder: Path, archive: Path, root: str, epoch: int) -> None:
    """A folder as .tgz, with the files that links lead to in their place; what `helm package` makes of a chart."""
    entries = [(f"{root}/{file.relative_to(folder)}", file.read_bytes()) for file in sorted(files_below(folder))]
    _write_tgz(archive, entries, epoch)


def repack(archive: Path, epoch: int) -> None:
    """The same .tar.gz without its builder's times, owners and rights."""
    with tarfile.open(archive) as packed:
        members = [(one.name, packed.extractfile(one)) for one in packed.getmembers()]
        entries = [(name, content.read()) for name, content in members if content is not None]
    _write_tgz(archive, sorted(entries), epoch)


def _write_tgz(archive: Path, entries: Sequence[tuple[str, bytes]], epoch: int) -> None:
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in entries:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = len(content), epoch, 0o644
            tar.addfile(entry, BytesIO(content))
    archive.write_bytes(gzip.compress(packed.getvalue(), mtime=0))


def files_below(folder: Path) -> Iterator[Path]:
    """Regular files, also those that links of files and of folders lead to."""
    for parent, _, names in os.walk(folder, followlinks=True):
        yield from (Path(parent, name) for name in names)


def changelog_section(text: str, version: str, *, snapshot: bool) -> str:
    """What the changelog says of a version.

    Raises:
        NoRelease: it says nothing of it.
    """
    sections = dict(re.findall(r"^## \[([^\]]+)\][^\n]*\n(.*?)(?=^## \[|\Z)", text, re.MULTILINE | re.DOTALL))
    section = sections.get(version) or (sections.get("Unreleased") if snapshot else None)
    if section is None:
        raise NoRelease(f"CHANGELOG.md has no section [{version}]: rename [Unreleased], or build with SNAPSHOT=1")
    return f"# railscope {version}\n\n{section.strip()}\n"


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def git(*arguments: str) -> str:
    return run(["git", *arguments], CHECKOUT, os.environ)


def run(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str]) -> str:
    """What a command prints.

    Raises:
        NoRelease: it fails, or is missing.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=LONGEST_SECONDS,
        )
    except OSError as error:
        raise NoRelease(f"{words[0]} cannot be run ({error.strerror}): run 'make packages-deb' as root") from None
    if done.returncode != 0:
        raise NoRelease(f"{' '.join(words[:4])} failed:\n{(done.stdout + done.stderr).strip()[-4000:]}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 where the release cannot be built."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--snapshot", action="store_true", help="of what is not released: [Unreleased], changed files")
    given = parser.parse_args(arguments)
    try:
        for file in build(given.output.resolve(), given.only, snapshot=given.snapshot):
            print(f"{file.stat().st_size:>12,}  {file}")
    except NoRelease as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
