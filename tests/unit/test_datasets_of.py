"""What a user names as a recording, and is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from railscope.agent.analysis.tables.datasets_of import as_datasets
from railscope.agent.cli.main import main
from railscope.agent.dataset.reader import DatasetError
from tests.unit.test_estimate import options


@pytest.mark.parametrize("apart", [True, False])
def test_the_description_of_a_job_in_the_place_of_a_recording_is_told_where_it_goes(
    tmp_path: Path, apart: bool
) -> None:
    described = tmp_path / "job.toml"
    described.write_text("layers = 4\n")
    with pytest.raises(DatasetError, match="compare RECORDING job"), as_datasets([described], apart=apart):
        pass


@pytest.mark.parametrize("apart", [True, False])
def test_the_answer_of_an_estimate_in_the_place_of_a_recording_is_told_what_is_given_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], apart: bool
) -> None:
    assert main(["estimate", *options(), "--json"]) == 0
    answer = tmp_path / "est.json"
    answer.write_text(capsys.readouterr().out)
    given_instead = "give the estimate as the TOML file of its job"
    with pytest.raises(DatasetError, match=given_instead), as_datasets([answer], apart=apart):
        pass
    other = tmp_path / "other.json"
    other.write_text('{"volumes": 1}')
    with pytest.raises(DatasetError, match="unknown format"), as_datasets([other], apart=apart):
        pass
