"""The options of `railscope diagnose`, apart from its work, so that the command line starts fast."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path


def add_diagnose_arguments(parser: ArgumentParser) -> None:
    """The options of `railscope diagnose`."""
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        type=Path,
        help="instead of a store: dumps of PyTorch's flight recorder of all ranks, answers of NCCL's RAS (ncclras, as "
        "text or JSON), recordings of agents, or a folder of such files",
    )
    parser.add_argument("--prometheus", metavar="URL", help="the store, as in http://prometheus:9090")
    parser.add_argument(
        "--comm", metavar="HASH", help="only this communicator (hash or prefix of it), and what it waits for"
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="only hosts whose series have this label cluster, where a store holds those of several Prometheus servers",
    )
    parser.add_argument(
        "--job",
        metavar="JOB",
        help="also what bounds the steps of this job, as the batch system or launcher calls it: communication, a "
        "straggler, computation or input, and what of that cannot be told; and what its time went into",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--time", metavar="T", help="evaluate at this time, 2026-11-21T03:05:00Z or seconds since 1970 (default: now)"
    )
    parser.add_argument(
        "--window", default="5m", metavar="5m", help="how far back to look for normal values and for stalls"
    )
    parser.add_argument(
        "--timeout",
        default="30s",
        metavar="30s",
        help="how long the store may take in all, a third of it for one question; what it did not answer by then is "
        "said, and without a finding the exit status is 2",
    )
    parser.add_argument("--bearer-token-file", type=Path, metavar="FILE", help="a file with a token for the store")
    parser.add_argument("--basic-auth", default="", metavar="USER:FILE", help="a user, and a file with its password")
    parser.add_argument(
        "--stacks",
        nargs="?",
        const="http",
        choices=("http", "https"),
        help="ask the agents on blamed ranks' hosts, at the address that the store's label instance has, where the "
        "Python code of these ranks stands; agents know it with --stall.stacks",
    )
    parser.add_argument(
        "--stacks-auth", default="", metavar="USER:FILE", help="a user of these agents, and a file with its password"
    )
    parser.add_argument("--ca-file", type=Path, metavar="FILE", help="CA certificates to trust instead of the system's")
    parser.add_argument("--insecure", action="store_true", help="accept any certificate of the store")
