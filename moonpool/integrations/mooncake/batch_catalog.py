"""`DataProtoCatalog`: which rows of which stored batches hold the fields of a sample, by partition and key.

The catalog is in the memory of one process and reads no store. A call that raises changes nothing. Thread-safe.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moonpool.integrations.mooncake.batch_refs import export_dataproto_ref, import_dataproto_ref

Place = tuple[str, int]  # manifest key of a stored batch, row in it


@dataclass
class _Sample:
    tags: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Place] = field(default_factory=dict)


class DataProtoCatalog:
    """Samples by partition and key. A later update of a field replaces the earlier one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._partitions: dict[str, dict[str, _Sample]] = {}
        self._handles: dict[str, dict[str, Any]] = {}  # by manifest key

    def update(
        self,
        partition: str,
        keys: Sequence[str],
        *,
        tags: Sequence[Mapping[str, Any]] | None = None,
        handle: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Merge tags into samples, and note that a stored batch has their fields: row N is that of key N."""
        names = _names(keys, "keys")
        if tags is None and handle is None:
            raise ValueError("an update takes tags or a handle")
        if tags is not None and len(tags) != len(names):
            raise ValueError("tags must have the same length as keys")
        batch = None if handle is None else _batch(handle, len(names))
        with self._lock:
            samples = self._partitions.setdefault(_text(partition), {})
            for row, name in enumerate(names):
                sample = samples.setdefault(name, _Sample())
                sample.tags.update(copy.deepcopy(dict(tags[row])) if tags is not None else {})
                if batch is not None:
                    sample.fields.update(dict.fromkeys(batch[2], (batch[0], row)))
            if batch is not None:
                self._handles[batch[0]] = batch[1]
            self._drop_unused()
            found = [samples[name] for name in names]
            return {"keys": names, "tags": _tags(found), "fields": _union(found)}

    def resolve(self, partition: str, keys: Sequence[str], fields: Sequence[str] | None = None) -> dict[str, Any]:
        """Return where the fields of the samples lie, by key. Fields that lie together are a group."""
        names = _names(keys, "keys")
        with self._lock:
            samples = self._partitions.get(partition, {})
            unknown = [name for name in names if name not in samples]
            if unknown:
                raise ValueError(f"keys were not found in partition {partition!r}: {unknown}")
            found = [samples[name] for name in names]
            wanted = _union(found) if fields is None else _names(fields, "field names")
            if not wanted:
                raise ValueError("the keys do not contain any fields")
            groups: dict[tuple[Place, ...], list[str]] = {}
            for name in wanted:
                if any(name not in sample.fields for sample in found):
                    raise ValueError(f"field {name!r} is not ready for all keys")
                groups.setdefault(tuple(sample.fields[name] for sample in found), []).append(name)
            used = {manifest for places in groups for manifest, _ in places}
            return {
                "keys": names,
                "tags": _tags(found),
                "fields": wanted,
                "field_groups": [{"fields": each, "locations": list(places)} for places, each in groups.items()],
                "handles": {manifest: copy.deepcopy(self._handles[manifest]) for manifest in used},
            }

    def list(self, partition: str | None = None) -> dict[str, dict[str, Any]]:
        """Return the tags by partition and key."""
        with self._lock:
            return {
                name: {key: copy.deepcopy(sample.tags) for key, sample in samples.items()}
                for name, samples in self._partitions.items()
                if partition in (None, name)
            }

    def remove(self, partition: str, keys: Sequence[str]) -> None:
        """Forget samples. What is stored stays."""
        names = _names(keys, "keys")
        with self._lock:
            samples = self._partitions.get(partition, {})
            for name in names:
                samples.pop(name, None)
            if not samples:
                self._partitions.pop(partition, None)
            self._drop_unused()

    def _drop_unused(self) -> None:
        samples = [sample for each in self._partitions.values() for sample in each.values()]
        used = {manifest for sample in samples for manifest, _ in sample.fields.values()}
        self._handles = {manifest: handle for manifest, handle in self._handles.items() if manifest in used}


def _batch(handle: Mapping[str, Any], num_keys: int) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Return manifest key, handle and fields of a stored batch. ValueError unless it has one stage and these rows."""
    ref = import_dataproto_ref(handle)
    if len(ref.stage_refs) != 1:
        raise ValueError("a batch in the catalog has exactly one DataProto stage")
    if ref.batch_size != num_keys or not ref.field_index:
        raise ValueError(f"the handle has {ref.batch_size} rows of {len(ref.field_index)} fields for {num_keys} keys")
    (stage,) = ref.stage_refs.values()
    return stage.manifest_key, export_dataproto_ref(ref), tuple(ref.field_index)


def _union(samples: Sequence[_Sample]) -> list[str]:
    return list(dict.fromkeys(name for sample in samples for name in sample.fields))


def _tags(samples: Sequence[_Sample]) -> list[dict[str, Any]]:
    return [copy.deepcopy(sample.tags) for sample in samples]


def _names(values: Sequence[str], what: str) -> list[str]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ValueError(f"{what} must be a sequence of text")
    names = [_text(each) for each in values]
    if len(set(names)) < len(names):
        raise ValueError(f"{what} must be unique")
    return names


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"partitions, keys and fields are non-empty text, not {value!r}")
    return value
