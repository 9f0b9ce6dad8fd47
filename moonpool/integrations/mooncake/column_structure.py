"""Columns of Python values taken apart: what kind of value a column holds, and the tree of dicts and lists above it.

A column has one value per row. `infer_structure` follows dicts with text keys and short lists of dicts or lists down to
columns of plain values (leaves) and notes each dict and list on the way (nodes), so that `rebuild_rows` puts the rows
together again. A key that a row does not have is MISSING there, which is not None. Pure; torch is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAX_KEYS = 64  # of all dicts of a column together
MAX_ITEMS = 8  # of a list that becomes columns
MAX_DEPTH = 32


class Missing:
    """The value of a key in a row that does not have the key."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<MISSING>"


MISSING = Missing()


@dataclass
class CodecDecision:
    """How a column is stored, by the name of a codec. Not `accepted`: no codec holds all its values."""

    accepted: bool
    codec: str
    reason: str
    normalized_type: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Leaf:
    path: str
    values: list[Any]
    decision: CodecDecision


@dataclass
class ColumnNode:
    """A dict (`children` are its keys) or a list (its indices). `row_mask` says which rows have it; the others are None
    there, or MISSING in the rows `absent`.
    """

    path: str
    node_type: str
    children: list[Any]
    lengths: list[int] | None = None
    row_mask: list[bool] | None = None
    absent: list[int] = field(default_factory=list)


def choose_leaf_codec(values: Sequence[Any]) -> CodecDecision:
    """Return the codec for a column. None and MISSING fit every codec; a column of nothing else fits none."""
    present = _present(values)
    if not present:
        return CodecDecision(False, "msgpack_ragged", "the column has no values", "msgpack")
    for choose in (_tensors, _media, _arrays, _sequences, _numbers, _bytes, _text, _objects):
        decision = choose(present)
        if decision is not None:
            return decision
    return CodecDecision(False, "msgpack_ragged", "no codec holds values of these types", "python object")


def infer_structure(
    path: str, values: Sequence[Any], leaves: list[Leaf], nodes: list[ColumnNode], *, depth: int = 0
) -> None:
    """Append the leaves and nodes of a column to the two lists. ValueError when it is nested deeper than MAX_DEPTH."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{path!r} is nested deeper than {MAX_DEPTH}")
    keys, num_items = _dict_keys(values), _num_items(values)
    if keys is not None:
        nodes.append(
            ColumnNode(path, "dict", keys, None, [isinstance(value, dict) for value in values], _absent(values))
        )
        for key in keys:
            column = [value.get(key, MISSING) if isinstance(value, dict) else None for value in values]
            infer_structure(child_path(path, "dict", key), column, leaves, nodes, depth=depth + 1)
    elif num_items is not None:
        mask = [isinstance(value, list | tuple) for value in values]
        lengths = [len(value) if has else 0 for value, has in zip(values, mask, strict=True)]
        nodes.append(ColumnNode(path, "list", list(range(num_items)), lengths, mask, _absent(values)))
        for index in range(num_items):
            column = [_item(value, index) if has else None for value, has in zip(values, mask, strict=True)]
            infer_structure(child_path(path, "list", index), column, leaves, nodes, depth=depth + 1)
    else:
        leaves.append(Leaf(path, list(values), choose_leaf_codec(values)))


def rebuild_rows(
    path: str, num_rows: int, columns: Mapping[str, Sequence[Any]], nodes: Mapping[str, ColumnNode]
) -> list[Any]:
    """Return the rows below `path` from the columns of its leaves."""
    node = nodes.get(path)
    if node is None:
        return list(columns[path])
    children = [
        (child, rebuild_rows(child_path(path, node.node_type, child), num_rows, columns, nodes))
        for child in node.children
    ]
    mask = node.row_mask or [True] * num_rows
    without = dict.fromkeys(node.absent, MISSING)
    if node.node_type == "dict":
        return [
            {key: column[row] for key, column in children if not isinstance(column[row], Missing)}
            if mask[row]
            else without.get(row)
            for row in range(num_rows)
        ]
    lengths = node.lengths or [0] * num_rows
    return [
        [column[row] for _, column in children[: lengths[row]]] if mask[row] else without.get(row)
        for row in range(num_rows)
    ]


def child_path(path: str, node_type: str, child: Any) -> str:
    return f"{path}.{escape_key(child)}" if node_type == "dict" else f"{path}[{child}]"


def escape_key(key: str) -> str:
    """Return a dict's key as it stands in a path, where "." and "[" separate."""
    return key.replace("\\", "\\\\").replace(".", "\\.").replace("[", "\\[")


