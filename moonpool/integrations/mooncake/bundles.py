"""Bundles: named buffers that are stored in chunks, with one manifest that says which keys hold them.

    PREFIX/PARTITION/ID/manifest            JSON: version 1, layout "bundle", object_id, meta, buffers by name
    PREFIX/PARTITION/ID/meta                what the writer says about the buffers
    PREFIX/PARTITION/ID/buffer/NAME[/N]     a buffer, or chunk N of it

A bundle is complete when its manifest is stored; a put that fails removes what it wrote. The store is any object with
put, get and remove; with register_buffer, batch_put_from, batch_get_into and get_into_ranges its memory is used without
a copy. Errors of the store are RuntimeErrors, wrong arguments and manifests ValueErrors.
"""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake.codes import ErrorCode
from moonpool.transfer.memory.buffers import address_of, as_bytes_view

DEFAULT_CHUNK_NBYTES = 64 * 1024 * 1024
_REGISTRATION = ("register_buffer", "unregister_buffer")


class BundleStore(Protocol):
    """What a store must have."""

    def put(self, key: str, value: Any, config: Any = None) -> int: ...
    def get(self, key: str) -> bytes: ...
    def remove(self, key: str, force: bool = False) -> int: ...


@dataclass(frozen=True)
class BundleTransferPolicy:
    """How chunks are written. `zero_copy` raises RuntimeError where the store cannot read registered memory."""

    max_inflight_put: int = 1
    put_mode: Literal["auto", "batch", "parallel"] = "auto"
    copy_mode: Literal["auto", "zero_copy", "copy"] = "auto"

    def check(self) -> None:
        if self.max_inflight_put < 1:
            raise ValueError(f"max_inflight_put must be positive, not {self.max_inflight_put}")
        if self.put_mode not in ("auto", "batch", "parallel"):
            raise ValueError(f"there is no put_mode {self.put_mode!r}")
        if self.copy_mode not in ("auto", "zero_copy", "copy"):
            raise ValueError(f"there is no copy_mode {self.copy_mode!r}")


@dataclass
class RemoteBundleRef:
    """A stored bundle. An empty manifest is read from the store when it is needed."""

    manifest_key: str
    manifest: dict[str, Any]


BundleRef = RemoteBundleRef | Mapping[str, Any]


