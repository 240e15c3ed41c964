"""Which GPU pairs talked, beside those that the model expects (predicted matrix; paper B compares the two by eye).

The model's ranks are the ranks of the job.  A recorded GPU is the rank that the launcher said, if it said it of all;
else GPU k is rank k, which needs that all of the job was recorded.  Of a job that was recorded in part only the pairs
among recorded GPUs are compared.

The model's bytes are of one iteration; they are multiplied by the number of iterations in the recording, so that whole
bytes are compared with whole bytes (`iteration_count`).  Where that number is not known, only the pairs are compared.

Accuracy is 1 − |predicted − observed| / observed of the bytes of all pairs together; by pairs it is
1 − Σ|predicted − observed| / Σ observed, which does not let too much here make up for too little there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from railscope.agent.analysis.facts.options import DEFAULT_MEMORY_BYTES, DUCKDB
from railscope.agent.analysis.facts.report import GpuFacts, Traffic
from railscope.agent.analysis.matrix.compared_pairs import ComparedPairs, compared_pairs
from railscope.agent.analysis.tables.calls import count_calls
from railscope.agent.analysis.tables.engines import engine
from railscope.agent.analysis.tables.gpus import Gpus, find_gpus
from railscope.agent.analysis.tables.missing_calls import missing_calls_of
from railscope.agent.analysis.timing.iteration_count import count_iterations
from railscope.agent.analysis.timing.iterations import find_iterations
from railscope.agent.analysis.traffic.traffic import find_traffic
from railscope.agent.dataset.reader import Dataset, open_dataset
from railscope.agent.estimate.answer import Estimate
from railscope.agent.facts.counted import format_count
from railscope.agent.model.shape import ShapeError
from railscope.agent.model.traffic import Traffic as Prediction


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was seen beside what was predicted, over all iterations."""

    iterations: int | None
    """None: not known; then predicted bytes are of one iteration, and only pairs can be compared."""
    pairs: ComparedPairs
    """Those with bytes on either side, in order of source and destination."""

    @property
    def only_observed(self) -> ComparedPairs:
        return self.pairs.select(self.pairs.predicted == 0)

    @property
    def only_predicted(self) -> ComparedPairs:
        return self.pairs.select(self.pairs.observed == 0)

    @property
    def different(self) -> ComparedPairs:
        """Pairs whose bytes are not equal, the most different first."""
        return self.pairs.select(self.pairs.observed != self.pairs.predicted).most_different_first()

    @property
    def accuracy(self) -> float | None:
        """Of all bytes together; None: iterations are not known, or nothing was seen."""
        seen = self.pairs.observed_bytes
        if self.iterations is None or not seen:
            return None
        return 1 - abs(self.pairs.predicted_bytes - seen) / seen

    @property
    def pair_accuracy(self) -> float | None:
        """By pairs."""
        seen = self.pairs.observed_bytes
        if self.iterations is None or not seen:
            return None
        return 1 - self.pairs.difference_bytes / seen


@dataclass(frozen=True, slots=True)
class Matrix:
    """Everything that `railscope matrix` shows."""

    folders: tuple[str, ...]
    simulated: bool
    gpus: tuple[GpuFacts, ...]
    traffic: Traffic
    comparison: Comparison | None
    """None: nothing was predicted."""
    notes: tuple[str, ...]
    """What makes figures unsure, one sentence each."""
    losses: tuple[str, ...] = ()
    """Calls that are missing in the recording, one sentence each: bytes are too small by them."""

    @property
    def servers(self) -> tuple[str, ...]:
        return tuple(gpu.server for gpu in self.gpus)


def make_matrix(folders: Sequence[Path], estimate: Estimate | None = None, iterations: int | None = None) -> Matrix:
    """The traffic matrix of the dataset in these folders; `iterations` is how many it holds, where the user knows.

    Raises:
        DatasetError: a folder is no dataset.
        ShapeError: the estimate is of another job.
    """
    with engine(DUCKDB, DEFAULT_MEMORY_BYTES) as backend, open_dataset(folders, backend) as dataset:
        return matrix_of(dataset, estimate, iterations)


def matrix_of(dataset: Dataset, estimate: Estimate | None = None, iterations: int | None = None) -> Matrix:
    """The traffic matrix of an open dataset.

    Raises:
        ShapeError: the estimate is of another job.
    """
    gpus = find_gpus(dataset)
    counted = count_calls(dataset)
    traffic, unknown = find_traffic(dataset, gpus, counted)
    notes = [one.reason for one in unknown if one.row == 3]
    comparison = None
    if estimate is not None:
        regularity, found, _ = find_iterations(dataset, gpus) if iterations is None else (None, (), ())
        whole = count_iterations(dataset, gpus, counted, regularity, found, iterations)
        if whole is None:
            comparison = compare_traffic(traffic, gpus, estimate.traffic, None)
            notes.append(
                "No iterations were found, so bytes cannot be compared: give their number with --iterations N."
            )
        else:
            compared = traffic if whole.counted is counted else find_traffic(dataset, gpus, whole.counted)[0]
            comparison = compare_traffic(compared, gpus, estimate.traffic, whole.number)
            if whole.note:
                notes.append(f"{whole.note}  Give their number with --iterations N.")
    recordings = dataset.rows(dataset["recordings"].select("simulated").distinct())
    return Matrix(
        folders=tuple(str(folder) for folder in dataset.folders),
        simulated=any(recordings["simulated"].to_pylist()),
        gpus=gpus.gpus,
        traffic=traffic,
        comparison=comparison,
        notes=tuple(notes),
        losses=missing_calls_of(dataset),
    )


def compare_traffic(traffic: Traffic, gpus: Gpus, prediction: Prediction, iterations: int | None) -> Comparison:
    """Hold the bytes of pairs that were seen in so many iterations against a prediction of one.

    Raises:
        ShapeError: the prediction is of another job.
    """
    gpu_of_rank = _gpu_of_rank(gpus.gpus, prediction.ranks)
    sources, destinations, moved = prediction.pairs()
    own_source, own_destination = gpu_of_rank[sources], gpu_of_rank[destinations]
    recorded = (own_source >= 0) & (own_destination >= 0)
    return Comparison(
        iterations,
        compared_pairs(
            len(gpus.gpus),
            (traffic.pairs.source, traffic.pairs.destination, traffic.pairs.wire_bytes),
            (own_source[recorded], own_destination[recorded], moved[recorded] * (iterations or 1)),
        ),
    )


def _gpu_of_rank(gpus: Sequence[GpuFacts], ranks: int) -> NDArray[np.int64]:
    """The recorded GPU that is each rank of the job; −1: it was not recorded."""
    said = [gpu.world_rank for gpu in gpus]
    known = [rank for rank in said if rank is not None]
    if len(known) < len(gpus) or len(set(known)) < len(known):
        if len(gpus) != ranks:
            raise ShapeError(
                f"the estimate is of {format_count(ranks, 'rank')}, the recording of {format_count(len(gpus), 'GPU')} "
                "whose "
                "place in the job is not known: give the shape of the job that was recorded, or record all of it"
            )
        return np.arange(ranks, dtype=np.int64)
    if known and max(known) >= ranks:
        raise ShapeError(
            f"the estimate is of {format_count(ranks, 'rank')}, and rank {max(known)} was recorded: give the shape of "
            "the job that was "
            "recorded"
        )
    found = np.full(ranks, -1, dtype=np.int64)
    found[known] = np.arange(len(gpus))
    return found
