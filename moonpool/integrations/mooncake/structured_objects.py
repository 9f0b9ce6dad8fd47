"""`StructuredObjects`: JSON metadata and named members in a store, read whole, by member or by row.

A structured object is a bundle (bundles.py) whose metadata says how each member is stored (structured_members.py).
Members are arrays, tensors and bytes. The form is upstream's: its module reads what this one stored, and the reverse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moonpool.integrations.mooncake.bundles import BundleRef, Bundles, RemoteBundleRef
from moonpool.integrations.mooncake.payload_writes import DEFAULT_CHUNK_NBYTES, BundleStore, BundleTransferPolicy
from moonpool.integrations.mooncake.structured_members import MemberReader, Rows, encode_member

FIELDS_KEY = "__mooncake_structured_fields__"
_WRAPPED_KEY = "__mooncake_wrapped_object__"


@dataclass(frozen=True)
class StructuredObjectPayload:
    """JSON metadata and named members."""

    metadata: Mapping[str, Any] | None = None
    buffers: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.buffers is None:
            raise TypeError("a structured object has buffers")


@dataclass
class StructuredObjectResult:
    metadata: dict[str, Any]
    objects: dict[str, Any]


@dataclass(frozen=True)
class StructuredMemberSlice:
    """Rows of one member: only axis 0 exists."""

    axis: int
    start: int
    end: int
    step: int = 1

    def rows(self) -> slice:
        if self.axis != 0:
            raise ValueError("members are sliced along axis=0 only")
        if self.step <= 0:
            raise ValueError("the slice's step must be positive")
        return slice(self.start, self.end, self.step)


@dataclass(frozen=True)
class StructuredObjectReadSpec:
    """What to read of a structured object: by default all members, whole."""

    ref: BundleRef
    member_names: tuple[str, ...] | None = None
    member_slices: tuple[tuple[str, StructuredMemberSlice], ...] = ()

    def select_members(self, names: Sequence[str] | None) -> StructuredObjectReadSpec:
        """Return a spec of these members only; None selects all."""
        return replace(self, member_names=None if names is None else tuple(names))

    def slice_member(self, name: str, axis: int, start: int, end: int, step: int = 1) -> StructuredObjectReadSpec:
        """Return a spec that reads only some rows of a member."""
        slices = {**dict(self.member_slices), name: StructuredMemberSlice(axis, start, end, step)}
        return replace(self, member_slices=tuple(slices.items()))

    def member_slice(self, name: str) -> StructuredMemberSlice | None:
        return dict(self.member_slices).get(name)


class StructuredObjects:
    """Structured objects in `store`, under keys that begin with `key_prefix`.

    With a `buffer_pool`, chunks are written from its memory, and members are read into it: arrays, and bytes as arrays,
    that hold a lease until release_result(), or until they are gone.
    """

    def __init__(
        self,
        store: BundleStore,
        key_prefix: str = "bundle",
        default_chunk_bytes: int = DEFAULT_CHUNK_NBYTES,
        buffer_pool: Any = None,
    ) -> None:
        self.store = store
        self.default_chunk_bytes = default_chunk_bytes
        self._bundle_store = Bundles(store, key_prefix, default_chunk_bytes, buffer_pool)
        self._transport = self._bundle_store.writer
        self._members = MemberReader(self._bundle_store.reader)
        self.key_prefix = self._bundle_store.prefix

    def put_bundle(
        self,
        meta: Any,
        buffers: Mapping[str, Any],
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Store metadata of any form and named buffers."""
        used = checked_policy(policy, max_inflight_put)
        return self._bundle_store.put_bundle(meta, buffers, partition, chunk_bytes, used, config)

    def remove_bundle(self, ref: BundleRef) -> None:
        """Remove a bundle or structured object, also while it is read. RuntimeError when something of it stays."""
        self._bundle_store.remove(ref)

    def put_structured_object(
        self,
        payload: StructuredObjectPayload,
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Store an object. TypeError for metadata that is no JSON and for values that are no members."""
        used = checked_policy(policy, max_inflight_put)
        return self._put_object(payload, partition, chunk_bytes, used, config)

    def put_object(
        self,
        obj: Any,
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Store a mapping of members, or one array, tensor or bytes."""
        if isinstance(obj, Mapping):
            payload = StructuredObjectPayload({}, obj)
        else:
            payload = StructuredObjectPayload({_WRAPPED_KEY: True}, {"value": obj})
        return self.put_structured_object(payload, partition, chunk_bytes, policy, max_inflight_put, config)

    def get_object(self, ref: BundleRef) -> Any:
        """Return what put_object() stored."""
        result = self.materialize(self.read_spec(ref))
        return result.objects["value"] if result.metadata.get(_WRAPPED_KEY) else result.objects

    def read_spec(self, ref: BundleRef) -> StructuredObjectReadSpec:
        """Return a spec that reads the whole object. Nothing is read yet."""
        return StructuredObjectReadSpec(ref)

    def materialize(self, spec: StructuredObjectReadSpec) -> StructuredObjectResult:
        return self.materialize_into(spec, None)

    def materialize_into(
        self, spec: StructuredObjectReadSpec, destinations: Mapping[str, Any] | None
    ) -> StructuredObjectResult:
        """Read what a spec says; members with a destination go to the caller's memory."""
        if spec.member_names is not None and not spec.member_names:
            raise ValueError("the read spec selected no members")
        manifest, metadata = self._open(spec.ref)
        names = spec.member_names or tuple(manifest["buffers"])
        slices = {name: each.rows() for name, each in spec.member_slices}
        places = destinations or {}
        objects = {
            name: self._read_member(manifest, metadata, name, slices.get(name), places.get(name)) for name in names
        }
        return StructuredObjectResult(metadata, objects)

    @staticmethod
    def release_result(result: Any) -> None:
        """Release the buffers of a pool that values of a result lie in, if any does."""
        _release(result, set())

    def _put_object(
        self,
        payload: StructuredObjectPayload,
        partition: str,
        chunk_nbytes: int | None,
        policy: BundleTransferPolicy,
        config: Any,
        older: BundleRef | None = None,
    ) -> RemoteBundleRef:
        """Store an object; with `older`, one that has the members of an older object too."""
        metadata = _checked_metadata({} if payload.metadata is None else payload.metadata)
        specs, buffers = {}, {}
        for name, value in (payload.buffers or {}).items():
            specs[name], buffers[name] = encode_member(name, value)
        carried = None
        if older is not None:
            carried, known = self._open(older)
            specs = {**known.get(FIELDS_KEY, {}), **specs}
            metadata = {**known, **metadata}
        if specs:
            metadata[FIELDS_KEY] = specs
        meta = json.dumps(metadata, separators=(",", ":")).encode()
        return self._bundle_store.put_bundle(meta, buffers, partition, chunk_nbytes, policy, config, carried=carried)

    def _open(self, ref: BundleRef) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return manifest and metadata of a structured object."""
        manifest = self._bundle_store.manifest(ref)
        try:
            metadata = json.loads(bytes(self._bundle_store.reader.read(manifest["meta"])))
        except ValueError as error:
            raise ValueError(f"the bundle is no structured object: {error}") from error
        if not isinstance(metadata, dict) or not isinstance(metadata.get(FIELDS_KEY, {}), dict):
            raise ValueError("the bundle is no structured object")
        return manifest, metadata

    def _read_member(
        self, manifest: Mapping[str, Any], metadata: Mapping[str, Any], name: str, rows: Rows, destination: Any
    ) -> Any:
        if name not in manifest["buffers"]:
            raise KeyError(f"the object has no member {name!r}")
        spec = metadata.get(FIELDS_KEY, {}).get(name, {})
        return self._members.read(name, spec, manifest["buffers"][name], rows, destination)


def _checked_metadata(metadata: Any) -> dict[str, Any]:
    if not isinstance(metadata, Mapping):
        raise TypeError("the metadata of a structured object is a mapping")
    if FIELDS_KEY in metadata:
        raise ValueError(f"{FIELDS_KEY} is reserved")
    try:
        json.dumps(dict(metadata))
    except (TypeError, ValueError) as error:
        raise TypeError(f"the metadata of a structured object must be JSON-serializable: {error}") from error
    if not isinstance(metadata.get("layout", ""), str):
        raise ValueError("the layout of a structured object's metadata is text")
    return {"layout": "structured", **metadata}


def checked_policy(policy: BundleTransferPolicy | None, max_inflight: int | None) -> BundleTransferPolicy:
    used = policy or BundleTransferPolicy()
    return used if max_inflight is None else replace(used, max_inflight_put=max_inflight)


def _release(value: Any, seen: set[int]) -> None:
    owner = getattr(value, "_mooncake_pool_owner", None)
    if owner is not None:
        if id(owner) not in seen:
            seen.add(id(owner))
            owner.release()
        return
    is_objects = isinstance(value, np.ndarray) and value.dtype == object
    if not (isinstance(value, Mapping | list | tuple) or is_objects) or id(value) in seen:
        return
    seen.add(id(value))
    for each in value.values() if isinstance(value, Mapping) else value.flat if is_objects else value:
        _release(each, seen)
