"""References to batches in the store: which stage holds which field, as Python objects and as JSON for transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moonpool.integrations.mooncake.bundles import RemoteBundleRef

HANDLE_TYPE = "mooncake_dataproto_ref"
HANDLE_VERSION = 1
_KIND = "bundle_stages"
_GROUP = "storage_group_id"


@dataclass(frozen=True)
class FieldSchema:
    """What a caller says about a field. `metadata["section"]` puts it into batch, non_tensor_batch or meta_info;
    `metadata["dtype"]` is the element type of numbers; without `nullable`, None is refused.
    """

    codec: str
    nullable: bool = True
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def section(self) -> str | None:
        section = self.metadata.get("section")
        if section not in (None, "batch", "non_tensor_batch", "meta_info"):
            raise ValueError(f"there is no section {section!r}")
        return section

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The element type that the schema names. ValueError when it is none of numbers."""
        name = self.metadata.get("dtype")
        if name is None:
            return None
        try:
            dtype: np.dtype[Any] = np.dtype(name)
        except TypeError as error:
            raise ValueError(f"the schema names no element type: {name!r}") from error
        if dtype.kind not in "biufc":
            raise ValueError(f"the element type of a schema is one of numbers, not {dtype}")
        return dtype


@dataclass(frozen=True)
class StructuredFieldLocation:
    """The stage that holds a field, and the name of the member there."""

    stage: str
    member: str
    section: str


@dataclass
class MooncakeDataProtoRef:
    """A batch whose fields lie in one bundle per stage."""

    batch_size: int
    stage_refs: dict[str, RemoteBundleRef]
    field_index: dict[str, StructuredFieldLocation]
    meta_info: dict[str, Any]
    namespace: str = "default"
    partition: str = "default"
    global_indexes: list[int] | None = None
    encoded_non_tensor: dict[str, Any] = field(default_factory=dict)  # fields that are columns of Python values
    _storage_group_id: str | None = field(default=None, repr=False)

    @property
    def group(self) -> str | None:
        """The group of all its objects, which are evicted together."""
        return self._storage_group_id

    def fields(self, section: str) -> list[str]:
        return [name for name, location in self.field_index.items() if location.section == section]


def is_dataproto_ref_handle(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") == HANDLE_TYPE


def export_dataproto_ref(ref: MooncakeDataProtoRef) -> dict[str, Any]:
    """Return the reference as JSON values. TypeError when meta_info holds others."""
    if not isinstance(ref, MooncakeDataProtoRef):
        raise TypeError(f"{type(ref).__name__} is no MooncakeDataProtoRef")
    handle = {
        "type": HANDLE_TYPE,
        "version": HANDLE_VERSION,
        "kind": _KIND,
        "batch_size": ref.batch_size,
        "namespace": ref.namespace,
        "partition": ref.partition,
        "global_indexes": _plain(ref.global_indexes),
        "stage_refs": {stage: {"manifest_key": each.manifest_key} for stage, each in ref.stage_refs.items()},
        "field_index": {
            name: {"stage": each.stage, "member": each.member, "section": each.section}
            for name, each in ref.field_index.items()
        },
        "meta_info": _plain(ref.meta_info),
        "encoded_non_tensor": _plain(ref.encoded_non_tensor),
    }
    if ref.group is not None:
        handle[_GROUP] = ref.group
    return handle


def import_dataproto_ref(handle: Mapping[str, Any]) -> MooncakeDataProtoRef:
    """Return the reference of a handle. Nothing is read from the store. ValueError when it is no such handle."""
    if not is_dataproto_ref_handle(handle):
        raise ValueError("this is no handle of a batch")
    version = handle.get("version")
    if version not in (HANDLE_VERSION, 2) or handle.get("kind") != _KIND:
        raise ValueError(f"unsupported version {version!r} or kind {handle.get('kind')!r} of a handle")
    group = handle.get(_GROUP)
    if (group is None and version == 2) or not (group is None or (isinstance(group, str) and group)):
        raise ValueError(f"{_GROUP} of a handle must be text")
    stages = {
        _text(stage): RemoteBundleRef(_text(_mapping(each, "a stage ref").get("manifest_key")), {})
        for stage, each in _mapping(handle.get("stage_refs"), "stage_refs").items()
    }
    locations = _mapping(handle.get("field_index"), "field_index")
    return MooncakeDataProtoRef(
        batch_size=int(handle["batch_size"]),
        stage_refs=stages,
        field_index={_text(name): _location(name, each, stages) for name, each in locations.items()},
        meta_info=dict(_mapping(handle.get("meta_info", {}), "meta_info")),
        namespace=str(handle.get("namespace", "default")),
        partition=str(handle.get("partition", "default")),
        global_indexes=_indexes(handle.get("global_indexes")),
        encoded_non_tensor=dict(_mapping(handle.get("encoded_non_tensor", {}), "encoded_non_tensor")),
        _storage_group_id=group,
    )


export_ref = export_dataproto_ref
import_ref = import_dataproto_ref


def resolve_ref(ref: Any) -> MooncakeDataProtoRef:
    """Return a reference that is given as one, or as a handle. TypeError when it is neither."""
    if isinstance(ref, MooncakeDataProtoRef):
        return ref
    if is_dataproto_ref_handle(ref):
        return import_dataproto_ref(ref)
    raise TypeError(f"{type(ref).__name__} is no reference to a batch")


def _location(name: Any, value: Any, stages: Mapping[str, Any]) -> StructuredFieldLocation:
    place = _mapping(value, f"field_index[{name!r}]")
    section = place.get("section")
    if section not in ("batch", "non_tensor_batch"):
        raise ValueError(f"field {name!r} of a handle has the invalid section {section!r}")
    stage = _text(place.get("stage"))
    if stage not in stages:
        raise ValueError(f"field {name!r} of a handle is in the unknown stage {stage!r}")
    return StructuredFieldLocation(stage, _text(place.get("member")), section)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"names, stages, members and manifest keys of a handle are non-empty text, not {value!r}")
    return value


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} of a handle must be a mapping")
    return value


def _indexes(value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in value):
        raise ValueError("global_indexes of a handle must be a list of integers")
    return value


def _plain(value: Any) -> Any:
    """Return the value with JSON types only."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [_plain(each) for each in value]
    raise TypeError(f"a handle holds JSON values only, no {type(value).__name__}")
