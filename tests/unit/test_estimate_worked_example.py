"""`railscope estimate` on the paper's GPT "3B": every published or recalculated number, each in a test of its own.

(l, h, s, gb, b, m) = (54, 2000, 1024, 1024, 32, 8), (p, t, d) = (4, 2, 4), V = 50,257, 32 GPUs as 4 nodes of 8.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from typing import Any

import pytest

from railscope.agent.cli.main import main

MIB = 1 << 20
SHAPE = (
    "--layers 54 --hidden 2000 --seq 1024 --global-batch 1024 --micro-batch 32 --vocab 50257 "
    "--pp 4 --tp 2 --dp 4 --gpus-per-node 8"
).split()
RATES = "--c-tp 6e9 --c-pp 5e9 --c-dp 1.25e9 --peak-flops 71e12 --mu 0.3".split()


def estimate(*options: str) -> dict[str, Any]:
    """What the command prints as JSON."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert main(["estimate", *SHAPE, *RATES, "--json", *options]) == 0
    content: dict[str, Any] = json.loads(printed.getvalue())
    return content


@pytest.fixture(scope="module")
def exact() -> dict[str, Any]:
    return estimate()


@pytest.fixture(scope="module")
def paper() -> dict[str, Any]:
    return estimate("--paper")


@pytest.fixture(scope="module")
def custom() -> dict[str, Any]:
    return estimate("--mapping", "custom")


def test_a_message_between_layers_is_125_mib(exact: dict[str, Any]) -> None:
    assert exact["volumes"]["tp"]["message_bytes"] == 131_072_000 == 125 * MIB


def test_tensor_parallelism_of_stage_0_is_680_messages(exact: dict[str, Any]) -> None:
    assert exact["volumes"]["tp"]["messages"] == 680


def test_tensor_parallelism_of_stage_0_is_89_128_960_000_bytes(exact: dict[str, Any]) -> None:
    assert exact["volumes"]["tp"]["bytes"] == 89_128_960_000 == 85_000 * MIB


def test_the_pipeline_is_8_sends_of_125_mib(exact: dict[str, Any]) -> None:
    row = {"messages": 8, "message_bytes": 125 * MIB, "bytes": 1000 * MIB}
    assert exact["volumes"]["pp_send"] == row


def test_the_pipeline_is_8_receives_of_125_mib(exact: dict[str, Any]) -> None:
    row = {"messages": 8, "message_bytes": 125 * MIB, "bytes": 1000 * MIB}
    assert exact["volumes"]["pp_recv"] == row


def test_the_pipeline_is_16_messages_in_both_directions(exact: dict[str, Any]) -> None:
    assert exact["volumes"]["pp_send"]["messages"] + exact["volumes"]["pp_recv"]["messages"] == 16


def test_data_parallelism_is_one_message_of_741_474_mib(exact: dict[str, Any]) -> None:
    assert exact["volumes"]["dp"] == {"messages": 1, "message_bytes": 777_492_000, "bytes": 777_492_000}
    assert round(777_492_000 / MIB, 3) == 741.474


def test_a_rank_of_stage_0_reduces_the_gradients_of_388_746_000_parameters(exact: dict[str, Any]) -> None:
    assert exact["volumes"]["dp"]["bytes"] == 2 * 388_746_000


def test_the_embedding_sync_is_one_message_of_96_191_mib(exact: dict[str, Any]) -> None:
    assert exact["volumes"]["embedding_sync"] == {
        "messages": 1,
        "message_bytes": 100_864_000,
        "bytes": 25_216 * 2000 * 2,
    }
    assert round(100_864_000 / MIB, 3) == 96.191


def test_the_vocabulary_is_padded_to_50_432(exact: dict[str, Any]) -> None:
    assert exact["configuration"]["padded_vocabulary"] == 50_432


def test_the_model_has_2_695_966_000_parameters(exact: dict[str, Any], paper: dict[str, Any]) -> None:
    assert exact["parameters"] == paper["parameters"] == 2_695_966_000


def test_there_are_8_micro_batches(exact: dict[str, Any]) -> None:
    assert exact["configuration"]["micro_batches"] == 8


def test_128_of_992_directed_pairs_talk(exact: dict[str, Any]) -> None:
    assert (exact["pairs"]["total"], exact["pairs"]["possible"]) == (128, 992)


def test_the_pairs_are_32_of_tensors_48_of_the_pipeline_32_of_data_and_16_of_embeddings(exact: dict[str, Any]) -> None:
    assert {name: exact["pairs"][name] for name in ("tp", "pp", "dp", "embedding_sync")} == {
        "tp": 32,
        "pp": 48,
        "dp": 32,
        "embedding_sync": 16,
    }


def test_the_custom_mapping_has_as_many_pairs(custom: dict[str, Any]) -> None:
    assert (custom["pairs"]["total"], custom["pairs"]["possible"]) == (128, 992)


def test_rank_0_sends_to_1_2_8_and_24_by_the_default_mapping(exact: dict[str, Any]) -> None:
    assert exact["pairs"]["rank_0"] == {
        "1": 85_000 * MIB,
        "2": 1_166_238_000,
        "8": 1000 * MIB,
        "24": 100_864_000,
    }
    assert round(1_166_238_000 / MIB, 2) == 1112.21
    assert round(100_864_000 / MIB, 2) == 96.19


