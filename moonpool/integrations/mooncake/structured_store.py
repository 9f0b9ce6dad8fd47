"""`MooncakeBundleTransfer`: batches of samples in a store, put together by stages and read by field and by row.

A batch has one structured object (structured_objects.py) per stage of the program that made it. A stage adds fields to
the batch without touching what is stored. A field whose values are Python objects is stored as a column
(column_encoding.py); the reference to the batch says how. All objects of a batch are in one group: they are evicted
together.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from moonpool.integrations.mooncake.batch_fields import (
    as_column,
    build,
    check_schemas,
    count_rows,
    join_flat,
    select_fields,
    select_rows,
    split_flat,
    split_sections,
)
from moonpool.integrations.mooncake.batch_refs import (
    FieldSchema,
    MooncakeDataProtoRef,
    StructuredFieldLocation,
    resolve_ref,
)
from moonpool.integrations.mooncake.column_encoding import EncodedColumn, decode_column, encode_column
from moonpool.integrations.mooncake.payload_writes import BundleTransferPolicy
from moonpool.integrations.mooncake.structured_members import Rows
from moonpool.integrations.mooncake.structured_objects import (
    FIELDS_KEY,
    StructuredObjectPayload,
    StructuredObjects,
    checked_policy,
)
from moonpool.integrations.mooncake.types import ReplicateConfig
from moonpool.integrations.mooncake.write_groups import declines_group, group_of, with_group

Kind = Literal["dataproto", "dict"]


class MooncakeBundleTransfer(StructuredObjects):
    """Structured objects and batches in a store."""

    def put(
        self,
        data: Any,
        *,
        type: Kind = "dataproto",
        namespace: str = "default",
        partition: str = "default",
        stage: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        config: Any = None,
        field_schemas: Mapping[str, FieldSchema] | None = None,
    ) -> MooncakeDataProtoRef:
        """Store a batch: an object or dict with sections, or with type "dict" a flat dict."""
        _check_kind(type)
        sections = split_flat(data, field_schemas or {}) if type == "dict" else data
        empty = MooncakeDataProtoRef(0, {}, {}, {}, namespace, partition, _storage_group_id=_new_group(config))
        return self._add_stage(empty, sections, stage, chunk_bytes, policy, config, field_schemas or {}, is_new=True)

    def put_dataproto(self, data: Any, **options: Any) -> MooncakeDataProtoRef:
        """put() of an object or dict with sections."""
        return self.put(data, type="dataproto", **options)

    def append_dataproto_fields(
        self,
        ref: Any,
        data: Any,
        *,
        stage: str,
        overwrite: bool = False,
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        field_schemas: Mapping[str, FieldSchema] | None = None,
        config: Any = None,
    ) -> MooncakeDataProtoRef:
        """Store more fields of a batch. Return the reference to all of them; the old one stays usable, except for a
        stage that was overwritten.
        """
        known = resolve_ref(ref)
        group = group_of(config)
        if group is not None and known.group is not None and group != known.group:
            raise ValueError(f"group {group!r} conflicts with the batch's group {known.group!r}")
        schemas = field_schemas or {}
        return self._add_stage(known, data, stage, chunk_bytes, policy, config, schemas, overwrite=overwrite)

    def get(
        self,
        ref: Any,
        *,
        type: Kind = "dataproto",
        fields: Sequence[str] | None = None,
        batch_fields: Sequence[str] | None = None,
        non_tensor_fields: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        data_cls: Any = None,
        destinations: Mapping[str, Any] | None = None,
        rows: Any = None,
    ) -> Any:
        """Read a batch, or some fields and rows of it. Type "dict" returns a flat dict, with lists for the fields that
        are columns of Python values; otherwise these are arrays of objects.
        """
        _check_kind(type)
        known = resolve_ref(ref)
        names = select_fields(known, fields, batch_fields, non_tensor_fields)
        taken = select_rows(rows, known.batch_size)
        info = known.meta_info
        if meta_info_keys is not None:
            info = {key: info[key] for key in meta_info_keys if key in info}
        sections: dict[str, dict[str, Any]] = {"batch": {}, "non_tensor_batch": {}, "meta_info": dict(info)}
        opened = {
            stage: self._open(known.stage_refs[stage]) for stage in {known.field_index[each].stage for each in names}
        }
        for name in names:
            place = known.field_index[name]
            manifest, metadata = opened[place.stage]
            if name in known.encoded_non_tensor:
                values = self._read_column(manifest, metadata, known.encoded_non_tensor[name], taken)
                value = values if type == "dict" else as_column(values)
            else:
                value = self._read_member(manifest, metadata, place.member, taken, (destinations or {}).get(name))
            sections[place.section][name] = value
        return join_flat(sections) if type == "dict" else build(sections, data_cls)

    def get_dataproto(self, ref: Any, **options: Any) -> Any:
        """get() as an object or dict with sections."""
        return self.get(ref, type="dataproto", **options)

    def cleanup_dataproto(self, ref: Any) -> None:
        """Remove all stages of a batch."""
        known = resolve_ref(ref)
        for stage in {each.manifest_key: each for each in known.stage_refs.values()}.values():
            self.remove_bundle(stage)

    def dataproto_manifest_view(self, ref: Any) -> dict[str, Any]:
        """Return what is stored of a batch: per field its stage, member and form, without reading the fields."""
        known = resolve_ref(ref)
        opened = {stage: self._open(each)[1] for stage, each in known.stage_refs.items()}
        fields: dict[str, dict[str, Any]] = {"batch": {}, "non_tensor_batch": {}}
        for name, place in known.field_index.items():
            specs = opened[place.stage].get(FIELDS_KEY, {})
            spec = specs.get(place.member, {"encoding": "bytes"})
            if name in known.encoded_non_tensor:
                column = known.encoded_non_tensor[name]
                parts = {part: specs.get(member) for part, member in column["payload_members"].items()}
                spec = {"encoding": "structured_non_tensor", **column, "payload_specs": parts}
            fields[place.section][name] = {
                "section": place.section,
                "stage": place.stage,
                "member": place.member,
                "spec": spec,
            }
        return {
            "namespace": known.namespace,
            "partition": known.partition,
            "batch_size": known.batch_size,
            "batch_fields": fields["batch"],
            "non_tensor_fields": fields["non_tensor_batch"],
            "meta_info_keys": list(known.meta_info),
            "stages": {
                stage: {"manifest_key": each.manifest_key, "dataproto": opened[stage].get("dataproto", {})}
                for stage, each in known.stage_refs.items()
            },
        }

    def _add_stage(
        self,
        ref: MooncakeDataProtoRef,
        data: Any,
        stage: str,
        chunk_nbytes: int | None,
        policy: BundleTransferPolicy | None,
        config: Any,
        schemas: Mapping[str, FieldSchema],
        *,
        overwrite: bool = False,
        is_new: bool = False,
    ) -> MooncakeDataProtoRef:
        batch, others, info = split_sections(data)
        check_schemas({"batch": batch, "non_tensor_batch": others, "meta_info": info}, schemas)
        num_rows = count_rows(batch, others)
        places = {name: StructuredFieldLocation(stage, f"batch.{name}", "batch") for name in batch}
        places |= {
            name: StructuredFieldLocation(stage, f"non_tensor_batch.{name}", "non_tensor_batch") for name in others
        }
        _check_fields(ref, places, stage, num_rows, overwrite, is_new)
        merged = {**ref.meta_info, **info}
        if not places:
            return replace(ref, meta_info=merged)
        members, columns = _encode_fields(batch, others, schemas)
        older = ref.stage_refs.get(stage)
        stored = self._put_object(
            StructuredObjectPayload(_describe_stage(ref, stage, num_rows), members),
            ref.partition,
            chunk_nbytes,
            checked_policy(policy, None),
            _grouped(config, ref.group),
            None if overwrite else older,
        )
        if overwrite and older is not None:
            self.remove_bundle(older)
        encoded = {name: each for name, each in ref.encoded_non_tensor.items() if name not in places}
        return replace(
            ref,
            batch_size=num_rows,
            stage_refs={**ref.stage_refs, stage: stored},
            field_index={**ref.field_index, **places},
            meta_info=merged,
            encoded_non_tensor=encoded | columns,
        )

    def _read_column(
        self, manifest: Mapping[str, Any], metadata: Mapping[str, Any], described: Mapping[str, Any], rows: Rows
    ) -> list[Any]:
        parts = {
            part: self._read_member(manifest, metadata, member, None, None)
            for part, member in described["payload_members"].items()
        }
        values = decode_column(described, parts)
        if rows is None:
            return values
        return values[rows] if isinstance(rows, slice) else [values[row] for row in rows]


def _encode_fields(
    batch: Mapping[str, Any], others: Mapping[str, Any], schemas: Mapping[str, FieldSchema]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the members of a stage, and what the reference says of the fields that are columns."""
    members = {f"batch.{name}": value for name, value in batch.items()}
    columns = {}
    for name, value in others.items():
        member = f"non_tensor_batch.{name}"
        column = _encode_field(name, value, schemas.get(name))
        if column is None:
            members[member] = value
            continue
        names = {part: f"{member}.{part}" for part in column.payload}
        columns[name] = column.described(names)
        members.update({names[part]: buffer for part, buffer in column.payload.items()})
    return members, columns


