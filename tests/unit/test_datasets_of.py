"""What a user names as a recording, and is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.analysis.datasets_of import as_datasets
from agent.dataset.reader import DatasetError


@pytest.mark.parametrize("apart", [True, False])
def test_the_description_of_a_job_in_the_place_of_a_recording_is_told_where_it_goes(
    tmp_path: Path, apart: bool
) -> None:
    described = tmp_path / "job.toml"
    described.write_text("layers = 4\n")
    with pytest.raises(DatasetError, match="compare RECORDING job"), as_datasets([described], apart=apart):
        pass
