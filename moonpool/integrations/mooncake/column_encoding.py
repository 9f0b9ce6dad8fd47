"""Columns of Python values, one value per row, as named buffers and JSON, and back.

The codec of a column follows from its values, or a FieldSchema names it. Rows that are dicts or lists with arrays,
tensors or bytes in them are taken apart (column_structure.py), and each leaf has a codec of its own: the codec of the
whole is then structured_recursive. The form is upstream's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moonpool.integrations.mooncake.batch_refs import FieldSchema
from moonpool.integrations.mooncake.column_codecs import decode_leaf, encode_leaf, encode_numbers
from moonpool.integrations.mooncake.column_structure import (
    MISSING,
    CodecDecision,
    ColumnNode,
    Leaf,
    Missing,
    choose_leaf_codec,
    infer_structure,
    rebuild_rows,
)
from moonpool.integrations.mooncake.ragged_codecs import encode_arrays, encode_tensor_dicts

RECURSIVE = "structured_recursive"
_NATIVE = ("ragged_tensor", "bytes_ragged", "media_bytes", "media_list_ragged")
_REFUSALS = (TypeError, ValueError, OverflowError, RecursionError, AttributeError)


@dataclass
class EncodedColumn:
    """A column as buffers by name, and the JSON that decoding needs."""

    codec: str
    rows: int
    payload: dict[str, Any]
    metadata: dict[str, Any]

    def described(self, members: Mapping[str, str]) -> dict[str, Any]:
        """Return what a reference says of the column; `members` are the names under which its buffers are stored."""
        return {
            "codec": self.codec,
            "rows": self.rows,
            "metadata": self.metadata,
            "payload_members": dict(members),
        }


def encode_column(path: str, values: Sequence[Any], schema: FieldSchema | None = None) -> EncodedColumn:
    """Return the column, by the schema if there is one. ValueError that names `path` when no codec holds the values."""
    rows = list(values)
    if schema is not None and not schema.nullable and any(value is None for value in rows):
        raise ValueError(f"{path} is not nullable by its schema, and has None")
    if schema is not None and schema.codec != "auto":
        return _encode_by_schema(path, rows, schema)
    leaves: list[Leaf] = []
    nodes: list[ColumnNode] = []
    infer_structure(path, rows, leaves, nodes)
    if nodes and any(_is_native(leaf) for leaf in leaves):
        return _encode_recursive(path, rows, leaves, nodes)
    return _encode_inferred(path, rows, choose_leaf_codec(rows))


def decode_column(described: Mapping[str, Any], parts: Mapping[str, Any]) -> list[Any]:
    """Return the rows. `parts` are the buffers by their names in the column."""
    num_rows, metadata = int(described["rows"]), described.get("metadata") or {}
    if described["codec"] != RECURSIVE:
        return decode_leaf(described["codec"], parts, num_rows, metadata)
    columns = {}
    for leaf in metadata.get("leaves", []):
        names = leaf["payload_members"]
        own = {name: parts[full] for name, full in names.items() if name != "missing"}
        found = decode_leaf(leaf["codec"], own, num_rows, leaf.get("metadata"))
        missing = parts[names["missing"]].tolist()
        columns[leaf["path"]] = [MISSING if lacks else value for value, lacks in zip(found, missing, strict=True)]
    nodes = {node["path"]: _read_node(node, parts) for node in metadata.get("nodes", [])}
    return rebuild_rows(metadata["root_path"], num_rows, columns, nodes)


def _encode_by_schema(path: str, values: list[Any], schema: FieldSchema) -> EncodedColumn:
    if schema.codec == "ragged_tensor_dict":
        payload, metadata = encode_tensor_dicts(values, schema.metadata.get("keys"))
    elif schema.codec == "typed_ragged":
        payload, metadata = encode_arrays(values, schema.dtype)
    elif schema.codec == "ndarray" and schema.dtype is None:
        return _encode_inferred(path, values, choose_leaf_codec(values))
    elif schema.codec == "ndarray":
        payload, metadata = encode_numbers(values, schema.dtype)
    else:
        payload, metadata = encode_leaf(schema.codec, values)
    return EncodedColumn(schema.codec, len(values), payload, metadata)


def _encode_inferred(path: str, values: list[Any], decision: CodecDecision) -> EncodedColumn:
    """Encode with the codec that was chosen, else with one that holds all plain values."""
    refusals = [] if decision.accepted else [decision.reason]
    if all(value is None for value in values):
        codecs = ["json_ragged"]
    else:
        codecs = list(dict.fromkeys([*([decision.codec] if decision.accepted else []), "msgpack_ragged"]))
    for codec in codecs:
        try:
            return EncodedColumn(codec, len(values), *encode_leaf(codec, values))
        except _REFUSALS as error:
            refusals.append(f"{codec}: {error}")
    raise ValueError(
        f"unsupported structured non-tensor field {path}: unable to infer a safe codec ({'; '.join(refusals)})"
    )


def _encode_recursive(
    path: str, values: list[Any], leaves: Sequence[Leaf], nodes: Sequence[ColumnNode]
) -> EncodedColumn:
    payload: dict[str, Any] = {}
    node_specs = [_write_node(number, node, len(values), payload) for number, node in enumerate(nodes)]
    leaf_specs = []
    for number, leaf in enumerate(leaves):
        missing = [isinstance(value, Missing) for value in leaf.values]
        plain = [None if lacks else value for value, lacks in zip(leaf.values, missing, strict=True)]
        encoded = _encode_inferred(leaf.path, plain, leaf.decision)
        own = {**encoded.payload, "missing": np.array(missing, np.bool_)}
        members = {name: f"leaf.{number}.{name}" for name in own}
        payload.update({members[name]: buffer for name, buffer in own.items()})
        leaf_specs.append({"id": number, "path": leaf.path, **encoded.described(members)})
    metadata = {
        "schema_source": "inferred_from_runtime_values",
        "structure_version": 1,
        "root_path": path,
        "nodes": node_specs,
        "leaves": leaf_specs,
    }
    return EncodedColumn(RECURSIVE, len(values), payload, metadata)


def _write_node(number: int, node: ColumnNode, num_rows: int, payload: dict[str, Any]) -> dict[str, Any]:
    absent = np.zeros(num_rows, np.bool_)
    absent[node.absent] = True
    arrays: dict[str, Any] = {"missing": absent}
    if node.row_mask is not None:
        arrays["row_mask"] = np.array(node.row_mask, np.bool_)
    if node.lengths is not None:
        arrays["lengths"] = np.array(node.lengths, np.int64)
    payload.update({f"node.{number}.{name}": array for name, array in arrays.items()})
    names = {f"{name}_payload": f"node.{number}.{name}" for name in arrays}
    return {"id": number, "path": node.path, "node_type": node.node_type, "children": list(node.children), **names}


def _read_node(spec: Mapping[str, Any], parts: Mapping[str, Any]) -> ColumnNode:
    def array(name: str) -> list[Any] | None:
        full = spec.get(f"{name}_payload")
        return None if full is None else list(parts[full].tolist())

    absent = [row for row, lacks in enumerate(array("missing") or []) if lacks]
    return ColumnNode(
        spec["path"], spec["node_type"], list(spec["children"]), array("lengths"), array("row_mask"), absent
    )


def _is_native(leaf: Leaf) -> bool:
    """Return whether a leaf has values that plain codecs of whole rows do not hold."""
    if leaf.decision.codec == "typed_ragged":
        return any(isinstance(value, np.ndarray) for value in leaf.values)
    return leaf.decision.accepted and leaf.decision.codec in _NATIVE
