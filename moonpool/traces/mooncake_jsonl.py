"""Mooncake's trace format: one JSON object per line, {"timestamp" in ms, "input_length", "output_length", "hash_ids"}.

Reading raises InvalidInput for the first wrong line, with its number and what to do. Writing makes the same bytes as
Mooncake's own files: a file that was read is written unchanged. `tenant` and `priority` are two more fields, present
only if the trace has them; `block_tokens` is a third, for blocks of another size than Mooncake's 512. A file name that
ends in .gz means gzip, without a time stamp: the same trace gives the same bytes.
"""

from __future__ import annotations

import gzip
import os
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, NoReturn, TypeAlias

import msgspec
import numpy as np

from moonpool.base.errors import AlreadyExists, InvalidInput
from moonpool.traces.columns import MOONCAKE_BLOCK_TOKENS, Floats, Ints, Trace, blocks_of, offsets_of

Progress: TypeAlias = Callable[[int, int], None]  # bytes done, of how many
_PROGRESS_EVERY_LINES = 4096
_GZIP_LEVEL = 6
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class _Line(msgspec.Struct, gc=False):
    timestamp: Annotated[float, msgspec.Meta(ge=0, lt=2**52)]
    input_length: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
    output_length: _Count
    hash_ids: list[_Count]
    tenant: _Count | None = None
    priority: _Count | None = None
    block_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None


class _Columns:
    """The columns read so far, eight bytes per number."""

    def __init__(self) -> None:
        self.timestamp_ms = array("d")
        self.num_input, self.num_output, self.num_blocks, self.block_ids = (array("q") for _ in range(4))
        self.labels = {"tenant": array("q"), "priority": array("q")}
        self.labelled: set[str] = set()
        self.block_tokens: int | None = None  # from the file

    def add(self, line: _Line) -> None:
        self.timestamp_ms.append(line.timestamp)
        self.num_input.append(line.input_length)
        self.num_output.append(line.output_length)
        self.num_blocks.append(len(line.hash_ids))
        self.block_ids.extend(line.hash_ids)
        if line.block_tokens is not None and self.block_tokens is None:
            self.block_tokens = line.block_tokens
        if line.tenant is not None or line.priority is not None or self.labelled:
            self._add_labels(line)

    def label(self, field: str) -> Ints | None:
        """Return a column with 0 for lines without the field; None if no line has it."""
        if field not in self.labelled:
            return None
        self._fill(field, len(self.timestamp_ms))
        return np.array(self.labels[field])

    def _add_labels(self, line: _Line) -> None:
        for field, column in self.labels.items():
            value = getattr(line, field)
            if value is not None:
                self._fill(field, len(self.timestamp_ms) - 1)
                self.labelled.add(field)
                column.append(value)

    def _fill(self, field: str, length: int) -> None:
        self.labels[field].extend([0] * (length - len(self.labels[field])))


