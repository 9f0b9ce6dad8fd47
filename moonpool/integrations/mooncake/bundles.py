"""Bundles: named buffers that are stored in chunks, with one manifest that says which keys hold them.

    PREFIX/PARTITION/ID/manifest                  JSON: version 1, layout "bundle", object_id, meta, buffers by name
    PREFIX/PARTITION/ID/meta                      what the writer says about the buffers
    PREFIX/PARTITION/ID/buffer/NAME[/chunk/N]     a buffer, or chunk N of it

This is upstream's layout: its module reads these bundles from the same keys, and this one reads upstream's. A bundle is
complete when its manifest is stored; a put that fails removes what it wrote. Errors of the store are RuntimeErrors,
wrong arguments and manifests ValueErrors.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.integrations.mooncake.bundle_payloads import (
    StoredChunk,
    TensorObjectBuffer,
    TensorPayload,
    cut,
    describe_chunks,
    views_of,
)
from moonpool.integrations.mooncake.codes import ErrorCode
from moonpool.integrations.mooncake.payload_reads import PayloadReader
from moonpool.integrations.mooncake.payload_writes import (
    BundleStore,
    BundleTransferPolicy,
    PayloadWriter,
    check_status,
    has,
)
from moonpool.integrations.mooncake.write_groups import options


@dataclass
class RemoteBundleRef:
    """A stored bundle. An empty manifest is read from the store when it is needed."""

    manifest_key: str
    manifest: dict[str, Any]


BundleRef = RemoteBundleRef | Mapping[str, Any]


class Bundles:
    """Bundles under one prefix of keys."""

    def __init__(self, store: BundleStore, key_prefix: str, chunk_nbytes: int, buffer_pool: Any = None) -> None:
        self._store = store
        self.prefix = checked_prefix(key_prefix)
        self._chunk_nbytes = _checked_chunk(chunk_nbytes)
        self.writer = PayloadWriter(store, buffer_pool)
        self.reader = PayloadReader(store, buffer_pool)

    def put_bundle(
        self,
        meta: Any,
        buffers: Mapping[str, Any],
        partition: str,
        chunk_bytes: int | None,
        policy: BundleTransferPolicy,
        config: Any = None,
        *,
        carried: Mapping[str, Any] | None = None,
    ) -> RemoteBundleRef:
        """Store a bundle. With `carried`, an older manifest, the new bundle has the buffers of the old one too, and
        removing the new bundle removes the old one.
        """
        policy.check()
        _check_segment(partition, "partition")
        for name in buffers:
            _check_segment(name, "buffer name")
        chunk_nbytes = self._chunk_nbytes if chunk_bytes is None else _checked_chunk(chunk_bytes)
        object_id = f"{partition}/{uuid.uuid4().hex}"
        base = f"{self.prefix}/{object_id}"
        manifest: dict[str, Any] = {"version": 1, "layout": "bundle", "object_id": object_id}
        written: list[str] = []
        try:
            chunks = cut(f"{base}/meta", views_of(meta, "meta"), chunk_nbytes)
            manifest["meta"] = describe_chunks(f"{base}/meta", chunks)
            self._write(chunks, policy.copying(), config, written)
            manifest["buffers"] = self._put_buffers(base, buffers, chunk_nbytes, policy, config, written)
            if carried is not None:
                self._carry(manifest, carried)
            self._put_manifest(manifest, config)
        except BaseException:
            self.remove_keys(written, strict=False)
            raise
        return RemoteBundleRef(f"{base}/manifest", manifest)

    def put_bundle_manifest(
        self,
        meta: Any,
        buffers: Mapping[str, Any],
        *,
        partition: str,
        chunk_bytes: int | None,
        policy: BundleTransferPolicy | None,
        cleanup_keys: Sequence[str] | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Store a bundle of buffers that are stored already, named by what their manifests say about them. Removing it
        removes them and `cleanup_keys`.
        """
        carried = {"buffers": dict(buffers), "cleanup_keys": list(cleanup_keys or [])}
        used = policy or BundleTransferPolicy()
        return self.put_bundle(meta, {}, partition, chunk_bytes, used, config, carried=carried)

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
            known = decode_manifest(self._store.get(key))
        self._check(known)
        if key is not None and key != f"{self.prefix}/{known['object_id']}/manifest":
            raise ValueError("manifest_key is not that of the manifest's object_id")
        return dict(known)

    def payload_keys(self, spec: Mapping[str, Any]) -> list[str]:
        """Return the keys of one buffer."""
        return [chunk["key"] for chunk in spec["chunks"]]

    def keys(self, manifest: Mapping[str, Any]) -> list[str]:
        """Return all keys of a bundle but its manifest's."""
        specs = [manifest["meta"], *manifest["buffers"].values()]
        return [key for spec in specs for key in self.payload_keys(spec)] + list(manifest.get("cleanup_keys", []))

    def remove(self, ref: BundleRef) -> None:
        """Remove a bundle, readers or not. RuntimeError when something of it stays."""
        manifest = self.manifest(ref)
        self.remove_keys([*self.keys(manifest), f"{self.prefix}/{manifest['object_id']}/manifest"], strict=True)

    def remove_keys(self, keys: Sequence[str], *, strict: bool) -> None:
        """Remove keys; without `strict`, failures do not matter. Keys that do not exist are removed."""
        failed = list(dict.fromkeys(keys))
        removed = (None, ErrorCode.OK, ErrorCode.OBJECT_NOT_FOUND)
        try:
            if failed and has(self._store, "batch_remove"):
                store: Any = self._store
                codes = store.batch_remove(failed, True)
                failed = [key for key, code in zip(failed, codes, strict=True) if code not in removed]
            failed = [key for key in failed if self._store.remove(key, True) not in removed]
        except Exception:
            if strict:
                raise
        if failed and strict:
            raise RuntimeError(f"{len(failed)} keys could not be removed, the first is {failed[0]}")

    def _put_buffers(
        self,
        base: str,
        buffers: Mapping[str, Any],
        chunk_nbytes: int,
        policy: BundleTransferPolicy,
        config: Any,
        written: list[str],
    ) -> dict[str, Any]:
        """Write all buffers, plain ones with one call. Return what the manifest says of them."""
        specs: dict[str, Any] = {}
        chunks: list[StoredChunk] = []
        for name, value in buffers.items():
            key = f"{base}/buffer/{name}"
            if isinstance(value, TensorPayload | TensorObjectBuffer):
                written.append(key)
                specs[name] = self.writer.put_tensor(key, value, policy, config)
                continue
            cuts = cut(key, views_of(value, name), chunk_nbytes)
            specs[name] = describe_chunks(key, cuts)
            chunks += cuts
        self._write(chunks, policy, config, written)
        return specs

    def _write(
        self, chunks: Sequence[StoredChunk], policy: BundleTransferPolicy, config: Any, written: list[str]
    ) -> None:
        written += [chunk.key for chunk in chunks]
        self.writer.put_chunks(chunks, policy, config)

    def _put_manifest(self, manifest: Mapping[str, Any], config: Any) -> None:
        self._check(manifest)
        key = f"{self.prefix}/{manifest['object_id']}/manifest"
        blob = json.dumps(manifest, separators=(",", ":")).encode()
        check_status("put", key, self._store.put(key, blob, **options(config, 1)))

    def _carry(self, manifest: dict[str, Any], older: Mapping[str, Any]) -> None:
        """Add the buffers of a manifest, and remove with the new bundle all keys that the old one has besides."""
        twice = sorted(set(older["buffers"]) & set(manifest["buffers"]))
        if twice:
            raise ValueError(f"the bundle has these buffers already: {twice}")
        manifest["buffers"] = {**older["buffers"], **manifest["buffers"]}
        cleanup = list(older.get("cleanup_keys", []))
        if "object_id" in older:
            cleanup = [f"{self.prefix}/{older['object_id']}/manifest", *self.payload_keys(older["meta"]), *cleanup]
        keys = [*cleanup, *(str(spec["key"]) for spec in manifest["buffers"].values())]
        ids = {self._object_id(key) for key in keys} | {manifest["object_id"]}
        manifest["buffer_object_ids"] = sorted(each for each in ids if each is not None)
        manifest["cleanup_keys"] = list(dict.fromkeys(cleanup))

    def _object_id(self, key: str) -> str | None:
        """Return the object that a key of a bundle belongs to: PARTITION/ID."""
        if not key.startswith(f"{self.prefix}/"):
            return None
        parts = key[len(self.prefix) + 1 :].split("/")
        return "/".join(parts[:2]) if len(parts) > 2 else None

    def _check(self, manifest: Mapping[str, Any]) -> None:
        object_id = manifest.get("object_id")
        if manifest.get("version") != 1 or manifest.get("layout") != "bundle" or not isinstance(object_id, str):
            raise ValueError("this is no bundle manifest")
        ids = manifest.get("buffer_object_ids", [object_id])
        if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
            raise ValueError("buffer_object_ids of a bundle manifest are a list of text")
        bases = tuple(f"{self.prefix}/{each}/" for each in [object_id, *ids])
        buffers = manifest.get("buffers")
        if not isinstance(buffers, dict):
            raise ValueError("a bundle manifest has buffers by name")
        for spec in (manifest.get("meta"), *buffers.values()):
            _check_spec(spec, bases)
        for key in manifest.get("cleanup_keys", []):
            if not isinstance(key, str) or not key.startswith(bases):
                raise ValueError("cleanup_keys are outside of the bundle's namespace")


def decode_manifest(blob: bytes) -> dict[str, Any]:
    """Return what a manifest's bytes say. ValueError when they are none."""
    try:
        manifest = json.loads(blob)
    except ValueError as error:
        raise ValueError(f"this is no bundle manifest: {error}") from error
    if not isinstance(manifest, dict):
        raise ValueError("this is no bundle manifest")
    return manifest


def checked_prefix(key_prefix: str) -> str:
    prefix = key_prefix.strip("/")
    if not prefix or any(ord(letter) < 32 for letter in prefix):
        raise ValueError("key_prefix must be text without control characters")
    return prefix


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


def _checked_chunk(nbytes: int) -> int:
    if nbytes <= 0:
        raise ValueError(f"chunk_bytes must be positive, not {nbytes}")
    return nbytes


def _check_segment(text: str, what: str) -> None:
    if not isinstance(text, str) or not text or "/" in text or any(ord(letter) < 32 for letter in text):
        raise ValueError(f"{what} must be text without slashes and control characters, not {text!r}")
