"""Sources for libbpf in the words of bcc: what is rewritten, and that another shape is refused rather than guessed."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.probes.loading.bcc_source import SourceError, bcc_source, read_source
from railscope.probes.nccl.programs.calls import CallRings, EnqueueTime, ProgramSettings, constants

SHIPPED = Path(__file__).resolve().parents[2] / "probes/bpf/nccl.bpf.c"

SOURCE = """
#include <linux/bpf.h>
char _license[] SEC("license") = "Dual BSD/GPL";
/* "Set" before load; never const volatile __u8 wrong = 1; */
const volatile __u64 device = 0; // of the reader
const volatile __u32 shift = 4;
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC); /* many CPUs */
	__uint(max_entries, 64 * 16);
	__type(key, struct name);
	__type(value, __u64);
} totals SEC(".maps");
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} events SEC(".maps");
SEC("uprobe")
int on_entry(struct registers *ctx)
{
	__u64 *found = bpf_map_lookup_elem(&totals, (ctx->rdi ? &first(1, 2) : &second)), zero = 0;
	__u64 *event = bpf_ringbuf_reserve(&events, sizeof(*event), 0);
	if (!bpf_map_lookup_elem(&totals, &third))
		bpf_map_update_elem(&totals, &third, &zero, BPF_NOEXIST);
	bpf_map_update_elem(&totals, &third, &zero, BPF_ANY);
	bpf_map_delete_elem(&totals, &third);
	bpf_ringbuf_submit(event, BPF_RB_NO_WAKEUP);
	return 0;
}
SEC("uretprobe")
int on_return(struct registers *ctx)
{
	return 0;
}
"""
CONSTANTS = struct.pack("@QI", (1 << 64) - 2, 6)


def test_maps_are_declared_as_tables_with_their_sizes_and_flags() -> None:
    rewritten = bcc_source(SOURCE, {"events": 1 << 16}, CONSTANTS)
    assert rewritten.maps == ("totals", "events")
    assert 'BPF_F_TABLE("percpu_hash", struct name, __u64, totals, 64 * 16, BPF_F_NO_PREALLOC);' in rewritten.text
    assert "BPF_RINGBUF_OUTPUT(events, (65536) / PAGE_SIZE);" in rewritten.text
    assert "SEC(" not in rewritten.text


def test_calls_on_maps_become_calls_of_the_table() -> None:
    text = bcc_source(SOURCE, {}, CONSTANTS).text
    assert "totals.lookup((ctx->rdi ? &first(1, 2) : &second)), zero = 0;" in text
    assert "events.ringbuf_reserve(sizeof(*event));" in text
    assert "if (!totals.lookup(&third))" in text
    assert "totals.insert(&third, &zero);" in text
    assert "totals.update(&third, &zero);" in text
    assert "totals.delete(&third);" in text
    assert "bpf_ringbuf_submit(event, BPF_RB_NO_WAKEUP);" in text
    assert "bpf_map_" not in text


def test_constants_carry_the_loaders_values_and_programs_are_named() -> None:
    rewritten = bcc_source(SOURCE, {}, CONSTANTS)
    assert f"static const __u64 device = {(1 << 64) - 2}ULL;" in rewritten.text
    assert "static const __u32 shift = 6ULL;" in rewritten.text
    assert rewritten.programs == ("on_entry", "on_return")
    assert "#define BPF_LICENSE Dual BSD/GPL" in rewritten.text


@pytest.mark.parametrize(
    ("replaced", "by", "said"),
    [
        ("BPF_MAP_TYPE_PERCPU_HASH", "BPF_MAP_TYPE_HASH_OF_MAPS", "no such map as totals"),
        ("__type(value, __u64);", "__type(value, __u64);\n\t__uint(pinning, LIBBPF_PIN_BY_NAME);", "pinning"),
        ("BPF_NOEXIST", "BPF_EXIST", "BPF_EXIST"),
        ("&events, sizeof(*event), 0", "&events, sizeof(*event), 1", "bpf_ringbuf_reserve"),
        ("bpf_map_delete_elem(&totals, ", "bpf_map_delete_elem(map, ", "bpf_map_delete_elem"),
        ("bpf_map_delete_elem(&totals, &third)", "bpf_for_each_map_elem(&totals, f, 0, 0)", "map totals"),
        ("const volatile __u64", "const volatile struct name", "constants are 4 bytes"),
        ("const volatile __u32", "const volatile unsigned", "unsigned shift"),
        ('SEC("uretprobe")', 'SEC("fentry/nanosleep")', "fentry"),
        ('char _license[] SEC("license") = "Dual BSD/GPL";', "", "0 licences"),
        ("#include <linux/bpf.h>", "extern void f(void) __ksym;", "__ksym"),
        ("} totals SEC", "} __hidden totals SEC", "lookup_elem(&totals"),
    ],
)
def test_another_shape_is_refused_and_named(replaced: str, by: str, said: str) -> None:
    assert replaced in SOURCE
    with pytest.raises(SourceError, match=re.escape(said)):
        bcc_source(SOURCE.replace(replaced, by), {}, CONSTANTS)


def test_sizes_that_do_not_fit_the_source_are_refused() -> None:
    with pytest.raises(SourceError, match="no map nowhere"):
        bcc_source(SOURCE, {"nowhere": 1}, CONSTANTS)
    with pytest.raises(SourceError, match="12 bytes, 13 are given"):
        bcc_source(SOURCE, {}, CONSTANTS + b"\0")


@given(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 32) - 1), st.integers(1, 1 << 24))
def test_every_value_arrives_as_it_was_given(device: int, shift: int, entries: int) -> None:
    text = bcc_source(SOURCE, {"totals": entries}, struct.pack("@QI", device, shift)).text
    assert f"__u64 device = {device}ULL;" in text
    assert f"__u32 shift = {shift}ULL;" in text
    assert f"totals, {entries}, BPF_F_NO_PREALLOC);" in text


def test_headers_beside_the_source_stand_in_it_once(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text("first\n#include <linux/types.h>\n")
    (tmp_path / "b.h").write_text('second\n#include "a.h"\n')
    main = tmp_path / "main.bpf.c"
    main.write_text('#include "a.h"\n  # include "b.h" /* again */\nthird\n#include "main.bpf.c"\n')
    assert read_source(main).split() == ["first", "#include", "<linux/types.h>", "second", "third"]


def test_the_shipped_programs_can_be_put_in_bccs_words() -> None:
    settings = ProgramSettings()
    source = read_source(SHIPPED)
    rings = CallRings(4, 1 << 16)
    rewritten = bcc_source(source, rings.map_entries, constants(settings, EnqueueTime.PAIR) + rings.constants)
    assert set(rewritten.programs) >= {
        "collective_entry",
        "collective_return",
        "init_entry",
        "init_return",
        "end_entry",
        "call_entry",
        "call_return",
    }
    assert len(rewritten.maps) == len(set(rewritten.maps)) == source.count('SEC(".maps")')
    assert re.search(r"\bbpf_map_(lookup|update|delete)_elem\b", rewritten.text) is None
