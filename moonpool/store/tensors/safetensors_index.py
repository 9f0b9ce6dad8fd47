"""The front of a safetensors file: which tensors it has and where. Pure.

u64      size of the JSON that follows
JSON     {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {text: text}}
bytes    of all tensors, row-major, little-endian, without holes; offsets count from here
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from moonpool.base.errors import InvalidInput
from moonpool.store.tensors.tensor_form import TensorForm

METADATA = "__metadata__"
SIZE_NBYTES = 8
MAX_JSON_NBYTES = 100_000_000  # as others limit it
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
    """The tensors in the order of their bytes; `front` is the file or its beginning. InvalidInput when it is not a
    whole and sound safetensors file.
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
            raise InvalidInput(f"tensor {name!r} does not lie where its size and its neighbours put it")
        tensors.append(FileTensor(name, form, start + at))
        at += form.nbytes
    if start + at != file_nbytes:
        raise InvalidInput(f"the tensors have {at} bytes, the file has room for {file_nbytes - start}")
    return tensors


def make_index(forms: Mapping[str, TensorForm], metadata: Mapping[str, str] | None) -> tuple[bytes, list[str]]:
    """The front of a file with these tensors, and the order in which their bytes follow: large elements first, so
    that all are aligned.
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
    """InvalidInput when they cannot be names in one file."""
    found = list(names)
    if METADATA in found or len(set(found)) < len(found):
        raise InvalidInput(f"the tensors of a file have different names, and none is {METADATA}")
    return found


def _name_of(name: str, form: TensorForm) -> str:
    if form.dtype not in _NAMES:
        raise InvalidInput(f"a safetensors file cannot hold {name!r}: {form.dtype} is not among its types")
    return _NAMES[form.dtype]
