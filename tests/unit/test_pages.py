"""Manual pages and completion, made of the parser: shells and man(1) take them, and no option is missing."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from railscope.agent.cli.main import make_parser
from railscope.agent.cli.pages import Page, main, page_of

PROGRAM: Final = page_of(make_parser())
BASH: Final = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_railscope
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pages")
    assert main([str(made)]) == 0
    return made


def completed(folder: Path, *words: str) -> set[str]:
    done = subprocess.run(
        ["bash", "-c", BASH, "bash", str(folder / "completion/railscope.bash"), *words],
        capture_output=True, text=True, check=True, cwd="/",
    )  # fmt: skip
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands_actions_options_and_values(folder: Path) -> None:
    assert completed(folder, "railscope", "re") == {"record", "report"}
    assert completed(folder, "railscope", "config", "c") == {"check"}
    assert completed(folder, "railscope", "agent", "--web.l") == {"--web.listen-address"}
    assert completed(folder, "railscope", "config", "show", "--js") == {"--json"}
    assert completed(folder, "railscope", "agent", "--scope", "") == {"all", "netns"}
    assert completed(folder, "railscope", "agent", "--scope", "=", "n") == {"netns"}
    assert completed(folder, "railscope", "demo", "--pattern", "t") == {"tensor-parallel"}
    assert completed(folder, "railscope", "agent", "--path.sysfs", "/sy") >= {"/sys"}
    assert completed(folder, "railscope", "agent", "--limit.series", "") == set()


def test_bash_completes_every_option_that_the_help_shows(folder: Path) -> None:
    for page in PROGRAM.pages:
        for one in (page, *page.pages):
            shown = {name for flag in one.flags for name in flag.names}
            assert completed(folder, "railscope", *one.words, "-") == shown


def test_fish_completes_commands_options_and_values(folder: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is missing: run 'make packages-test' as root")
    script = f"source {folder}/completion/railscope.fish; complete -C $argv[1]"
    for typed, wanted in (
        ("railscope do", {"doctor"}),
        ("railscope config ch", {"check"}),
        ("railscope agent --web.l", {"--web.listen-address"}),
        ("railscope agent --scope ", {"all", "netns"}),
    ):
        done = subprocess.run(["fish", "-c", script, typed], capture_output=True, text=True, check=True, cwd="/")
        assert {line.partition("\t")[0] for line in done.stdout.splitlines()} == wanted


def test_zsh_takes_its_completion(folder: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is missing: run 'make packages-test' as root")
    script = "autoload -U compinit && compinit -u -D; source $1 2>/dev/null; whence _railscope_agent"
    done = subprocess.run(
        ["zsh", "-f", "-c", script, "zsh", str(folder / "completion/_railscope")], capture_output=True, text=True
    )
    assert "_railscope_agent" in done.stdout


@pytest.mark.parametrize("page", [PROGRAM, *PROGRAM.pages], ids=lambda page: page.words or "railscope")
def test_a_manual_page_has_all_options_and_man_has_nothing_to_warn_of(folder: Path, page: Page) -> None:
    path = folder / "man" / f"{'-'.join(('railscope', *page.words))}.1"
    text = path.read_text()
    for flag in page.flags:
        for name in flag.names:
            escaped = re.escape(name.replace("-", "\\-"))
            assert re.search(rf"\\fB{escaped}\\fR", text), name
    assert text.isascii()
    if shutil.which("groff") is None:
        pytest.skip("groff is missing: run 'make packages-test' as root")
    done = subprocess.run(["groff", "-man", "-ww", "-z", path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
