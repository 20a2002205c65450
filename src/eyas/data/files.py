"""Reads conversations from files and folders: JSON lines, JSON arrays, Parquet, Arrow; plain or compressed.

The format is recognised by the first bytes; Parquet and Arrow also by their suffix. Everything is read lazily and in
order, so a corpus may be larger than memory.
"""

import codecs
import gzip
import io
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import glob, has_magic
from pathlib import Path
from typing import IO, Any

from eyas.data.bad_records import BadRecords, RecordError
from eyas.data.conversations import RECORD_KEYS, Conversation, parse_conversation
from eyas.errors import UserError

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
COMPRESSED = (".gz", ".zst", ".zstd")
"""Suffixes that may follow those of `SUFFIXES` in a folder."""
METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"}
KEPT_ANSWERS = f"answers-{'[0-9]' * 8}.jsonl"
"""Files of `eyas serve --learn`."""
CHUNK = 1 << 20
"""Bytes read at a time where records are not lines."""

_GZIP, _ZSTD, _PARQUET, _ARROW_FILE = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1", b"ARROW1"
_SPLITS = "train|test|validation|valid|val|dev|eval"

Row = tuple[int, object]
"""A record's line or number, from 1, and the record or its `RecordError`."""


def read_conversations(path: Path, bad: BadRecords | None = None) -> Iterator[Conversation]:
    """Read a file or folder lazily; bad records are counted in `bad`, or the first raises."""
    return iter(ConversationReader(expand_files([path]), bad))


class ConversationReader:
    """Reads files in order and knows its progress in bytes."""

    def __init__(self, files: Sequence[Path], bad: BadRecords | None = None) -> None:
        self._files = files
        self._bad = bad
        self._behind = 0
        self._place: Callable[[], int] = lambda: 0
        self.bytes_total = sum(file.stat().st_size for file in files if file.is_file())

    @property
    def bytes_read(self) -> int:
        return self._behind + self._place()

    def __iter__(self) -> Iterator[Conversation]:
        for file in self._files:
            empty = True
            for number, row in self._rows(file):
                empty = False
                where = f"{file}:{number}"
                if self._bad is not None:
                    self._bad.read += 1
                try:
                    if isinstance(row, RecordError):
                        raise row
                    conversation = parse_conversation(row, where)
                except RecordError as error:
                    if self._bad is None:
                        raise
                    self._bad.add(error)
                else:
                    yield conversation
            if empty:
                raise UserError(f"{file} holds no conversations; give a file with at least one line")
            self._behind, self._place = self.bytes_read, lambda: 0

    def _rows(self, path: Path) -> Iterator[Row]:
        try:
            with path.open("rb") as raw:
                magic = raw.read(6)
                raw.seek(0)
                self._place = lambda: 0 if raw.closed else raw.tell()
                if path.suffix in (".parquet", ".arrow") or magic[:4] == _PARQUET or magic == _ARROW_FILE:
                    yield from self._table_rows(path, raw, magic)
                else:
                    with _decompressed(path, raw, magic) as stream:
                        yield from _json_rows(path, stream)
                size = path.stat().st_size
                self._place = lambda: size
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}; check the path") from error

    def _table_rows(self, path: Path, raw: IO[bytes], magic: bytes) -> Iterator[Row]:
        pyarrow = _pyarrow(path)
        number, kind = 0, "Arrow"
        try:
            if path.suffix == ".parquet" or magic[:4] == _PARQUET:
                from pyarrow import parquet

                table, size, kind = parquet.ParquetFile(path), path.stat().st_size, "Parquet"
                rows = max(1, table.metadata.num_rows)
                self._place = lambda: size * number // rows
                batches = table.iter_batches(batch_size=1024)
            elif magic == _ARROW_FILE:
                opened = pyarrow.ipc.open_file(raw)
                batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
            else:
                batches = pyarrow.ipc.open_stream(raw)
            for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
                yield number, row
        except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {path} as {kind} ({error}); check the file") from error