class Bundles:
    """Bundles under one prefix of keys."""

    def __init__(self, store: BundleStore, key_prefix: str, chunk_nbytes: int) -> None:
        self._store = store
        self._prefix = key_prefix.strip("/")
        if not self._prefix:
            raise ValueError("key_prefix must not be empty")
        self._chunk_nbytes = _checked_chunk(chunk_nbytes)

    def put(
        self,
        meta: Any,
        buffers: Mapping[str, Any],
        partition: str,
        chunk_nbytes: int | None,
        policy: BundleTransferPolicy,
        config: Any = None,
        older: Mapping[str, Any] | None = None,
    ) -> RemoteBundleRef:
        """Store a bundle. With `older`, the new manifest also has the buffers of that manifest, and removing the new
        bundle removes the older one.
        """
        policy.check()
        _check_segment(partition, "partition")
        for name in buffers:
            _check_segment(name, "buffer name")
        chunk_nbytes = self._chunk_nbytes if chunk_nbytes is None else _checked_chunk(chunk_nbytes)
        object_id = f"{partition}/{uuid.uuid4().hex}"
        base = f"{self._prefix}/{object_id}"
        pieces: list[tuple[str, memoryview]] = []
        manifest: dict[str, Any] = {"version": 1, "layout": "bundle", "object_id": object_id}
        manifest["meta"] = _cut(f"{base}/meta", _views(meta, "meta"), chunk_nbytes, pieces)
        manifest["buffers"] = {
            name: _cut(f"{base}/buffer/{name}", _views(value, name), chunk_nbytes, pieces)
            for name, value in buffers.items()
        }
        if older is not None:
            self._carry(manifest, older)
        key = f"{base}/manifest"
        written = [name for name, _ in pieces]
        try:
            self._write(pieces, policy, config)
            blob = json.dumps(manifest, separators=(",", ":")).encode()
            _check_status("put", key, self._store.put(key, blob, **_options(config, 1)))
        except Exception:
            self._remove(written, strict=False)
            raise
        return RemoteBundleRef(key, manifest)

    def manifest(self, ref: BundleRef) -> dict[str, Any]:
        """Return the checked manifest. ValueError when it is not one, or names keys outside of its bundle."""
        key: Any
        if isinstance(ref, RemoteBundleRef):
            key, known = ref.manifest_key, ref.manifest
        else:
            key, known = ref.get("manifest_key"), ref.get("manifest") or {}
        if not known:
            if not isinstance(key, str):
                raise ValueError("a bundle ref has a manifest_key")
            known = _decode(self._store.get(key))
        self._check(known)
        if key is not None and key != f"{self._prefix}/{known['object_id']}/manifest":
            raise ValueError("manifest_key is not that of the manifest's object_id")
        return dict(known)

    def keys(self, manifest: Mapping[str, Any]) -> list[str]:
        """Return all keys of a bundle but its manifest's."""
        specs = [manifest["meta"], *manifest["buffers"].values()]
        return [chunk["key"] for spec in specs for chunk in spec["chunks"]] + list(manifest.get("cleanup_keys", []))

    def remove(self, ref: BundleRef) -> None:
        """Remove a bundle, readers or not. RuntimeError when something of it stays."""
        manifest = self.manifest(ref)
        self._remove([*self.keys(manifest), f"{self._prefix}/{manifest['object_id']}/manifest"], strict=True)

    def read(self, spec: Mapping[str, Any]) -> bytearray:
        """Return a buffer. RuntimeError when a chunk cannot be read."""
        value = bytearray(spec["bytes"])
        self.read_ranges(spec, [(0, 0, len(value))], memoryview(value))
        return value

    def read_ranges(self, spec: Mapping[str, Any], ranges: Sequence[tuple[int, int, int]], target: memoryview) -> None:
        """Read parts of a buffer to `target`: each (start in the buffer, start in the target, size)."""
        parts = [part for start, at, nbytes in ranges for part in _overlaps(spec["chunks"], start, at, nbytes)]
        if not parts:
            return
        is_whole = all(each.offset == 0 and each.nbytes == each.chunk["bytes"] for each in parts)
        with self._registered([target], "batch_get_into" if is_whole else "get_into_ranges") as pointers:
            if not pointers:
                self._copy(parts, target)
                return
            store: Any = self._store
            keys, sizes = [each.chunk["key"] for each in parts], [each.nbytes for each in parts]
            if is_whole:
                found = store.batch_get_into(keys, [pointers[0] + each.at for each in parts], sizes)
            else:
                places = [[[each.at] for each in parts]], [[[each.offset] for each in parts]]
                answer = store.get_into_ranges(pointers, [keys], *places, [[[size] for size in sizes]])
                found = [each[0] for each in answer[0]]
        for key, size, code in zip(keys, sizes, found, strict=True):
            if code != size:
                raise RuntimeError(f"get of {key} failed: {code}")

    def _copy(self, parts: Sequence[_Part], target: memoryview) -> None:
        """Read chunks as bytes and copy what is wanted of them."""
        values: dict[str, bytes] = {}
        for each in parts:
            key = each.chunk["key"]
            if key not in values:
                values[key] = self._get(each.chunk)
            target[each.at : each.at + each.nbytes] = values[key][each.offset : each.offset + each.nbytes]

    def _get(self, chunk: Mapping[str, Any]) -> bytes:
        value = self._store.get(chunk["key"])
        if len(value) != chunk["bytes"]:
            raise RuntimeError(f"get of {chunk['key']} failed: {len(value)} bytes instead of {chunk['bytes']}")
        return value

    def _write(self, pieces: Sequence[tuple[str, memoryview]], policy: BundleTransferPolicy, config: Any) -> None:
        """Write all pieces: with one call from their own memory where the store can do that, else one by one."""
        store: Any = self._store
        keys = [key for key, _ in pieces]
        if policy.copy_mode == "auto" and _has(store, "put_batch"):
            _check_status(
                "put", keys[0], store.put_batch(keys, [view for _, view in pieces], **_options(config, len(keys)))
            )
            return
        if policy.copy_mode == "zero_copy" or (policy.copy_mode == "auto" and policy.put_mode == "batch"):
            with self._registered([view for _, view in pieces], "batch_put_from") as pointers:
                if pointers:
                    sizes = [view.nbytes for _, view in pieces]
                    codes = store.batch_put_from(keys, pointers, sizes, **_options(config, len(keys)))
                    for key, code in zip(keys, codes, strict=True):
                        _check_status("put", key, code)
                    return
        if policy.copy_mode == "zero_copy":
            raise RuntimeError("the store cannot do a zero-copy put: it has no registered memory or no batch_put_from")
        self._put_each(pieces, policy, config)

    def _put_each(self, pieces: Sequence[tuple[str, memoryview]], policy: BundleTransferPolicy, config: Any) -> None:
        def put(piece: tuple[str, memoryview]) -> None:
            key, view = piece
            _check_status("put", key, self._store.put(key, view, **_options(config, 1)))

        if policy.put_mode == "parallel" and policy.max_inflight_put > 1:
            with ThreadPoolExecutor(policy.max_inflight_put) as threads:
                list(threads.map(put, pieces))
        else:
            for piece in pieces:
                put(piece)

    @contextmanager
    def _registered(self, views: Sequence[memoryview], call: str) -> Iterator[list[int]]:
        """Register memory for the block, and yield the pointers; [] when the store lacks the call. Memory that the
        store refuses may be registered already: the call will tell.
        """
        store: Any = self._store
        if not _has(store, *_REGISTRATION, call):
            yield []
            return
        own: list[int] = []
        pointers = [address_of(view) for view in views]
        try:
            for pointer, view in zip(pointers, views, strict=True):
                if pointer not in own and store.register_buffer(pointer, view.nbytes) == ErrorCode.OK:
                    own.append(pointer)
            yield pointers
        finally:
            for pointer in own:
                store.unregister_buffer(pointer)

    def _carry(self, manifest: dict[str, Any], older: Mapping[str, Any]) -> None:
        manifest["buffers"] = {**older["buffers"], **manifest["buffers"]}
        ids = {manifest["object_id"], older["object_id"], *older.get("buffer_object_ids", [])}
        kept = {chunk["key"] for spec in manifest["buffers"].values() for chunk in spec["chunks"]}
        keys = [*self.keys(older), f"{self._prefix}/{older['object_id']}/manifest"]
        manifest["buffer_object_ids"] = sorted(ids)
        manifest["cleanup_keys"] = [key for key in dict.fromkeys(keys) if key not in kept]

    def _check(self, manifest: Mapping[str, Any]) -> None:
        object_id = manifest.get("object_id")
        if manifest.get("version") != 1 or manifest.get("layout") != "bundle" or not isinstance(object_id, str):
            raise ValueError("this is no bundle manifest")
        ids = manifest.get("buffer_object_ids", [object_id])
        bases = tuple(f"{self._prefix}/{each}/" for each in [object_id, *ids])
        buffers = manifest.get("buffers")
        if not isinstance(buffers, dict):
            raise ValueError("a bundle manifest has buffers by name")
        for spec in (manifest.get("meta"), *buffers.values()):
            _check_spec(spec, bases)
        for key in manifest.get("cleanup_keys", []):
            if not isinstance(key, str) or not key.startswith(bases):
                raise ValueError("cleanup_keys are outside of the bundle's namespace")

    def _remove(self, keys: Sequence[str], strict: bool) -> None:
        """Remove keys; without `strict`, failures do not matter. Keys that do not exist are removed."""
        failed = list(keys)
        removed = (None, ErrorCode.OK, ErrorCode.OBJECT_NOT_FOUND)
        try:
            if _has(self._store, "batch_remove"):
                store: Any = self._store
                codes = store.batch_remove(list(keys), True)
                failed = [key for key, code in zip(keys, codes, strict=True) if code not in removed]
            failed = [key for key in failed if self._store.remove(key, True) not in removed]
        except Exception:
            if strict:
                raise
        if failed and strict:
            raise RuntimeError(f"{len(failed)} keys could not be removed, the first is {failed[0]}")


