"""The seventeen measurements that a report answers, or says why it cannot.

They are those of two papers.  A: *Collective Communication Profiling of Modern-day Machine Learning Workloads* (arXiv
2507.07117, 2025), which instrumented NCCL's logging.  B: *Understanding Communication Characteristics of Distributed
Training* (APNet 2024), which measured by hand and gave an analytical model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PAPER_A: Final = "arXiv 2507.07117"
PAPER_B: Final = "APNet 2024"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row of the list."""

    number: int
    """1 to 17: what `Unknown.row` points to."""
    name: str
    definition: str
    papers: tuple[str, ...]
    """Where it is from."""


MEASUREMENTS: Final = (
    Measurement(1, "operations", "calls by communicator, operation and data type", (PAPER_A,)),
    Measurement(
        2,
        "transfer sizes",
        "payload of a call: count × size of the data type, with the operation's own meaning of count; how many calls "
        "have each size, and the cumulative distribution",
        (PAPER_A, PAPER_B),
    ),
    Measurement(3, "bytes by GPU pair", "wire bytes from one GPU to another, each direction apart", (PAPER_A, PAPER_B)),
    Measurement(
        4,
        "sparsity",
        "directed pairs that talk / n(n−1), as the papers define it: where it is small, most of the matrix is empty",
        (PAPER_A, PAPER_B),
    ),
    Measurement(
        5,
        "traffic between servers, rails and leaves",
        "wire bytes between servers; of those between different rails; of those between different leaf switches; and "
        "port bytes, which the rails' NICs counted themselves, by who moved them",
        (PAPER_A, PAPER_B),
    ),
    Measurement(
        6,
        "latency",
        "how long operations take, by operation and size (of an operation with more than 1,000 sizes, by powers of "
        "two); those that take far longer than usual",
        (PAPER_A,),
    ),
    Measurement(
        7,
        "composition",
        "calls and payload of tensor, pipeline, data and expert parallelism and of embedding synchronisation, by who "
        "is in the communicator and what is called",
        (PAPER_B,),
    ),
    Measurement(8, "predicted matrix", "pairs and bytes that the model expects of (p, t, d) and a mapping", (PAPER_B,)),
    Measurement(
        9,
        "regularity",
        "period and duty cycle of iterations, how many of them make the same calls, and what lies between them",
        (PAPER_B,),
    ),
    Measurement(
        10,
        "all-to-all non-uniformity",
        "in an iteration, of the bytes of all pairs: max − min, max / min, (max − min) / mean, and the total",
        (PAPER_B,),
    ),
    Measurement(
        11, "communication ratio", "union of the communication intervals of an iteration / its length", (PAPER_B,)
    ),
    Measurement(
        12, "non-overlapped ratio", "communication while nothing is computed / length of the iteration", (PAPER_B,)
    ),
    Measurement(13, "bandwidth utilisation", "bus bandwidth / rate of the links, by operation and size", (PAPER_B,)),
    Measurement(
        14,
        "scaling factor",
        "throughput a GPU / throughput a GPU of the first run; throughput is iterations a second × GPUs where the "
        "batch grows with them (weak scaling), and iterations a second where it stays the same (strong scaling)",
        (PAPER_B,),
    ),
    Measurement(15, "comparison", "the same report of two runs, side by side", (PAPER_B,)),
    Measurement(
        16,
        "receives",
        "time in which a receive transfers, time in which it waits for the sender; the bubble",
        (PAPER_B,),
    ),
    Measurement(17, "accuracy of the model", "1 − |predicted − measured| / measured", (PAPER_B,)),
)

BY_NUMBER: Final = {measurement.number: measurement for measurement in MEASUREMENTS}
