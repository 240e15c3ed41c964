"""`railscope estimate` as a command: options and TOML files, errors of one line, JSON and text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from railscope.agent.cli.main import main
from railscope.agent.estimate import command
from railscope.agent.estimate.answer import Estimate, estimate_of
from railscope.agent.estimate.options import Request
from railscope.agent.estimate.text import format_bytes

SMALL = {
    "layers": 4,
    "hidden": 64,
    "seq": 16,
    "global_batch": 32,
    "micro_batch": 2,
    "vocab": 1000,
    "pp": 2,
    "tp": 2,
    "dp": 4,
}
"""16 ranks, 4 micro-batches."""


def options(**changes: object) -> list[str]:
    """SMALL as options, changed; None leaves one out."""
    values = SMALL | changes
    return [w for k, v in values.items() if v is not None for w in (f"--{k.replace('_', '-')}", str(v))]


def toml(**changes: object) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in (SMALL | changes).items())


def estimate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["estimate", *words, "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that refuses these words, with status 2 and nothing on standard output."""
    try:
        status: object = main(["estimate", *words])
    except SystemExit as left:
        status = left.code
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert printed.err.startswith("railscope estimate: ")
    assert printed.err.count("\n") == 1
    assert printed.err.strip().isprintable()
    return printed.err


def test_the_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    content = estimate(capsys, *options())
    assert set(content) == {
        "volumes", "pairs", "inter_node_bytes", "node_transmit_bytes", "cross_rail_bytes", "times", "r_comm",
        "r_bubble", "r_bubble_without_dp", "parameters", "configuration",
    }  # fmt: skip
    assert list(content["volumes"]) == ["tp", "pp_send", "pp_recv", "dp", "embedding_sync", "loss"]
    for row in content["volumes"].values():
        assert set(row) == {"messages", "message_bytes", "bytes"}
        assert all(isinstance(value, int) for value in row.values())
    assert set(content["pairs"]) == {"tp", "pp", "dp", "embedding_sync", "total", "possible", "rank_0"}
    assert set(content["times"]) == {"t_tp", "t_pp", "t_dp", "t_comp", "t_bubble", "t_iter"}
    assert len(content["node_transmit_bytes"]) == 2


def test_a_file_asks_the_same_as_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.toml"
    file.write_text(toml(mapping="custom", c_tp=6e9, peak_flops=71 * 10**12, mu=0.3, no_recompute=True, paper=True))
    asked = options(mapping="custom", c_tp=6e9, peak_flops=71e12, mu=0.3)
    assert estimate(capsys, str(file)) == estimate(capsys, *asked, "--no-recompute", "--paper")


def test_keys_may_be_written_with_dashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.toml"
    file.write_text(toml().replace("_", "-"))
    assert estimate(capsys, str(file)) == estimate(capsys, *options())