def expand_files(patterns: Sequence[str | Path]) -> list[Path]:
    """The files that paths, folders and globs stand for, in order.

    A folder may come from `datasets` (`save_to_disk`) or the hub, or hold any files of conversations.
    """
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            files += _in_folder(path)
        elif has_magic(str(path)) and not path.exists():
            found = sorted(Path(name) for name in glob(str(path), recursive=True))  # noqa: PTH207 - absolute patterns
            if not found:
                raise UserError(f"no file matches {pattern}; check the pattern")
            for one in found:
                files += _in_folder(one) if one.is_dir() else [one]
        else:
            files.append(path)
    return list(dict.fromkeys(files))


def _in_folder(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        names = _json_file(folder / "dataset_dict.json").get("splits") or []
        by_split = {str(name): [folder / str(name)] for name in names}
        return [file for split in _one_split(folder, by_split) for file in _in_folder(split)]
    if (folder / "state.json").is_file():
        listed = _json_file(folder / "state.json").get("_data_files") or []
        return [folder / file["filename"] for file in listed]
    if kept := sorted(folder.glob(KEPT_ANSWERS)):  # other files of `eyas serve --learn` are no data
        return kept
    by_split = {}
    for file in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.is_file() and not hidden and file.name not in METADATA and _is_data(file) and not _is_about_data(file):
            by_split.setdefault(_split_of(file.relative_to(folder)), []).append(file)
    if not by_split:
        raise UserError(
            f"the folder {folder} holds no {', '.join(SUFFIXES)} file; give a folder or file of conversations"
        )
    return _one_split(folder, by_split)


def _one_split(folder: Path, by_split: dict[str, list[Path]]) -> list[Path]:
    """The files of the train split, if there are several splits."""
    if len(by_split) == 1:
        return next(iter(by_split.values()))
    if "train" not in by_split:
        first = next(iter(by_split.values()))[0]
        raise UserError(
            f"{folder} holds the splits {', '.join(by_split) or 'none'}; name the files of one, such as {first}"
        )
    others = ", ".join(name for name in by_split if name != "train")
    logger.warning(f"{folder}: reading the split train; left out: {others}")
    return by_split["train"]


def _is_data(file: Path) -> bool:
    return (Path(file.stem) if file.suffix in COMPRESSED else file).suffix in SUFFIXES


def _is_about_data(file: Path) -> bool:
    """Whether it describes the file beside it, as answers.jsonl.json of `eyas data answer` does."""
    made = file.with_suffix("")
    return file.suffix == ".json" and _is_data(made) and made.is_file()


def _split_of(file: Path) -> str:
    """The split by the name of a file or its folder, as the hub has it; train if none is named."""
    if numbered := re.match(r"(.+?)-\d+-of-\d+", file.name):
        return numbered[1]
    for part in reversed(file.parts):
        if named := re.search(rf"(?:^|[-_.]|\b)({_SPLITS})(?:$|[-_.]|\b)", part.lower()):
            return named[1]
    return "train"


def _json_file(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}); save the dataset again") from error
    return found if isinstance(found, dict) else {}


@contextmanager
def _decompressed(path: Path, raw: IO[bytes], magic: bytes) -> "Iterator[io.BufferedReader[Any]]":
    if magic[:2] == _GZIP:
        with gzip.GzipFile(fileobj=raw) as unzipped, io.BufferedReader(unzipped) as stream:
            yield stream
    elif magic[:4] == _ZSTD:
        pyarrow = _pyarrow(path)
        with pyarrow.CompressedInputStream(raw, "zstd") as unzipped, io.BufferedReader(unzipped) as stream:
            yield stream
    else:
        assert isinstance(raw, io.BufferedReader)
        yield raw


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(f"reading {path} needs pyarrow; install it with `pip install eyas[parquet]`") from error
    return pyarrow