def is_tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr") and str(getattr(value, "dtype", "")).startswith("torch.")


def is_image(value: Any) -> bool:
    """Return whether the value is an image of PIL's, without importing PIL."""
    return (type(value).__module__ or "").startswith("PIL.") and hasattr(value, "save")


def _tensors(values: Sequence[Any]) -> CodecDecision | None:
    if not all(is_tensor(value) for value in values):
        return None
    dtypes = sorted({str(value.dtype) for value in values})
    if len(dtypes) > 1:
        return CodecDecision(False, "ragged_tensor", f"mixed tensor dtypes: {', '.join(dtypes)}", "torch.Tensor")
    return CodecDecision(True, "ragged_tensor", "all are tensors", "torch.Tensor", {"dtype": dtypes[0]})


def _media(values: Sequence[Any]) -> CodecDecision | None:
    def are_media(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(is_image(item) or _is_bytes(item) for item in value)

    return _if_all(values, are_media, "media_list_ragged", "media list")


def _arrays(values: Sequence[Any]) -> CodecDecision | None:
    if not all(isinstance(value, np.ndarray) for value in values):
        return None
    if all(np.issubdtype(value.dtype, np.number) for value in values):
        return CodecDecision(True, "typed_ragged", "all are arrays of numbers", "numeric sequence")
    return CodecDecision(False, "msgpack_ragged", "arrays of objects", "python object")


def _sequences(values: Sequence[Any]) -> CodecDecision | None:
    if not all(isinstance(value, list | tuple) for value in values):
        return None
    try:
        dtype = np.result_type(*[np.asarray(value).dtype for value in values])
    except (TypeError, ValueError, OverflowError):
        return None
    if not np.issubdtype(dtype, np.number):
        return None
    return CodecDecision(
        True, "typed_ragged", "all are sequences of numbers", "numeric sequence", {"dtype": str(dtype)}
    )


def _numbers(values: Sequence[Any]) -> CodecDecision | None:
    if not all(isinstance(value, bool | int | float | np.number) for value in values):
        return None
    dtype = np.result_type(*values)
    return CodecDecision(True, "ndarray", "all are numbers", "numeric scalar", {"dtype": str(dtype)})


def _bytes(values: Sequence[Any]) -> CodecDecision | None:
    return _if_all(values, _is_bytes, "bytes_ragged", "bytes-like") or _if_all(values, is_image, "media_bytes", "media")


def _text(values: Sequence[Any]) -> CodecDecision | None:
    return _if_all(values, lambda value: isinstance(value, str), "utf8_ragged", "str")


def _objects(values: Sequence[Any]) -> CodecDecision | None:
    return _if_all(values, lambda value: isinstance(value, dict | list | tuple), "msgpack_ragged", "msgpack")


def _if_all(values: Sequence[Any], test: Callable[[Any], bool], codec: str, name: str) -> CodecDecision | None:
    return CodecDecision(True, codec, f"all are {name}", name) if all(test(value) for value in values) else None


def _is_bytes(value: Any) -> bool:
    return isinstance(value, bytes | bytearray | memoryview)


def _dict_keys(values: Sequence[Any]) -> list[str] | None:
    """Return the keys of all rows, sorted; None unless all rows that are there are dicts with a few text keys."""
    present = _present(values)
    if not present or not all(isinstance(value, dict) for value in present):
        return None
    keys = {key for value in present for key in value}
    return sorted(keys) if len(keys) <= MAX_KEYS and all(isinstance(key, str) for key in keys) else None


def _num_items(values: Sequence[Any]) -> int | None:
    """Return the length of the longest list; None unless all are short lists of dicts or lists."""
    present = _present(values)
    if not present or not all(isinstance(value, list | tuple) for value in present):
        return None
    longest = max(len(value) for value in present)
    nested = all(item is None or isinstance(item, dict | list | tuple) for value in present for item in value)
    return longest if longest <= MAX_ITEMS and nested else None


def _absent(values: Sequence[Any]) -> list[int]:
    return [row for row, value in enumerate(values) if isinstance(value, Missing)]


def _present(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if value is not None and not isinstance(value, Missing)]


def _item(value: Sequence[Any], index: int) -> Any:
    return value[index] if index < len(value) else MISSING