def group_of(config: Any) -> str | None:
    """Return the group that a config names; None for no group. ValueError unless it names one at most."""
    groups = getattr(config, "group_ids", None)
    if isinstance(groups, str):
        return groups or None
    named = list(groups or [])
    if len(named) > 1:
        raise ValueError("config.group_ids names one group for all objects of a bundle")
    if not all(isinstance(each, str) for each in named):
        raise ValueError("config.group_ids must contain strings")
    return named[0] or None if named else None


def with_group(config: Any, group: str | None, num_keys: int) -> Any:
    """Return a copy of the config in which all keys are in one group."""
    changed = copy.copy(config)
    changed.group_ids = None if group is None else [group] * num_keys
    return changed


def _options(config: Any, num_keys: int) -> dict[str, Any]:
    if config is None:
        return {}
    return {"config": with_group(config, group_of(config), num_keys) if hasattr(config, "group_ids") else config}


def _views(value: Any, name: str) -> list[memoryview]:
    """Return the memory of a buffer, which may be given in several parts."""
    try:
        return [as_bytes_view(part, writable=False) for part in (value if isinstance(value, list) else [value])]
    except InvalidInput as error:
        raise TypeError(f"{name} is no buffer: {error}") from error


def _cut(
    key: str, views: Sequence[memoryview], chunk_nbytes: int, pieces: list[tuple[str, memoryview]]
) -> dict[str, Any]:
    """Append the chunks of a buffer to `pieces`. Return what the manifest says about it."""
    parts = [view[start : start + chunk_nbytes] for view in views for start in range(0, view.nbytes, chunk_nbytes)]
    names = [key] if len(parts) == 1 else [f"{key}/{number}" for number in range(len(parts))]
    pieces += zip(names, parts, strict=True)
    chunks = [{"key": name, "bytes": part.nbytes} for name, part in zip(names, parts, strict=True)]
    return {"key": key, "bytes": sum(part.nbytes for part in parts), "chunks": chunks}