def test_rank_0_sends_to_1_2_6_and_8_by_the_custom_mapping(custom: dict[str, Any]) -> None:
    assert custom["pairs"]["rank_0"] == {
        "1": 85_000 * MIB,
        "2": 1000 * MIB,
        "6": 100_864_000,
        "8": 1_166_238_000,
    }


def test_pipeline_and_embeddings_leave_the_nodes_by_the_default_mapping(exact: dict[str, Any]) -> None:
    assert exact["inter_node_bytes"] == 48 * 1000 * MIB + 16 * 100_864_000


def test_only_the_gradients_leave_the_nodes_by_the_custom_mapping(custom: dict[str, Any]) -> None:
    layer = 12 * 2000**2 // 2 + 7 * 2000 // 2 + 6 * 2000
    word, position = 25_216 * 2000, 1024 * 2000
    held = [14 * layer + word + position, 14 * layer, 14 * layer, 12 * layer + word + 2 * 2000]
    gradients = sum(2 * parameters * 2 * 3 // 4 for parameters in held)
    assert custom["inter_node_bytes"] == 8 * gradients
    assert custom["node_transmit_bytes"] == [2 * gradients] * 4


def test_the_nodes_in_the_middle_of_the_pipeline_send_both_ways(exact: dict[str, Any]) -> None:
    end = 8 * (1000 * MIB + 100_864_000)
    assert exact["node_transmit_bytes"] == [end, 16 * 1000 * MIB, 16 * 1000 * MIB, end]


def test_neither_mapping_crosses_rails(exact: dict[str, Any], custom: dict[str, Any]) -> None:
    assert (exact["cross_rail_bytes"], custom["cross_rail_bytes"]) == (0, 0)


@pytest.mark.parametrize("options", [(), ("--paper",), ("--mapping", "custom")])
@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("t_tp", 14.155776),
        ("t_pp", 0.4194304),
        ("t_dp", 0.8087898),
        ("t_comp", 33.1798738),
        ("t_bubble", 17.9081551),
        ("t_iter", 66.4720250),
    ],
)
def test_the_time_check_holds_to_every_digit(options: tuple[str, ...], name: str, seconds: float) -> None:
    assert round(estimate(*options)["times"][name], 7) == seconds


def test_communication_takes_0_2314356_of_the_iteration(exact: dict[str, Any]) -> None:
    assert round(exact["r_comm"], 7) == 0.2314356


def test_the_bubble_takes_0_269409_of_the_iteration(exact: dict[str, Any]) -> None:
    assert round(exact["r_bubble"], 6) == 0.269409


def test_the_bubble_takes_3_of_11_without_data_parallelism(exact: dict[str, Any]) -> None:
    assert exact["r_bubble_without_dp"] == 3 / 11


def test_the_paper_s_equation_2_gives_648_messages_4_7_percent_less(paper: dict[str, Any]) -> None:
    assert paper["volumes"]["tp"]["messages"] == 648
    assert round(648 / 680 - 1, 3) == -0.047


def test_the_paper_s_equation_4_gives_642_77_mib_13_3_percent_less(paper: dict[str, Any]) -> None:
    assert paper["volumes"]["dp"]["bytes"] == 673_991_500
    assert round(paper["volumes"]["dp"]["bytes"] / MIB, 2) == 642.77
    assert round(673_991_500 / 777_492_000 - 1, 3) == -0.133


def test_the_paper_s_equations_have_no_embedding_sync(paper: dict[str, Any]) -> None:
    assert paper["volumes"]["embedding_sync"] == {"messages": 0, "message_bytes": 0, "bytes": 0}
    assert paper["pairs"]["embedding_sync"] == 0


def test_without_recomputation_a_layer_has_four_allreduces_and_three_quarters_of_the_flop() -> None:
    kept = estimate("--no-recompute")
    assert kept["volumes"]["tp"]["messages"] == 8 * (14 * 4 + 1)
    assert kept["times"]["t_tp"] == pytest.approx(14.155776 * 4 / 6)
    assert kept["times"]["t_comp"] == pytest.approx(33.1798738 * 6 / 8)


def test_nodes_send_8010_53_mib_by_the_custom_mapping_final_layer_norm_included(custom: dict[str, Any]) -> None:
    assert {round(count / MIB, 2) for count in custom["node_transmit_bytes"]} == {8010.53}


def test_output_layer_and_loss_are_taken_by_option_and_named(exact: dict[str, Any]) -> None:
    counted = estimate("--output-layer", "--stage", "3")
    assert counted["volumes"]["loss"] == {"messages": 24, "message_bytes": 131_072, "bytes": 24 * 131_072}
    assert counted["volumes"]["tp"]["messages"] == estimate("--stage", "3")["volumes"]["tp"]["messages"] + 8
    assert counted["pairs"]["total"] == exact["pairs"]["total"]
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert main(["estimate", *SHAPE, *RATES]) == 0
    assert "final layer norm" in printed.getvalue()
    assert "--output-layer counts them" in printed.getvalue()
