"""Every command of the page of the papers' figures runs, on small recordings (simulated), and draws what is shown."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from railscope.agent.analysis.report.picture_files import PICTURES
from railscope.agent.cli.main import main
from railscope.agent.model.mapping import default_mapping
from tests.docs import papers
from tests.unit.datasets import gpt_job
from tests.unit.gpt_datasets import inference_job, moe_job
from tests.unit.model_shapes import GPT_3B

RUN = [words for words in papers.commands() if words[0] != "demo"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's recordings lie: of the job that its file describes, and of a mixture of experts."""
    made = tmp_path_factory.mktemp("papers")
    (made / "job.toml").write_text(papers.job_file())
    told = tomllib.loads(papers.job_file())
    shape = replace(
        GPT_3B,
        layers=told["layers"],
        hidden=told["hidden"],
        sequence=told["seq"],
        vocabulary=told["vocab"],
        global_batch=told["global_batch"],
        micro_batch=told["micro_batch"],
        pipeline=told["pp"],
        tensor=told["tp"],
        data=told["dp"],
    )
    for name in ("job", "half"):
        gpt_job(made / name, shape, default_mapping(shape), told["gpus_per_node"], 4).write()
    moe_job(made / "moe", iterations=6).write()
    inference_job(made / "infer", (1, 1)).write()
    return made


@pytest.mark.parametrize("words", RUN, ids=" ".join)
def test_a_command_of_the_page_runs(
    folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(words) == 0, capsys.readouterr().err
    assert capsys.readouterr().out
    if "-o" in words:
        assert Path(words[words.index("-o") + 1]).stat().st_size > 500


def test_each_picture_of_the_page_is_drawn_by_one_of_its_commands_lies_beside_it_and_is_small() -> None:
    drawn = {words[words.index("-o") + 1] for words in RUN if "-o" in words}
    if any("--pictures" in words for words in RUN):
        drawn |= {f"{name}.svg" for name in PICTURES}
    shown = papers.shown_pictures()
    assert len(shown) > 10
    assert set(shown) <= drawn
    assert {file.name for file in papers.PICTURES.iterdir()} == set(shown)
    assert all(0 < (papers.PICTURES / name).stat().st_size < papers.MOST_BYTES for name in shown)
