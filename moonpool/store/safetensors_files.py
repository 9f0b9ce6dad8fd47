"""Safetensors files: their index, and files that get their name when they are complete. The format:

u64      size of the JSON that follows
JSON     {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {text: text}}
bytes    of all tensors, row-major, little-endian, without holes; offsets count from here
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from moonpool.base.errors import InvalidInput, MoonpoolError, NoSpace
from moonpool.store.tensors import TensorForm


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing. It replaces an older file when the block ends; after an error the older file stays.

    Raise InvalidInput when it cannot be written there, NoSpace when the disk is full. A pipe or device at the path is
    written to directly.
    """
    path = path.resolve()  # replace the file that a link leads to, not the link
    unnamed = path.parent / f".{path.name[:200]}.{secrets.token_hex(4)}"
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        with unnamed.open("xb") as file:
            try:
                yield file
                file.flush()
                unnamed.replace(path)
            except BaseException:
                unnamed.unlink()
                raise
    except OSError as error:
        raise _write_error(path, error) from error


def _write_error(path: Path, error: OSError) -> MoonpoolError:
    kind = NoSpace if error.errno in (errno.ENOSPC, errno.EDQUOT) else InvalidInput
    return kind(f"cannot write {path}: {error.strerror or os.strerror(error.errno or 0)}")


METADATA = "__metadata__"
SIZE_NBYTES = 8
MAX_JSON_NBYTES = 100_000_000  # the limit of other readers of this format
_SIZE = struct.Struct("<Q")
_ALIGN_NBYTES = 8
_TYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class FileTensor(NamedTuple):
    """`start` counts from the file's first byte."""

    name: str
    form: TensorForm
    start: int


def read_index(front: memoryview, file_nbytes: int) -> list[FileTensor]:
    """Return the tensors in the order of their bytes. `front` is the file or its beginning. Raise InvalidInput when it
    is not a complete and valid safetensors file.
    """
    nbytes = _SIZE.unpack_from(front)[0] if front.nbytes >= SIZE_NBYTES else 0
    if not 2 <= nbytes <= min(MAX_JSON_NBYTES, file_nbytes - SIZE_NBYTES):
        raise InvalidInput("this is no safetensors file: its header does not fit it")
    try:
        fields = msgspec.json.decode(front[SIZE_NBYTES : SIZE_NBYTES + nbytes], type=dict[str, msgspec.Raw])
        fields.pop(METADATA, None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in fields.items()}
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"this is no safetensors file: {error}") from error
    return _placed(entries, SIZE_NBYTES + nbytes, file_nbytes)


def _placed(entries: Mapping[str, _Entry], start: int, file_nbytes: int) -> list[FileTensor]:
    tensors: list[FileTensor] = []
    at = 0
    for name, entry in sorted(entries.items(), key=lambda each: each[1].data_offsets):
        dtype = _TYPES.get(entry.dtype)
        if dtype is None or any(size < 0 for size in entry.shape):
            raise InvalidInput(f"tensor {name!r} of type {entry.dtype} and shape {entry.shape} cannot be read")
        form = TensorForm(dtype, tuple(entry.shape))
        if entry.data_offsets != (at, at + form.nbytes):
            raise InvalidInput(f"tensor {name!r} has data_offsets that do not match its size and its neighbours")
        tensors.append(FileTensor(name, form, start + at))
        at += form.nbytes
    if start + at != file_nbytes:
        raise InvalidInput(f"the tensors have {at} bytes, the file has room for {file_nbytes - start}")
    return tensors


def make_index(forms: Mapping[str, TensorForm], metadata: Mapping[str, str] | None) -> tuple[bytes, list[str]]:
    """Return the start of a file with these tensors, and the order in which their bytes follow: large elements first,
    so that all are aligned.
    """
    order = sorted(forms, key=lambda name: (-forms[name].item_nbytes, name))
    fields: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        form = forms[name]
        fields[name] = _Entry(_name_of(name, form), list(form.shape), (at, at + form.nbytes))
        at += form.nbytes
    text = msgspec.json.encode(fields)
    text += b" " * (-len(text) % _ALIGN_NBYTES)
    return _SIZE.pack(len(text)) + text, order


def checked_names(names: Iterable[str]) -> list[str]:
    """Return the names. Raise InvalidInput when one file cannot hold them all."""
    found = list(names)
    if METADATA in found or len(set(found)) < len(found):
        raise InvalidInput(f"the tensors of a file have different names, and none is {METADATA}")
    return found


def _name_of(name: str, form: TensorForm) -> str:
    if form.dtype not in _NAMES:
        raise InvalidInput(f"a safetensors file cannot hold {name!r}: {form.dtype} is not among its types")
    return _NAMES[form.dtype]


_STEP_NBYTES = 64 * 1024 * 1024
_STEP_TENSORS = 256


def map_file(path: Path) -> memoryview:
    """Map the file. The mapping ends with the last view of it."""
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise InvalidInput(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def in_steps(tensors: list[FileTensor]) -> Iterator[list[FileTensor]]:
    """Yield the tensors in lists of about 64 MiB."""
    step: list[FileTensor] = []
    nbytes = 0
    for tensor in tensors:
        step.append(tensor)
        nbytes += tensor.form.nbytes
        if nbytes >= _STEP_NBYTES or len(step) >= _STEP_TENSORS:
            yield step
            step, nbytes = [], 0
    if step:
        yield step