def _json_rows(path: Path, stream: "io.BufferedReader[Any]") -> Iterator[Row]:
    """Records of a JSON lines file, or of a sequence or array of values."""
    number = 0
    try:
        head = stream.peek(1).removeprefix(codecs.BOM_UTF8)
        if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise UserError(f"{path} is not UTF-8 text but UTF-16; write it as UTF-8 JSON lines or Parquet")
        rows = _line_rows(path, stream) if _has_lines(head) else _value_rows(path, stream)
        for number, row in rows:  # `number` is needed if the file is damaged
            yield number, row
    except (EOFError, zlib.error, OSError) as error:
        if getattr(error, "errno", None) is not None:  # an error of the disk, not of the decompressor
            raise
        yield number + 1, _cut_off(path, number + 1, str(error))


def _has_lines(head: bytes) -> bool:
    """Whether a file with this beginning has one record per line; otherwise values may span lines."""
    first, *others = [line for line in head.splitlines() if line.strip()] or [b""]
    if first.lstrip().startswith(b"["):
        return False
    try:
        json.loads(first)
    except ValueError:
        # Bad JSON in one line, unless a value continues in the next line.
        return not others or others[0].startswith(b"{")
    return True


def _line_rows(path: Path, stream: "io.BufferedReader[Any]") -> Iterator[Row]:
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield number, _decode_line(f"{path}:{number}", line)


def _decode_line(where: str, line: bytes) -> object:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        return RecordError(where, "not UTF-8", f"it is not UTF-8 text ({error.reason}); mend or remove the line")
    except (ValueError, RecursionError) as error:
        return RecordError(where, "not JSON", f"it is not JSON ({error}); mend or remove the line")


def _value_rows(path: Path, stream: "io.BufferedReader[Any]") -> Iterator[Row]:
    """Consecutive objects, with any brackets and commas between them.

    A broken one is skipped up to the next object that can be a record.
    """
    decode = json.JSONDecoder().raw_decode
    # Bytes that are not UTF-8 become surrogates, so that only their record is bad.
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="surrogateescape")
    between, after_error = re.compile(r"[\s,\[\]]*"), re.compile(r"[^{]*")
    text, at, ended, number, broken = "", 0, False, 0, False
    while True:
        at = (after_error if broken else between).match(text, at).end()  # type: ignore[union-attr]
        try:
            value, end = decode(text, at)
        except (json.JSONDecodeError, RecursionError) as error:
            place = error.pos if isinstance(error, json.JSONDecodeError) else at
            unfinished = str(error).startswith("Unterminated string") or len(text[place:].strip()) <= 8
            if unfinished and not ended:
                more = stream.read(max(CHUNK, len(text) - at))  # doubles for records longer than a chunk
                ended = not more
                text, at = text[at:] + decoder.decode(more, final=ended), 0
                continue
            if at == len(text):
                return
            if not broken:
                number += 1
                if unfinished:
                    yield number, _cut_off(path, number, f"{len(text) - at:,} characters of it are there")
                    return
                message = f"record {number} is not JSON ({error}); mend or remove it"
                yield number, RecordError(f"{path}:{number}", "not JSON", message)
                broken = True
            at += 1
            continue
        if broken and not (isinstance(value, dict) and RECORD_KEYS & value.keys()):
            at = end  # part of the broken record
            continue
        number, broken = number + 1, False
        yield number, _unless_bytes(value, text[at:end], f"{path}:{number}")
        at = end


def _unless_bytes(value: object, written: str, where: str) -> object:
    try:
        written.encode()
    except UnicodeEncodeError:
        return RecordError(where, "not UTF-8", "it is not UTF-8 text; mend or remove the record")
    return value


def _cut_off(path: Path, number: int, detail: str) -> RecordError:
    return RecordError(
        f"{path}:{number}",
        "the file is cut off",
        f"the file ends in the middle of this record ({detail}); fetch the file again for the rest",
    )
