"""What `railscope estimate` is asked: from options, from a TOML file, or from both, options before the file.

The file has the options' names as keys, with `_` or `-` between words and without sections:

    layers = 54
    global_batch = 1024
    c_tp = 6e9
    recompute = false
    mapping = "ranks.csv"      # beside this file

Both go through the same readers.  What is not known is refused, as in the agent's configuration file: a typing error
that is silently ignored would give an answer to another question.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from railscope.agent.config.file import ConfigError
from railscope.agent.config.keys import suggest_nearest
from railscope.agent.config.values import option_type, real, whole_number
from railscope.agent.model.shape import Mode, Shape

_LARGEST_FILE_BYTES: Final = 1 << 20
_MOST: Final = 1_000_000_000
_MOST_LAYERS: Final = 100_000
_MOST_GPUS_OF_A_NODE: Final = 1024
_LARGEST_RATE: Final = 1e24
DEFAULT, CUSTOM = "default", "custom"
"""Mappings that need no file."""

_EXAMPLE: Final = """\
example, a 3B GPT on four nodes of eight GPUs:
  railscope estimate --layers 54 --hidden 2000 --seq 1024 --vocab 50257 --global-batch 1024 --micro-batch 32 \\
      --pp 4 --tp 2 --dp 4 --c-tp 6e9 --c-pp 5e9 --c-dp 1.25e9 --peak-flops 71e12 --mu 0.3

FILE is TOML with the options' names as keys (layers = 54, global_batch = 1024, recompute = false, mapping = \
"ranks.csv"); options go before it.  A mapping's file is CSV, one line a rank:
  rank,pipeline,tensor,data
  0,0,0,0
  1,0,1,0
"""


@dataclass(frozen=True, slots=True)
class GivenRates:
    """The rates that the user gave; None if not given."""

    tp_bytes_per_second: float | None
    pp_bytes_per_second: float | None
    dp_bytes_per_second: float | None
    peak_flop_per_second: float | None
    utilisation: float | None


@dataclass(frozen=True, slots=True)
class Request:
    """One question to the model."""

    shape: Shape
    mode: Mode
    stage: int
    mapping: str
    """`default`, `custom` or a file's name."""
    gpus_per_node: int
    rates: GivenRates
    as_json: bool


def _real(smallest: float, largest: float, example: str) -> Callable[[str], float]:
    return real(smallest, largest, f"number from {smallest:g} to {largest:g}, such as {example}")


