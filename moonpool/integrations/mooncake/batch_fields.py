"""Batches as callers pass and get them: three sections of fields, a flat dict, and selections of rows. Pure.

`batch` holds arrays and tensors with a row per sample, `non_tensor_batch` the other values with one per sample, and
`meta_info` what is said about the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moonpool.integrations.mooncake.batch_refs import FieldSchema, MooncakeDataProtoRef
from moonpool.integrations.mooncake.column_structure import is_tensor
from moonpool.integrations.mooncake.structured_members import Rows

SECTIONS = ("batch", "non_tensor_batch", "meta_info")
Sections = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def split_sections(data: Any) -> Sections:
    """Return batch, non_tensor_batch and meta_info of an object or dict. A dict of other keys is a batch itself."""
    if isinstance(data, Mapping):
        is_envelope = bool(data) and set(data) <= set(SECTIONS) and all(_is_mapping(each) for each in data.values())
        if not is_envelope:
            return dict(data), {}, {}
        batch, others, info = (_as_dict(data.get(name)) for name in SECTIONS)
    else:
        batch, others, info = (_as_dict(getattr(data, name, None)) for name in SECTIONS)
    return batch, others, info


def split_flat(data: Mapping[str, Any], schemas: Mapping[str, FieldSchema]) -> dict[str, dict[str, Any]]:
    """Return the sections of a flat dict: by schema, else arrays and tensors with a row per sample are the batch, lists
    of that length are non-tensor fields, and all else is meta_info. ValueError when the number of rows is not clear.
    """
    if not isinstance(data, Mapping):
        raise TypeError("a flat dict payload must be a mapping")
    sections = {name: schema.section for name, schema in schemas.items() if name in data}
    placed = {len(data[name]) for name, section in sections.items() if section in ("batch", "non_tensor_batch")}
    free = {name: value for name, value in data.items() if sections.get(name) is None}
    num_rows = _one_size(placed) if placed else _guess_rows(free)
    result: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, value in data.items():
        section = sections.get(name)
        if section is None:
            is_list = not placed and _is_list(value) and len(value) == num_rows
            section = "batch" if _is_dense(value, num_rows) else "non_tensor_batch" if is_list else "meta_info"
        result[section][name] = value
    return result


def check_schemas(sections: Mapping[str, Mapping[str, Any]], schemas: Mapping[str, FieldSchema]) -> None:
    """ValueError when a field is not in the section that its schema declares."""
    for name, schema in schemas.items():
        found = [section for section, fields in sections.items() if name in fields]
        if schema.section is not None and found and schema.section not in found:
            raise ValueError(f"the schema of {name!r} declares section {schema.section!r}, but it is in {found}")


def join_flat(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return one dict of all fields. ValueError when two sections have a field of one name."""
    flat: dict[str, Any] = {}
    twice = []
    for name in ("meta_info", "batch", "non_tensor_batch"):
        twice += [key for key in sections[name] if key in flat]
        flat.update(sections[name])
    if twice:
        raise ValueError(f"Duplicate keys in several sections: {sorted(twice)}")
    return flat


def build(sections: dict[str, dict[str, Any]], cls: Any) -> Any:
    """Return the sections as an object of `cls`: a dict, or by cls.from_dict() or its constructor."""
    if cls is None or cls is dict:
        return sections
    try:
        if callable(getattr(cls, "from_dict", None)):
            return cls.from_dict(sections["batch"], sections["non_tensor_batch"], meta_info=sections["meta_info"])
        return cls(**sections)
    except TypeError as error:
        name = getattr(cls, "__name__", cls)
        raise TypeError(f"{name} cannot be constructed from batch, non_tensor_batch and meta_info: {error}") from error


def count_rows(batch: Mapping[str, Any], others: Mapping[str, Any]) -> int:
    """Return the number of samples. ValueError when fields differ in it, or are in both sections."""
    both = sorted(set(batch) & set(others))
    if both:
        raise ValueError(f"fields of batch and non_tensor_batch overlap: {both}")
    sizes = {len(value) for values in (batch, others) for value in values.values()}
    return _one_size(sizes) if sizes else 0


def select_rows(rows: Any, num_rows: int) -> Rows:
    """Return a checked selection: None, a slice with a positive step, or indices from 0 on."""
    if rows is None:
        return None
    if hasattr(rows, "axis") and hasattr(rows, "start"):
        if rows.axis != 0:
            raise ValueError("rows are along axis=0 only")
        rows = slice(rows.start, rows.end, rows.step)
    if isinstance(rows, slice):
        if rows.step is not None and rows.step <= 0:
            raise ValueError("the selection's step must be positive")
        return slice(*rows.indices(num_rows))
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes | bytearray):
        raise TypeError("rows are a slice or a sequence of indices")
    indices = []
    for each in rows:
        if not isinstance(each, int | np.integer):
            raise TypeError("row indices must be integers")
        index = int(each) + (num_rows if each < 0 else 0)
        if not 0 <= index < num_rows:
            raise IndexError(f"row index {each} is out of range for {num_rows} rows")
        indices.append(index)
    return indices


def select_fields(
    ref: MooncakeDataProtoRef,
    fields: Sequence[str] | None,
    batch_fields: Sequence[str] | None,
    other_fields: Sequence[str] | None,
) -> list[str]:
    """Return the names of the fields to read. KeyError for unknown ones."""
    if fields is not None and (batch_fields is not None or other_fields is not None):
        raise ValueError("fields cannot be combined with batch_fields or non_tensor_fields")
    if fields is None and batch_fields is None and other_fields is None:
        return list(ref.field_index)
    names = list(fields) if fields is not None else [*(batch_fields or []), *(other_fields or [])]
    unknown = [name for name in names if name not in ref.field_index]
    if unknown:
        raise KeyError(f"unknown DataProto fields: {unknown}")
    return names


def as_column(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return values of any kind as an array of objects, one per row."""
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def _guess_rows(data: Mapping[str, Any]) -> int:
    dense = {len(value) for value in data.values() if _is_dense(value)}
    sizes = dense or {len(value) for value in data.values() if _is_list(value)}
    if len(sizes) > 1:
        raise ValueError(f"fields have ambiguous batch sizes {sorted(sizes)}; name the sections by FieldSchema")
    return sizes.pop() if sizes else 0


def _one_size(sizes: set[int]) -> int:
    if len(sizes) > 1:
        raise ValueError(f"fields have inconsistent batch sizes: {sorted(sizes)}")
    return next(iter(sizes))


def _is_dense(value: Any, num_rows: int | None = None) -> bool:
    """Return whether the value has a row per sample. 0 rows are not known to be samples."""
    is_array = is_tensor(value) or (isinstance(value, np.ndarray) and value.dtype != object)
    return is_array and value.ndim > 0 and (num_rows is None or 0 < num_rows == value.shape[0])


def _is_list(value: Any) -> bool:
    is_objects = isinstance(value, np.ndarray) and value.dtype == object and value.ndim > 0
    return is_objects or (isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray))


def _is_mapping(value: Any) -> bool:
    return value is None or isinstance(value, Mapping) or callable(getattr(value, "items", None))


def _as_dict(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    if callable(getattr(value, "items", None)):
        return dict(value.items())
    raise TypeError(f"{type(value).__name__} is no mapping of fields")