def test_options_go_before_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.toml"
    file.write_text(toml(recompute=False, paper=True, stage=1))
    asked = estimate(capsys, str(file), "--layers", "6", "--recompute", "--exact", "--stage", "0")
    assert asked == estimate(capsys, *options(layers=6))


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("recompute = true", "recompute", True),
        ("no_recompute = false", "recompute", True),
        ("recompute = false", "recompute", False),
        ("exact = false", "mode", "paper"),
        ("paper = false", "mode", "exact"),
    ],
)
def test_switches_of_a_file_may_be_off(
    line: str, field: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f"{toml()}{line}\n")
    assert estimate(capsys, str(file))["configuration"][field] == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layer = 3", "unknown key layer; did you mean layers? (allowed: layers, hidden"),
        ("seq-len = 3", "unknown key seq-len; did you mean seq?"),
        ('"a\\u001b[0m" = 3', "unknown key a\\x1b[0m"),
        ("[model]\nlayers = 3", "[model]: the file has no sections"),
        ('layers = "3"', "layers: '3' is not a whole number"),
        ("layers = true", "layers: True is not a whole number"),
        ("layers = 3.0", "layers: 3.0 is not a whole number"),
        ("layers = -4", "layers: '-4' is not a whole number: allowed is 1 to 100000"),
        ("layers = 0", "layers: 0 is out of range"),
        ("c_tp = -3", "c_tp: '-3' is not a number from 1 to 1e+24, such as 45e9"),
        ("c_tp = nan", "c_tp: 'nan' is not a number"),
        ("c_tp = inf", "c_tp: 'inf' is not a number"),
        ('c_tp = "6e9"', "c_tp: '6e9' is not a number"),
        ("c_tp = true", "c_tp: True is not a number"),
        ("mapping = 3", "mapping: 3 is not a text in quotes"),
        ('mapping = ""', "mapping: it must not be empty"),
        ("recompute = 1", "recompute: 1 is not true or false"),
        ("recompute = true\nno-recompute = true", "no-recompute repeats recompute"),
        ("tp = 1\ntp = 2", "this is not TOML: Cannot overwrite a value"),
        ("global-batch = 1\nglobal_batch = 1", "global_batch repeats global-batch"),
        ("layers =", "this is not TOML: Invalid value"),
        (f"layers = {'9' * 5000}", "this is not TOML"),
        ("x = " + "[" * 3000, "nested too deeply"),
    ],
)
def test_a_file_with_something_else_in_it_is_refused(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text)
    assert refusal(capsys, str(file)).startswith(f"railscope estimate: {file}: {said}")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "none.toml: cannot read the TOML file: No such file" in refusal(capsys, str(tmp_path / "none.toml"))
    assert "cannot read the TOML file: Is a directory" in refusal(capsys, str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "this is not a TOML file: byte 0 is not UTF-8" in refusal(capsys, str(tmp_path / "binary"))
    (tmp_path / "large").write_bytes(b"#" * (1 << 20) + b"\n")
    assert "this is not a TOML file: it has more than 1048576 bytes" in refusal(capsys, str(tmp_path / "large"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"global_batch": 31}, "global batch 31 is not a multiple of micro-batch 2 × data parallel 4 = 8"),
        ({"pp": 5}, "4 layers cannot fill 5 pipeline stages"),
        ({"tp": 3}, "hidden size 64 cannot be split over 3 tensor ranks"),
        ({"gpus_per_node": 5}, "16 ranks do not fill nodes of 5 GPUs"),
        ({"gpus_per_node": 32}, "16 ranks do not fill nodes of 32 GPUs"),
        ({"stage": 2}, "there is no stage 2: the job has stages 0 to 1"),
        ({"layers": None}, "--layers must be given"),
        ({"layers": None, "vocab": None}, "--layers, --vocab must be given"),
        ({"layers": -4}, "argument --layers: '-4' is not a whole number"),
        ({"hidden": "64.5"}, "argument --hidden: '64.5' is not a whole number"),
        ({"c_dp": 0}, "argument --c-dp: '0' is not a number from 1"),
        ({"c_dp": "fast"}, "argument --c-dp: 'fast' is not a number from 1"),
        ({"mu": 1.5}, "argument --mu: '1.5' is not a number from 0.001 to 1, such as 0.4"),
        ({"mu": -1}, "argument --mu: '-1' is not a number"),
        ({"mapping": ""}, "argument --mapping: it must not be empty"),
        ({"mapping": "/nonexistent/ranks.csv"}, "/nonexistent/ranks.csv: cannot read the mapping file: No such file"),
        ({"hidden": 10**9, "seq": 10**9}, "more bytes in an iteration than 64 bits can count"),
        ({"dp": 10**6, "global_batch": 10**9}, "4000000 ranks: at most 1048576"),
    ],
)
def test_an_impossible_job_is_refused(
    changes: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, *options(**changes))


def test_both_modes_at_once_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not allowed with argument" in refusal(capsys, *options(), "--paper", "--exact")


def test_a_mapping_file_says_which_rank_does_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ranks.csv"
    rows = [(8 * p + 2 * d + t, p, t, d) for p in range(2) for d in range(4) for t in range(2)]
    reversed_rows = [(15 - rank, p, t, d) for rank, p, t, d in rows]
    file.write_text("rank,pipeline,tensor,data\n" + "".join(f"{r},{p},{t},{d}\n" for r, p, t, d in reversed_rows))
    default, mirrored = estimate(capsys, *options()), estimate(capsys, *options(mapping=file))
    assert mirrored["node_transmit_bytes"] == default["node_transmit_bytes"][::-1]
    assert mirrored["volumes"] == default["volumes"]
    assert set(mirrored["pairs"]["rank_0"]) == {"1", "6", "8"}


def test_a_wrong_mapping_file_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ranks.csv"
    file.write_text("rank,pipeline,tensor,data\n0,0,0,9\n")
    assert f"{file}: line 2: data is '9': allowed is 0 to 3" in refusal(capsys, *options(mapping=file))


def test_a_mapping_named_in_a_file_lies_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.toml").write_text(toml(pp=1, tp=1, dp=2, mapping="ranks.csv"))
    (tmp_path / "ranks.csv").write_text("rank,pipeline,tensor,data\n1,0,0,0\n0,0,0,1\n")
    asked = estimate(capsys, str(tmp_path / "job.toml"))
    assert asked["configuration"]["mapping"] == str(tmp_path / "ranks.csv")


def test_nodes_have_eight_gpus_or_all_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate(capsys, *options())["configuration"]["gpus_per_node"] == 8
    assert estimate(capsys, *options(dp=1))["configuration"]["gpus_per_node"] == 4


def test_what_was_not_said_is_assumed_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    asked = estimate(capsys, *options(c_pp=5e9))["configuration"]
    assert asked["assumed_rates"] == [
        "dp_bytes_per_second",
        "peak_flop_per_second",
        "tp_bytes_per_second",
        "utilisation",
    ]
    assert asked["rates"]["pp_bytes_per_second"] == 5e9


def test_what_leaves_the_nodes_is_assumed_to_go_at_the_speed_of_a_nic(capsys: pytest.CaptureFixture[str]) -> None:
    default = estimate(capsys, *options())["configuration"]["rates"]
    custom = estimate(capsys, *options(mapping="custom"))["configuration"]["rates"]
    assert default["tp_bytes_per_second"] == default["dp_bytes_per_second"] == custom["pp_bytes_per_second"] == 360e9
    assert default["pp_bytes_per_second"] == custom["dp_bytes_per_second"] == 45e9


