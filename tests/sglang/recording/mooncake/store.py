"""Appends one JSON line per call to $MOONPOOL_RECORD: keys, results, how long the call was held up, the store's
counters, and the hash of the bytes at the engine's own pointers, as put and as loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from thread_times import HeldUp

from moonpool.integrations.mooncake import MooncakeDistributedStore as _Store
from moonpool.integrations.mooncake import ReplicateConfig
from moonpool.integrations.mooncake.host_memory import MooncakeHostMemAllocator

__all__ = ["MooncakeDistributedStore", "MooncakeHostMemAllocator", "ReplicateConfig"]


class MooncakeDistributedStore(_Store):
    def batch_put_from(self, keys: Sequence[str], pointers: Any, sizes: Any, *rest: Any) -> list[int]:
        hashes = _hashes(pointers, sizes)
        put = super().batch_put_from
        return self._recorded("put", keys, lambda: put(keys, pointers, sizes, *rest), lambda: hashes)

    def batch_get_into(self, keys: Sequence[str], pointers: Any, sizes: Any) -> list[int]:
        get = super().batch_get_into
        return self._recorded("get", keys, lambda: get(keys, pointers, sizes), lambda: _hashes(pointers, sizes))

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        ask = super().batch_is_exist
        return self._recorded("exist", keys, lambda: ask(keys), lambda: [""] * len(keys))

    def _recorded(
        self, op: str, keys: Sequence[str], call: Callable[[], list[int]], hashes: Callable[[], list[str]]
    ) -> list[int]:
        held = HeldUp()
        codes = call()
        held_s = held.seconds()
        row = {"op": op, "keys": list(keys), "codes": [int(code) for code in codes], "sha256": hashes()}
        with open(os.environ["MOONPOOL_RECORD"], "a") as file:
            file.write(json.dumps({**row, "held_s": held_s, "counters": self.counters()}) + "\n")
        return codes


def _hashes(pointers: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """Of what lies there now, read past the store."""
    return [
        hashlib.sha256(ctypes.string_at(pointer, nbytes)).hexdigest()
        for pointer, nbytes in zip(pointers, sizes, strict=True)
    ]