class _Part(NamedTuple):
    """Bytes of one chunk that are wanted, and where in the target they go."""

    chunk: Mapping[str, Any]
    at: int
    offset: int
    nbytes: int


def _overlaps(chunks: Sequence[Mapping[str, Any]], start: int, target_at: int, nbytes: int) -> Iterator[_Part]:
    """Yield the chunks that hold a range."""
    at = 0
    for chunk in chunks:
        low, high = max(start, at), min(start + nbytes, at + chunk["bytes"])
        if low < high:
            yield _Part(chunk, target_at + low - start, low - at, high - low)
        at += chunk["bytes"]


def _check_spec(spec: Any, bases: tuple[str, ...]) -> None:
    if not isinstance(spec, dict) or not isinstance(spec.get("chunks"), list):
        raise ValueError("a bundle manifest has chunks for each buffer")
    key = spec.get("key")
    if not isinstance(key, str) or not key.startswith(bases):
        raise ValueError("a buffer's key is outside of the bundle's namespace")
    keys = [chunk.get("key") for chunk in spec["chunks"]]
    if not all(isinstance(each, str) and (each == key or each.startswith(f"{key}/")) for each in keys):
        raise ValueError("a chunk's key is outside of its buffer's namespace")
    sizes = [chunk.get("bytes", -1) for chunk in spec["chunks"]]
    if len(set(keys)) < len(keys) or min(sizes, default=0) < 0 or sum(sizes) != spec.get("bytes"):
        raise ValueError("the chunks of a buffer do not make up the buffer")


def _decode(blob: bytes) -> dict[str, Any]:
    try:
        manifest = json.loads(blob)
    except ValueError as error:
        raise ValueError(f"this is no bundle manifest: {error}") from error
    if not isinstance(manifest, dict):
        raise ValueError("this is no bundle manifest")
    return manifest


def _checked_chunk(nbytes: int) -> int:
    if nbytes <= 0:
        raise ValueError(f"chunk_bytes must be positive, not {nbytes}")
    return nbytes


def _check_segment(text: str, what: str) -> None:
    if not isinstance(text, str) or not text or "/" in text:
        raise ValueError(f"{what} must be text without a slash, not {text!r}")


def _has(store: Any, *calls: str) -> bool:
    return all(callable(getattr(store, name, None)) for name in calls)


def _check_status(what: str, key: str, code: Any) -> None:
    if code not in (None, 0):
        raise RuntimeError(f"{what} of {key} failed: {code}")
