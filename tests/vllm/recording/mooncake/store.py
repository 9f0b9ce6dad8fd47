"""Appends one JSON line per key to $MOONPOOL_RECORD: the hash of the bytes at the engine's own pointers, as put and as
loaded, and the store's counters at its end.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

from moonpool.integrations.mooncake import MooncakeDistributedStore as Store
from moonpool.integrations.mooncake import ReplicateConfig

__all__ = ["MooncakeDistributedStore", "ReplicateConfig"]


class MooncakeDistributedStore(Store):
    def batch_put_from_multi_buffers(
        self, keys: Sequence[str], pointers: Any, sizes: Any, config: Any = None
    ) -> list[int]:
        hashes = _hashes(pointers, sizes)
        codes = super().batch_put_from_multi_buffers(keys, pointers, sizes, config)
        _record("put", keys, hashes, codes)
        return codes

    def batch_get_into_multi_buffers(
        self, keys: Sequence[str], pointers: Any, sizes: Any, prefer_alloc_in_same_node: bool = False
    ) -> list[int]:
        codes = super().batch_get_into_multi_buffers(keys, pointers, sizes, prefer_alloc_in_same_node)
        _record("get", keys, _hashes(pointers, sizes), codes)
        return codes

    def close(self) -> int:
        counters = self.counters()
        if counters:
            _write([{"op": "counters", **counters}])
        return super().close()


def _hashes(pointers: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> list[str]:
    """Of what lies there now, read past the store."""
    hashes = []
    for each, lengths in zip(pointers, sizes, strict=True):
        digest = hashlib.sha256()
        for pointer, length in zip(each, lengths, strict=True):
            digest.update(ctypes.string_at(pointer, length))
        hashes.append(digest.hexdigest())
    return hashes


def _record(op: str, keys: Sequence[str], hashes: list[str], codes: list[int]) -> None:
    rows = zip(keys, hashes, codes, strict=True)
    _write([{"op": op, "key": key, "sha256": sha256, "code": int(code)} for key, sha256, code in rows])


def _write(lines: list[dict[str, Any]]) -> None:
    with open(os.environ["MOONPOOL_RECORD"], "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
