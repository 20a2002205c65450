"""Files of every format give the same conversations; bad records are skipped, counted and named."""

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import ipc, parquet

from each import each
from eyas.data import files as files_module
from eyas.data.bad_records import BadRecords
from eyas.data.files import ConversationReader, expand_files, read_conversations
from eyas.errors import UserError

ROWS = [
    {
        "conversations": [
            {"from": "human", "value": f"Say {i} \u2013 \U0001f600"},
            {"from": "gpt", "value": "{" * (i % 3) + '"\\'},
        ]
    }
    for i in range(40)
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def zstd(data: bytes) -> bytes:
    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


def arrow_stream(rows: list[dict[str, object]], path: Path) -> None:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(path), "wb") as sink, ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def questions(path: Path, bad: BadRecords | None = None) -> list[str]:
    return [str(c.messages[0]["content"]) for c in read_conversations(path, bad)]


EXPECTED = [row["conversations"][0]["value"] for row in ROWS]


@each(
    ("name", "data"),
    [
        ("lines.jsonl", LINES),
        ("bom.jsonl", b"\xef\xbb\xbf" + LINES),
        ("lines.jsonl.gz", gzip.compress(LINES)),
        ("lines.jsonl.zst", zstd(LINES)),
        ("array.json", json.dumps(ROWS).encode()),
        ("bom.json", b"\xef\xbb\xbf" + json.dumps(ROWS, ensure_ascii=False).encode()),
        ("pretty.json", json.dumps(ROWS, indent=4).encode()),
        ("pretty.json.gz", gzip.compress(json.dumps(ROWS, indent=1).encode())),
        ("array.json.zst", zstd(json.dumps(ROWS, ensure_ascii=False).encode())),
        ("no-suffix", json.dumps(ROWS).encode()),
        ("misnamed.jsonl", gzip.compress(json.dumps(ROWS, indent=2).encode())),
        ("pretty-objects.json", "\n".join(json.dumps(row, indent=2) for row in ROWS).encode()),
        ("array-of-lines.json", b"[\n" + LINES.rstrip().replace(b"\n", b",\n") + b"\n]\n"),
    ],
)
def test_every_container_gives_the_same_conversations(
    tmp_path: Path, name: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(data)
    for chunk in (16, 1 << 20):  # records that span chunks, and chunks that hold all of them
        monkeypatch.setattr(files_module, "CHUNK", chunk)
        assert questions(tmp_path / name) == EXPECTED


def test_arrow_and_parquet_give_the_same_conversations(tmp_path: Path) -> None:
    arrow_stream(ROWS, tmp_path / "stream.arrow")
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.OSFile(str(tmp_path / "file.arrow"), "wb") as sink, ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    parquet.write_table(table, tmp_path / "table.parquet", row_group_size=7)
    for name in ("stream.arrow", "file.arrow", "table.parquet"):
        assert questions(tmp_path / name) == EXPECTED


def test_sequences_of_objects_may_be_stored_as_columns(tmp_path: Path) -> None:
    arrow_stream(
        [{"conversations": {"from": ["human", "gpt"], "value": ["Hi", "Hello"]}, "tools": '[{"type": "function"}]'}],
        tmp_path / "a.arrow",
    )
    (read,) = read_conversations(tmp_path / "a.arrow")
    assert [message["content"] for message in read.messages] == ["Hi", "Hello"]
    assert read.tools == ({"type": "function"},)


@each("indent", [None, 2])
@each("compress", [None, gzip.compress])
def test_a_file_cut_off_in_its_last_record_gives_the_whole_ones(
    tmp_path: Path, indent: int | None, compress: Callable[[bytes], bytes] | None
) -> None:
    text = json.dumps(ROWS, indent=indent).encode()
    cut = text[: text.rindex(b"human") + 30]
    (tmp_path / "cut.json").write_bytes(compress(cut) if compress else cut)
    bad = BadRecords()
    assert questions(tmp_path / "cut.json", bad) == EXPECTED[:-1]
    assert bad.by_reason == {"the file is cut off": 1}
    assert "cut.json:40" in bad.examples["the file is cut off"][0]
    with pytest.raises(UserError, match=r"cut\.json:40: the file ends in the middle"):
        questions(tmp_path / "cut.json")


@each(("name", "squeeze"), [("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstd)])
def test_a_compressed_file_that_is_cut_off_gives_what_can_be_read(
    tmp_path: Path, name: str, squeeze: Callable[[bytes], bytes]
) -> None:
    whole = squeeze(LINES * 50)
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    bad = BadRecords()
    read = questions(tmp_path / name, bad)
    assert read == (EXPECTED * 50)[: len(read)]
    assert bad
    assert all("cut off" in reason or reason == "not JSON" for reason in bad.by_reason)


@each("indent", [None, 2])
def test_a_broken_record_inside_an_array_is_one_bad_record(tmp_path: Path, indent: int | None) -> None:
    records = [json.dumps(row, indent=indent) for row in ROWS]
    records[5] = records[5].replace('"human"', 'human"')
    records[9] = records[9].replace(":", "", 1)
    records[11] = records[11].replace('"Say 11', '"Say 11" "')
    (tmp_path / "a.json").write_text(f"[{', '.join(records)}]")
    bad = BadRecords()
    assert questions(tmp_path / "a.json", bad) == [q for i, q in enumerate(EXPECTED) if i not in (5, 9, 11)]
    assert (bad.read, bad.by_reason) == (40, {"not JSON": 3})
    assert [example.split(": ")[0] for example in bad.examples["not JSON"]] == [
        f"{tmp_path}/a.json:{n}" for n in (6, 10, 12)
    ]


def test_bad_lines_are_skipped_counted_by_reason_and_named(tmp_path: Path) -> None:
    lines = LINES.splitlines()
    lines[3] = b'{"conversations": ['
    lines[7] = b"\xff\xfe{}"
    lines[8] = b'{"conversations": [{"from": "wizard", "value": "?"}]}'
    lines[20] = b'{"text": "x"}'
    lines[21] = b'{"prompt": "\\ud83d"}'
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    bad = BadRecords()
    assert len(questions(tmp_path / "a.jsonl", bad)) == 35
    assert bad.read == 40
    assert dict(bad.by_reason) == {
        "not JSON": 1,
        "not UTF-8": 1,
        "unknown role 'wizard'": 1,
        "none of the known formats": 1,
        "half a character": 1,
    }
    assert bad.examples["not JSON"][0].startswith(f"{tmp_path}/a.jsonl:4: ")


def test_bytes_that_are_not_utf8_cost_an_array_one_record(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(json.dumps(ROWS).encode().replace(b"Say 7", b"Say \xff"))
    bad = BadRecords()
    assert len(questions(tmp_path / "a.json", bad)) == 39
    assert bad.by_reason == {"not UTF-8": 1}


def test_the_share_of_bad_records_is_limited(tmp_path: Path) -> None:
    bad = BadRecords()
    for _ in range(3):
        bad.read += 20
        bad.add(UserError("f:1: oh"), "odd")
    bad.require_few(0.05, "data.max_bad_share")
    with pytest.raises(UserError, match=r"3 of 60 records are bad, above the share of 0.04 .*3 x odd, as f:1: oh"):
        bad.require_few(0.04, "data.max_bad_share")
    one = BadRecords(read=2)
    one.add(UserError("f:1: oh"))
    one.require_few(0.01, "x")  # one bad record ends no run
    with pytest.raises(UserError):
        one.require_few(0, "x")


def save_to_disk(folder: Path, rows: list[dict[str, object]]) -> None:
    """As `datasets` writes one split."""
    folder.mkdir(parents=True)
    half = len(rows) // 2
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    arrow_stream(rows[:half], folder / names[0])
    arrow_stream(rows[half:], folder / names[1])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def test_folders_of_datasets_are_read_in_their_order(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "saved", ROWS)
    assert questions(tmp_path / "saved") == EXPECTED


def test_of_several_splits_the_train_split_is_read_and_the_others_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for split in ("train", "test"):
        save_to_disk(tmp_path / split, ROWS if split == "train" else ROWS[:3])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with caplog.at_level(logging.WARNING):
        assert questions(tmp_path) == EXPECTED
    assert "left out: test" in caplog.text
    assert questions(tmp_path / "test") == EXPECTED[:3]


def test_folders_as_on_the_hub_are_read_by_split(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("# A set")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "train.jsonl").write_text("no")
    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table.slice(0, 10), tmp_path / "data" / "train-00000-of-00002.parquet")
    parquet.write_table(table.slice(10), tmp_path / "data" / "train-00001-of-00002.parquet")
    parquet.write_table(table.slice(0, 2), tmp_path / "data" / "test-00000-of-00001.parquet")
    assert questions(tmp_path) == EXPECTED
    (tmp_path / "data" / "train-00000-of-00002.parquet").rename(tmp_path / "data" / "train_sft-00000-of-00001.parquet")
    (tmp_path / "data" / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(UserError, match="splits test, train_sft"):
        questions(tmp_path)


def test_globs_and_folders_stand_for_their_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl.gz", "notes.txt", "deep/c.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")

    def names(*patterns: str) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in expand_files([tmp_path / pattern for pattern in patterns])]

    assert names(".") == ["a.jsonl.gz", "b.jsonl", "deep/c.json"]
    assert names("*.jsonl*") == ["a.jsonl.gz", "b.jsonl"]
    assert names("b.jsonl", "*.jsonl") == ["b.jsonl"]
    assert names("**/*.json") == ["deep/c.json"]
    with pytest.raises(UserError, match=r"no file matches .*\*\.csv"):
        expand_files([tmp_path / "*.csv"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no"):
        expand_files([tmp_path / "empty"])


def test_descriptions_beside_files_are_no_data(tmp_path: Path) -> None:
    for name in ("answers.jsonl", "other.json"):
        (tmp_path / name).write_bytes(LINES)
    (tmp_path / "answers.jsonl.json").write_text('{"seed": 0}')
    (tmp_path / "lone.jsonl.json").write_bytes(LINES)
    assert [file.name for file in expand_files([tmp_path])] == ["answers.jsonl", "lone.jsonl.json", "other.json"]
    assert expand_files([tmp_path / "answers.jsonl.json"]) == [tmp_path / "answers.jsonl.json"], "named, it is read"


@each("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "a.arrow"])
def test_progress_grows_to_all_bytes(tmp_path: Path, name: str) -> None:
    rows = ROWS * 50
    path = tmp_path / name
    if name.endswith("parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif name.endswith("arrow"):
        arrow_stream(rows, path)
    else:
        data = json.dumps(rows).encode() if name == "a.json" else LINES * 50
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    reader = ConversationReader([path, path])
    seen = [reader.bytes_read for _ in reader]
    assert seen == sorted(seen)
    assert 0 < seen[len(seen) // 4] < reader.bytes_total
    assert reader.bytes_read == reader.bytes_total == 2 * path.stat().st_size


def test_zstd_and_arrow_without_pyarrow_name_the_command_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(LINES))
    arrow_stream(ROWS, tmp_path / "a.arrow")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    for name in ("a.jsonl.zst", "a.arrow", "a.parquet"):
        with pytest.raises(UserError, match=r"pip install eyas\[parquet\]"):
            questions(tmp_path / name)