def text_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["estimate", *words]) == 0
    return capsys.readouterr().out


def test_a_picture_is_of_the_estimate_that_is_printed_which_is_computed_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[Request] = []

    def counted(request: Request) -> Estimate:
        computed.append(request)
        return estimate_of(request)

    monkeypatch.setattr(command, "estimate_of", counted)
    file = tmp_path / "heat.svg"
    text = text_of(capsys, *options(), "-o", str(file))
    assert text == f"wrote {file}\n\n{text_of(capsys, *options())}"
    assert file.read_text().startswith("<?xml")
    assert len(computed) == 2  # one with the picture, one without
    assert "heat.txt" in refusal(capsys, *options(), "-o", str(tmp_path / "heat.txt"))
    assert "cannot write it" in refusal(capsys, *options(), "-o", str(tmp_path / "missing/heat.svg"))


def test_the_text_says_what_an_operator_plans_with(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(
        capsys,
        *options(
            layers=54,
            hidden=2000,
            seq=1024,
            vocab=50257,
            global_batch=1024,
            micro_batch=32,
            pp=4,
            c_tp=6e9,
            c_pp=5e9,
            c_dp=1.25e9,
            peak_flops=71e12,
            mu=0.3,
        ),
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert all(len(line) <= 120 for line in text.splitlines())
    for expected in (
        "tp 680 125.000 MiB 83.008 GiB",
        "dp 1 741.474 MiB 741.474 MiB",
        "embedding_sync 1 96.191 MiB 96.191 MiB",
        "8 node 1, rail 0 1,000.000 MiB pp",
        "directed pairs that talk: 128 of 992 (12.90%): tp 32, pp 48, dp 32, embedding_sync 16",
        "leave the nodes 48.378 GiB 1.85% of 2.557 TiB",
        "busiest NIC sends 1.953 GiB node 1, rail 0",
        "node 3 sends 8.564 GiB",
        "computation 33.1799 s 49.92% at 71 TFLOP/s × 0.3",
        "iteration 66.4720 s 100.00%",
        "communication ratio 0.2314356; bubble ratio 0.269409, without dp 3/11 = 0.272727",
    ):
        assert expected in lines
    assert "assumed" not in text


def test_the_text_says_what_the_split_of_layers_means(capsys: pytest.CaptureFixture[str]) -> None:
    uneven = (
        "stages: the layers in order, 14 to each pipeline rank, fewer to the last ones; what passes between them is pp"
    )
    assert uneven in text_of(capsys, *options(layers=54, pp=4)).splitlines()
    assert "stages: the layers in order, 14 to each pipeline rank; what" in text_of(capsys, *options(layers=56, pp=4))
    assert "stages: each pipeline rank holds the same part" in text_of(capsys, *options(layers=54, pp=4), "--paper")
    assert "stages:" not in text_of(capsys, *options(pp=1))


def test_the_text_marks_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys, *options(c_pp=5e9))
    assert "at 360 GB/s*" in text
    assert "at 5 GB/s\n" in text
    assert "* assumed" in text


def test_the_text_says_which_terms_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    left_out = "not counted: AllReduces of output layer and loss on the last stage (--output-layer counts them)"
    assert left_out in text_of(capsys, *options()).splitlines()
    counted = text_of(capsys, *options(), "--output-layer")
    assert "AllReduces of output layer and loss" in counted
    assert "not counted" not in counted
    assert "not counted" not in text_of(capsys, *options(tp=1))
    assert "with final layer norm" in text_of(capsys, *options())


def test_a_job_of_one_rank_sends_nothing_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys, *options(pp=1, tp=1, dp=1))
    assert "nothing: it is alone" in text
    assert "1 rank on 1 node of 1 GPU" in text


def test_many_nodes_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys, *options(dp=64, global_batch=512))
    assert "32 nodes" in text
    assert "busiest node sends" in text
    assert "node 31 sends" not in text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.000 KiB"),
        (777_492_000, "741.474 MiB"),
        (1 << 30, "1.000 GiB"),
        (1 << 62, "4,096.000 PiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit_they_reach(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_the_help_has_an_example_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["estimate", "--help"])
    shown = capsys.readouterr().out
    words = shown[shown.index("railscope estimate --layers") :].split("\n\n")[0].replace("\\\n", " ").split()[1:]
    assert main(words) == 0
    assert "680" in capsys.readouterr().out


def test_the_model_needs_neither_probes_nor_a_host() -> None:
    script = (
        "import sys, railscope.agent.estimate.command\n"
        "unwanted = ('railscope.probes', 'railscope.exporters', 'railscope.testbed', 'pyroute2', 'elftools')\n"
        # What makes text printable looks at no host.
        "text = ('railscope.probes', 'railscope.probes.printable')\n"
        "heavy = [m for m in sys.modules if m.startswith(unwanted) and m not in text]\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert (done.returncode, done.stderr) == (0, "")