def _text(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("it must not be empty: write default, custom or a file's name")
    return text


@dataclass(frozen=True, slots=True)
class _Option:
    name: str
    """Of the flag without dashes, and of the key with `_` for `-`."""
    metavar: str
    read: Callable[[str], object]
    help: str
    required: bool = False

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def kinds(self) -> tuple[type, ...]:
        """The types of an option's value in the TOML file."""
        return {"N": (int,), "RATE": (int, float), "SHARE": (int, float)}.get(self.metavar, (str,))


def _count(name: str, help_text: str, largest: int = _MOST, smallest: int = 1, *, required: bool = False) -> _Option:
    return _Option(name, "N", whole_number(smallest, largest), help_text, required)


def _rate(name: str, help_text: str) -> _Option:
    return _Option(name, "RATE", _real(1, _LARGEST_RATE, "45e9"), help_text)


_OPTIONS: Final = (
    _count("layers", "transformer layers", _MOST_LAYERS, required=True),
    _count("hidden", "hidden size", required=True),
    _count("seq", "tokens of a sequence", required=True),
    _count("global-batch", "sequences of an iteration", required=True),
    _count("micro-batch", "sequences per micro-batch of a replica", required=True),
    _count("vocab", "entries of the vocabulary, not padded", required=True),
    _count("pp", "pipeline stages (default 1)"),
    _count("tp", "tensor-parallel ranks (default 1)"),
    _count("dp", "data-parallel replicas (default 1)"),
    _count("gpus-per-node", "ranks of a node (default 8, or all if there are fewer)", _MOST_GPUS_OF_A_NODE),
    _Option("mapping", "default|custom|FILE", _text,
            "mapping of ranks: in the order tensor, data, pipeline (default); tensor, pipeline, data (custom); or a "
            "CSV file"),
    _rate("c-tp", "effective bandwidth of tensor-parallel AllReduces, bytes/s (default: assumed)"),
    _rate("c-pp", "effective bandwidth of pipeline transfers, bytes/s (default: assumed)"),
    _rate("c-dp", "effective bandwidth of data-parallel AllReduces, bytes/s (default: assumed)"),
    _rate("peak-flops", "of one GPU, FLOP/s (default: assumed)"),
    _Option("mu", "SHARE", _real(0.001, 1, "0.4"), "part of the peak that is reached, 0.001 to 1 (default: assumed)"),
    _count("stage", "pipeline stage whose volumes are shown (default 0)", _MOST_LAYERS, smallest=0),
)  # fmt: skip
_FLAGS: Final = {
    "recompute": ("recompute", True),
    "no_recompute": ("recompute", False),
    "output_layer": ("output_layer", True),
    "no_output_layer": ("output_layer", False),
    "paper": ("mode", Mode.PAPER),
    "exact": ("mode", Mode.EXACT),
}
"""Keys that are true or false: which value they set, and to what where they are true."""
_SHAPE_FIELDS: Final = {
    "layers": "layers",
    "hidden": "hidden",
    "sequence": "seq",
    "vocabulary": "vocab",
    "global_batch": "global_batch",
    "micro_batch": "micro_batch",
    "pipeline": "pp",
    "tensor": "tp",
    "data": "dp",
}


def add_estimate_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `railscope estimate`; what is not given leaves no trace, so that the file can speak."""
    parser.epilog = _EXAMPLE
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="a TOML file with these options as keys")
    add_shape_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="also write who sends how much to whom, as a heat map (FILE.svg, FILE.png) or a table (FILE.csv)",
    )


def add_shape_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The options that describe a job, for every command that asks the model."""
    for option in _OPTIONS:
        parser.add_argument(
            f"--{option.name}",
            dest=option.key,
            type=option_type(option.read),
            metavar=option.metavar,
            default=argparse.SUPPRESS,
            help=option.help.replace("%", "%%"),
        )
    recompute = parser.add_mutually_exclusive_group()
    output = parser.add_mutually_exclusive_group()
    mode = parser.add_mutually_exclusive_group()
    for group, key, help_text in (
        (recompute, "no_recompute", "activations are kept for the backward pass"),
        (recompute, "recompute", "activations are computed again in the backward pass (default)"),
        (output, "output_layer", "count the last stage's AllReduces of output layer and loss, as Megatron makes them"),
        (output, "no_output_layer", "leave them out (default)"),
        (mode, "exact", "real stages, padded vocabulary, final layer norm, embedding AllReduces (default)"),
        (mode, "paper", "the published equations, taken literally"),
    ):
        dest, value = _FLAGS[key]
        group.add_argument(
            f"--{key.replace('_', '-')}",
            dest=dest,
            action="store_const",
            const=value,
            default=argparse.SUPPRESS,
            help=help_text,
        )


def describes_a_job(parsed: Any) -> bool:
    """Whether a file or any option of `add_shape_arguments` was given."""
    given = vars(parsed)
    return parsed.file is not None or any(
        key in given for key in (*(option.key for option in _OPTIONS), "recompute", "output_layer")
    )


def request_from(parsed: Any) -> Request:
    """The question to the model that options and file of `railscope estimate` ask together.

    Raises:
        ConfigError: the file cannot be used, or something is missing.
        ShapeError: no job can have this shape.
    """
    values: dict[str, Any] = {} if parsed.file is None else _file_values(parsed.file)
    given = vars(parsed)
    keys = (*(option.key for option in _OPTIONS), "recompute", "output_layer", "mode")
    values |= {key: given[key] for key in keys if key in given}
    missing = [f"--{option.name}" for option in _OPTIONS if option.required and option.key not in values]
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be given: as options, or as keys of a TOML file (see --help)")
    shape = Shape(
        **{field: values.get(key, 1) for field, key in _SHAPE_FIELDS.items()},
        recompute=values.get("recompute", True),
        output_layer=values.get("output_layer", False),
    )
    return Request(
        shape=shape,
        mode=values.get("mode", Mode.EXACT),
        stage=values.get("stage", 0),
        mapping=values.get("mapping", DEFAULT),
        gpus_per_node=values.get("gpus_per_node", min(8, shape.ranks)),
        rates=GivenRates(*(values.get(key) for key in ("c_tp", "c_pp", "c_dp", "peak_flops", "mu"))),
        as_json=parsed.json,
    )


def read_text(path: Path, what: str, most_bytes: int) -> str:
    """The text of a file that describes a job.

    Raises:
        ConfigError: it cannot be read, is longer than `most_bytes`, or is no UTF-8.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the {what}: {error.strerror}") from None
    if len(content) > most_bytes:
        raise ConfigError(f"{path}: this is not a {what}: it has more than {most_bytes} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: this is not a {what}: byte {error.start} is not UTF-8") from None


def _file_values(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(read_text(path, "TOML file", _LARGEST_FILE_BYTES))
    except ValueError as error:  # also of a number with thousands of digits
        raise ConfigError(f"{path}: this is not TOML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    options = {option.key: option for option in _OPTIONS}
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for name, content in document.items():
        key = name.replace("-", "_")
        if key not in options and key not in _FLAGS:
            raise ConfigError(_unknown(path, name, content, options))
        target, value = _switch(path, name, content) if key in _FLAGS else (key, _value(path, options[key], content))
        if target in spelled:
            raise ConfigError(f"{path}: {name} repeats {spelled[target]}: keep one of them")
        spelled[target] = name
        values[target] = value
    if values.get("mapping") not in (None, DEFAULT, CUSTOM):
        values["mapping"] = str(path.parent / values["mapping"])
    return values


def _unknown(path: Path, name: str, content: object, options: Mapping[str, _Option]) -> str:
    shown = repr(name)[1:-1][:80]
    if isinstance(content, dict):
        return f"{path}: [{shown}]: the file has no sections: write the keys without one"
    known = [*options, *_FLAGS]
    return f"{path}: unknown key {shown}{suggest_nearest(name.replace('-', '_'), known)} (allowed: {', '.join(known)})"


def _switch(path: Path, name: str, content: object) -> tuple[str, object]:
    if not isinstance(content, bool):
        raise ConfigError(f"{path}: {name}: {_format_value(content)} is not true or false")
    target, value = _FLAGS[name.replace("-", "_")]
    if content:
        return target, value
    opposites = {True: False, False: True, Mode.PAPER: Mode.EXACT, Mode.EXACT: Mode.PAPER}
    return target, opposites[value]


def _value(path: Path, option: _Option, content: object) -> object:
    if not isinstance(content, option.kinds) or isinstance(content, bool):
        wanted = {str: "a text in quotes", float: "a number", int: "a whole number"}[option.kinds[-1]]
        raise ConfigError(f"{path}: {option.key}: {_format_value(content)} is not {wanted}")
    try:
        return option.read(str(content))
    except ValueError as error:
        raise ConfigError(f"{path}: {option.key}: {error}") from None


def _format_value(content: object) -> str:
    text = " ".join(repr(content).split())
    return text if len(text) <= 60 else f"{text[:60]}…"
