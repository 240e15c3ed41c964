"""Files, archives and compressed files as streams, JSON one element at a time, and which format a file has."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.imports import json_stream, sources
from railscope.agent.imports.facts import ImportFailure, Problems, printable
from railscope.agent.imports.json_stream import JsonStream, small_number, whole_number
from railscope.agent.imports.runner import detect_format_of_head
from railscope.agent.imports.sources import Sources, numbered_lines
from tests.unit.importing import SAMPLES, imported, written

LOG = SAMPLES / "nccl-2.32.3-split.log"


def read(path: Path, problems: Problems | None = None) -> dict[str, bytes]:
    """The content of every source in a file, by name."""
    found = {}
    with Sources([path], problems or Problems()) as opened:
        for source in opened:
            with source.open() as stream:
                found[source.label] = stream.read()
    return found


def archive(path: Path, mode: str, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, mode) as made:  # type: ignore[call-overload]
        for member, content in members:
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return path


def test_a_compressed_log_is_imported_as_the_log_itself(tmp_path: Path) -> None:
    path = written(tmp_path, "log.gz", gzip.compress(LOG.read_bytes()))
    assert len(imported(tmp_path, path).calls()) == 8


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_an_archive_is_imported_member_by_member(tmp_path: Path, mode: str) -> None:
    lines = LOG.read_text().splitlines()
    members = [
        (tarfile.TarInfo(f"logs/rank{rank}.log"), "\n".join(line for line in lines if f":{pid}:" in line).encode())
        for rank, pid in enumerate(range(15896, 15900))
    ]
    members.append((tarfile.TarInfo("logs/compressed.log.gz"), gzip.compress(b"nothing of NCCL's")))
    result = imported(tmp_path, archive(tmp_path / "logs.tar", mode, members))
    assert len(result.calls()) == 8
    assert len({row["comm"] for row in result.rows("communicators")}) == 3
    assert [one.file for one in result.imported.problems.first] == [f"{tmp_path}/logs.tar!logs/compressed.log.gz"]


def test_members_with_harmful_names_are_read_and_written_nowhere(tmp_path: Path) -> None:
    harmful = [tarfile.TarInfo("/tmp/../etc/owned"), tarfile.TarInfo("../../owned\n\x1b[31m")]
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    device = tarfile.TarInfo("device")
    device.type = tarfile.CHRTYPE
    folder = tmp_path / "in"
    folder.mkdir()
    path = archive(folder / "a.tar", "w", [(one, b"x") for one in harmful] + [(link, b""), (device, b"")])
    problems = Problems()
    assert read(path, problems) == {"owned": b"x", "owned\n\x1b[31m": b"x"}
    assert [str(one).split(": ", 1)[1] for one in problems.first] == [
        "link is a link or a device: it is left out",
        "device is a link or a device: it is left out",
    ]
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["a.tar", "in"]
    with Sources([path], problems) as opened:
        assert all(source.name.isprintable() for source in opened)


def test_a_compressed_bomb_ends_where_its_bound_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_FREE_BYTES", 1 << 16)
    bomb = written(tmp_path, "bomb.gz", gzip.compress(b"0" * (1 << 24)))
    with Sources([bomb], Problems()) as opened, opened[0].open() as stream:
        assert len(stream.read()) <= bomb.stat().st_size * 200
        assert "expands to more than" in stream.damage
    inside = archive(tmp_path / "bomb.tar.gz", "w:gz", [(tarfile.TarInfo("b.gz"), gzip.compress(b"0" * (1 << 24)))])
    assert len(read(inside)["b"]) < 1 << 20


def test_an_archive_whose_header_claims_to_be_huge_is_not_read_into_memory(tmp_path: Path) -> None:
    header = tarfile.TarInfo("PaxHeader")
    header.type, header.size = tarfile.XHDTYPE, 1 << 30
    content = header.tobuf(tarfile.USTAR_FORMAT) + b"0" * 4096
    problems = Problems()
    assert read(written(tmp_path, "a.tar", content), problems) == {}
    assert [one.reason for one in problems.first] == [
        "the archive is damaged, the rest is left out: a header of 1073741824 bytes"
    ]


def test_an_archive_with_a_file_of_less_than_nothing_ends_there(tmp_path: Path) -> None:
    content = bytearray(512 * 4)
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("rank0.json"))
    content[:512] = whole.getvalue()[:512]
    content[124:136] = b"\xff" * 4 + (-1024).to_bytes(8, "big", signed=True)
    content[148:156] = b"%06o\0 " % (sum(content[:148]) + 8 * 32 + sum(content[156:512]))
    problems = Problems()
    assert read(written(tmp_path, "negative.tar", bytes(content)), problems) == {}
    assert "damaged" in problems.first[0].reason


class Counted(io.FileIO):
    """A file that counts what is read of it."""

    bytes_read = 0

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(-1 if size is None else size) or b""
        self.bytes_read += len(content)
        return content


def test_a_compressed_archive_is_not_unpacked_again_for_each_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ranks.tar.gz"
    dice = random.Random(1)
    with tarfile.open(path, "w:gz") as archive:
        for rank in range(20):
            event = {"ph": "X", "cat": "kernel", "name": "k", "ts": rank, "dur": 1}
            content = json.dumps({"noise": dice.randbytes(50_000).hex(), "traceEvents": [event]})
            member = tarfile.TarInfo(f"rank{rank}.json")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content.encode()))
    with Counted(path) as file:
        monkeypatch.setattr(sources, "_opened_to_seek", lambda _path: gzip.GzipFile(fileobj=file, mode="rb"))
        assert [one.kernels for one in imported(tmp_path, path).imported.nodes] == [20]
        # Once to find the members, once to tell their format, once to know them again, and once to import them.
        assert file.bytes_read < 5 * path.stat().st_size


def test_damage_in_a_compressed_file_costs_only_what_follows(tmp_path: Path) -> None:
    whole = gzip.compress(LOG.read_bytes())
    result = imported(tmp_path, written(tmp_path, "cut.gz", whole[: len(whole) * 9 // 10]))
    assert 0 < len(result.calls()) < 8
    assert any(line == 0 and "damaged from here on" in reason for line, reason in result.skipped)


def test_an_archive_that_is_cut_keeps_its_first_members(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", "w", [(tarfile.TarInfo("one.log"), LOG.read_bytes())] * 2)
    path.write_bytes(path.read_bytes()[: 512 * 2 + LOG.stat().st_size + 512])
    assert len(imported(tmp_path, path).calls()) >= 8


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b", b"\x1f\x8b\x08\x00garbage"])
def test_a_file_with_nothing_in_it_is_one_line_to_the_user(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ImportFailure, match=r"^\S+/f: "):
        imported(tmp_path, written(tmp_path, "f", content))


def test_a_missing_file_and_a_folder_are_one_line_to_the_user(tmp_path: Path) -> None:
    with pytest.raises(ImportFailure, match="nowhere: No such file or directory"):
        imported(tmp_path, tmp_path / "nowhere")
    with pytest.raises(ImportFailure, match="is a folder: name the files in it"):
        imported(tmp_path, tmp_path)


def test_lines_have_their_numbers_and_endless_ones_are_none(tmp_path: Path) -> None:
    path = written(tmp_path, "lines", b"one\r\n" + b"x" * (1 << 20) + b"\n\xff\nlast")
    with Sources([path], Problems()) as opened, opened[0].open() as stream:
        assert list(numbered_lines(stream)) == [(1, "one"), (2, None), (3, "\ufffd"), (4, "last")]


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-999, 10**17), st.text(max_size=9), st.just('é\\"\n')),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(JSON, max_size=6), JSON, st.sampled_from([None, 1]), st.integers(1, 9))
def test_elements_are_those_of_the_whole_however_the_text_is_cut(
    elements: list[Any], other: Any, indent: int | None, window: int
) -> None:
    text = json.dumps({"before": other, "events": elements, "behind": other}, indent=indent, ensure_ascii=False)
    found, problems = parsed(text, window)
    assert found == [("before", other), *[("events", one) for one in elements], ("behind", other)]
    assert problems == []


def parsed(text: str, window: int) -> tuple[list[tuple[str, Any]], list[tuple[int, str]]]:
    """What a stream of this text, read so many bytes at a time, is made of."""
    problems: list[tuple[int, str]] = []
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(json_stream, "_READ_BYTES", window)
        path = written(Path(folder), "t.json", text)
        with Sources([path], Problems()) as opened, opened[0].open() as stream:
            elements = JsonStream(stream, {"events"}, lambda line, reason: problems.append((line, reason))).elements()
            return [(one.key, one.value) for one in elements], problems


def test_a_broken_element_costs_itself_and_names_its_line() -> None:
    found, problems = parsed('{"events": [\n{"a": 1},\n{"a": oh, "b": 2},\n{"a": 3}\n]}', 1 << 20)
    assert found == [("events", {"a": 1}), ("events", {"a": 3})]
    assert [line for line, _ in problems] == [3]


@pytest.mark.parametrize(
    ("element", "reason"),
    [
        ("[" * 3_000_000, "nested too deep"),
        ('{"a":' * 1_000_000, "nested too deep"),
        ('"' + "x" * (3 << 20) + '"', "too large"),
        ("[" + "1," * (2 << 20) + "1]", "too large"),
        ("9" * 10_000, "a number of too many digits"),
    ],
)
def test_an_element_that_no_profiler_writes_is_passed_over_in_bounded_time(
    element: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_stream, "_LARGEST_ELEMENT", 1 << 21)
    began = time.process_time()
    found, problems = parsed('{"events": [\n{"a": 1},\n' + element + ',\n{"a": 3}\n]}', 1 << 16)
    assert found[0] == ("events", {"a": 1})
    assert problems[0] == (3, f"no JSON: {reason}")
    assert time.process_time() - began < 5


@pytest.mark.parametrize("value", ["NaN", "-Infinity", '"line\nbreak"'])
def test_what_profilers_write_beside_the_standard_is_read(value: str) -> None:
    found, problems = parsed(f'{{"events": [{{"a": {value}}}, {{"a": 3}}]}}', 1 << 16)
    assert [key for key, _ in found] == ["events", "events"]
    assert problems == []


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet='{}[]",:events0-9. \n\\', max_size=80), st.integers(1, 20))
def test_no_text_makes_the_reader_of_json_fail_or_hang(text: str, window: int) -> None:
    found, problems = parsed('{"events": [' + text, window)
    assert len(found) + len(problems) <= len(text) + 2


def test_numbers_beyond_their_bits_are_none() -> None:
    assert whole_number("12") == whole_number(12) == 12
    assert [whole_number(one) for one in (True, 1.0, "1.0", "", None, 1 << 63, "9" * 25)] == [None] * 7
    assert [small_number(one) for one in (7, -1, 1 << 31)] == [7, None, None]


def test_text_of_others_is_fit_for_a_terminal() -> None:
    assert printable("a\x1b[31m\nb") == "a [31m b"
    assert len(printable("x" * 1000)) == 160


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nccl-2.32.3-split.log", "nccl-log"),
        ("nccl-launchers.log", "nccl-log"),
        ("gpu-node-1_4101.1700000000123456789.pt.trace.json", "kineto"),
        ("gpt.0.et", "chakra"),
        ("gpt.0.json", "chakra"),
        ("pytorch_et_rank1.json", "chakra"),
        ("pytorch_et_old_rank0.json", "chakra"),
        ("nccl_trace_rank_0", "torch-flight-recorder"),
        ("nccl_trace_rank_1.json", "torch-flight-recorder"),
        ("nccl-inspector.log", "nccl-inspector"),
        ("deepspeed.log", "deepspeed"),
    ],
)
def test_each_format_is_known_by_its_beginning(name: str, expected: str) -> None:
    assert detect_format_of_head((SAMPLES / name).read_bytes()) == expected


@pytest.mark.parametrize(
    "head", [b"", b"hello\n", b"{}", b"[1, 2]", b"\x7fELF\x02\x01\x01", b"root:x:0:0:root:/root\n"]
)
def test_other_files_are_of_no_known_format(head: bytes) -> None:
    assert detect_format_of_head(head) is None


@given(st.binary(max_size=40))
def test_no_beginning_makes_the_detection_fail(head: bytes) -> None:
    detect_format_of_head(head)


@pytest.mark.parametrize("size", [1, 3, 1 << 17, (1 << 17) + 1])
def test_lines_are_cut_at_their_ends_wherever_reads_end(tmp_path: Path, size: int) -> None:
    longest = sources.LONGEST_LINE_BYTES
    content = [
        b"a",
        b"",
        b"b\r",
        "ü\u2028ü".encode(),
        b"\xff\xc3",
        b"x" * (longest - 1),
        b"y" * longest,
        b"z" * 3 * longest,
    ]
    content += [b"w" * size, b"", b"last"]
    for end in (b"", b"\n"):
        file = written(tmp_path, "log", b"\n".join(content) + end)
        with Sources([file], Problems()) as (source,), source.open() as stream:
            found = list(numbered_lines(stream))
        expected = [None if len(line) >= longest else line.decode("utf-8", "replace").rstrip("\r") for line in content]
        assert found == list(enumerate(expected, 1))