def read_jsonl(path: str | Path, *, block_tokens: int | None = None, progress: Progress | None = None) -> Trace:
    """Read a trace, named like the file without its endings. `block_tokens` None: the value of the first line that has
    the field, else 512. Raise InvalidInput with the file and the line that is wrong."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            columns = _Columns()
            for line in _decode(path, file, progress):
                columns.add(line)
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise InvalidInput(f"{path} is a damaged gzip file ({error}); fetch it again") from error
    if not columns.timestamp_ms:
        raise InvalidInput(f"{path} is empty; a trace has one request per line")
    return _to_trace(path, columns, block_tokens or columns.block_tokens or MOONCAKE_BLOCK_TOKENS)


def write_jsonl(trace: Trace, path: str | Path, *, replace: bool = False) -> None:
    """Write the file atomically. Raise AlreadyExists for an existing file, unless `replace`; InvalidInput if writing
    fails."""
    path = Path(path)
    if path.exists() and not replace:
        raise AlreadyExists(f"{path} exists already; choose another name, or replace it (--force)")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            _write_lines(trace, path, file)
        temporary.replace(path)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _is_gzip(path: Path) -> bool:
    return path.suffix == ".gz"


def _decode(path: Path, file: BinaryIO, progress: Progress | None) -> Iterator[_Line]:
    total = os.fstat(file.fileno()).st_size
    decode = msgspec.json.Decoder(_Line).decode
    source = gzip.GzipFile(fileobj=file) if _is_gzip(path) else file
    nbytes = 0
    for number, text in enumerate(source, start=1):
        try:
            yield decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _refuse_text(path, number, text, error)
        nbytes += len(text)
        if progress is not None and number % _PROGRESS_EVERY_LINES == 0:
            progress(min(file.tell(), total) if source is not file else nbytes, total)
    if progress is not None:
        progress(total, total)


def _refuse(path: Path, number: int, problem: str) -> NoReturn:
    raise InvalidInput(f"{path}, line {number}: {problem}")


def _refuse_text(path: Path, number: int, text: bytes, error: Exception) -> NoReturn:
    if not text.strip():
        _refuse(path, number, "is empty; remove it")
    if isinstance(error, msgspec.ValidationError):
        _refuse(path, number, f"{error}; correct the field or remove the line")
    _refuse(path, number, f"is not JSON ({error}); one object per line is needed, whole and without NaN")


def _to_trace(path: Path, columns: _Columns, block_tokens: int) -> Trace:
    timestamp_ms, counts = np.array(columns.timestamp_ms), np.array(columns.num_blocks)
    num_input, block_ids = np.array(columns.num_input), np.array(columns.block_ids)
    _refuse_backwards(path, timestamp_ms)
    _refuse_counts(path, counts, num_input, block_tokens)
    _refuse_repeats(path, block_ids, counts)
    return Trace(
        name=path.name.removesuffix(".gz").removesuffix(".jsonl"),
        block_tokens=block_tokens,
        arrival_s=timestamp_ms / 1000,
        num_input=num_input,
        num_output=np.array(columns.num_output),
        block_ids=block_ids,
        block_offsets=offsets_of(counts),
        tenant=columns.label("tenant"),
        priority=columns.label("priority"),
    )


def _refuse_backwards(path: Path, timestamp_ms: Floats) -> None:
    backwards = np.diff(timestamp_ms, prepend=0.0) < 0
    if backwards.any():
        row = int(backwards.argmax())
        what = f"timestamp {timestamp_ms[row]:.15g} is before {timestamp_ms[row - 1]:.15g} of the previous line"
        _refuse(path, row + 1, f"{what}; sort the file by timestamp")


def _refuse_counts(path: Path, counts: Ints, num_input: Ints, block_tokens: int) -> None:
    wanted = blocks_of(num_input, block_tokens)
    wrong = counts != wanted
    if wrong.any():
        row = int(wrong.argmax())
        what = f"{counts[row]} hash_ids for {num_input[row]} tokens, where blocks of {block_tokens} make {wanted[row]}"
        _refuse(path, row + 1, f"{what}; correct the line, or say which block size the file has")


def _refuse_repeats(path: Path, block_ids: Ints, counts: Ints) -> None:
    """Ids are chained, so a request cannot have the same id twice."""
    owners = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((block_ids, owners))
    again = (np.diff(block_ids[order]) == 0) & (np.diff(owners[order]) == 0)
    if again.any():
        entry = order[int(again.argmax())]
        _refuse(path, int(owners[entry]) + 1, f"hash id {block_ids[entry]} stands there twice; ids name whole prefixes")


def _write_lines(trace: Trace, path: Path, file: BinaryIO) -> None:
    if not _is_gzip(path):
        file.writelines(_lines(trace))
        return
    with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=_GZIP_LEVEL, mtime=0) as packed:
        packed.writelines(_lines(trace))


def _lines(trace: Trace) -> Iterator[bytes]:
    times_ms = np.round(trace.arrival_s * 1000, 6).tolist()
    extras = [
        (field, column.tolist()) for field in ("tenant", "priority") if (column := getattr(trace, field)) is not None
    ]
    size = "" if trace.block_tokens == MOONCAKE_BLOCK_TOKENS else f', "block_tokens": {trace.block_tokens}'
    for index, request in enumerate(trace):
        time_ms = times_ms[index]
        stamp = int(time_ms) if time_ms == int(time_ms) else time_ms
        more = "".join(f', "{field}": {values[index]}' for field, values in extras) + size
        yield (
            f'{{"timestamp": {stamp}, "input_length": {request.num_input}, "output_length": {request.num_output}, '
            f'"hash_ids": {request.block_ids.tolist()}{more}}}\n'
        ).encode()