def _encode_field(name: str, value: Any, schema: FieldSchema | None) -> EncodedColumn | None:
    """Return the column of a field; None for an array that is a member as it is."""
    path = f"non_tensor_batch.{name}"
    used = schema if schema is not None and schema.section in (None, "non_tensor_batch") else None
    is_array = isinstance(value, np.ndarray) and not value.dtype.hasobject
    if is_array and (used is None or used.codec == "auto"):
        return None
    if used is None:
        return encode_column(path, value)
    try:
        return encode_column(path, value, used)
    except (TypeError, ValueError, AttributeError) as error:
        text = f"failed to encode field {name!r} with the schema's codec {used.codec!r}: {error}"
        raise type(error)(text) from error


def _describe_stage(ref: MooncakeDataProtoRef, stage: str, num_rows: int) -> dict[str, Any]:
    """Return the metadata of a stage's object."""
    owner = {"version": 1, "namespace": ref.namespace, "partition": ref.partition, "stage": stage}
    return {"layout": "dataproto_stage", "dataproto": {**owner, "batch_size": num_rows}}


def _check_fields(
    ref: MooncakeDataProtoRef,
    places: Mapping[str, StructuredFieldLocation],
    stage: str,
    num_rows: int,
    overwrite: bool,
    is_new: bool,
) -> None:
    if not is_new and places and num_rows != ref.batch_size:
        raise ValueError(f"the batch size of the new fields is {num_rows}, that of the batch is {ref.batch_size}")
    taken = sorted(set(places) & set(ref.field_index))
    if taken and not overwrite:
        raise ValueError(f"fields already exist: {taken}")
    left = sorted(name for name, place in ref.field_index.items() if place.stage == stage and name not in places)
    if overwrite and left:
        raise ValueError(f"an overwrite of stage {stage!r} must include existing fields: {left}")


def _check_kind(kind: str) -> None:
    if kind not in ("dataproto", "dict"):
        raise ValueError(f"unsupported Mooncake payload type: {kind!r}")


def _new_group(config: Any) -> str | None:
    """Return the group of a new batch: the config's, none if the config declines one, else a new one."""
    return None if declines_group(config) else group_of(config) or f"structured-{uuid.uuid4().hex}"


def _grouped(config: Any, group: str | None) -> Any:
    """Return the config with the batch's group."""
    if group is None:
        return config
    return with_group(ReplicateConfig() if config is None else config, group, 1)
