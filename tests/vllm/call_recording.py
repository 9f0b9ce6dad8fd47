"""Writes down what an engine moves through `mooncake`: one JSON line per key or span in $MOONPOOL_RECORD, with the hash
of the bytes at the engine's own pointers, as stored and as loaded, and the store's counters at its end.

`gate` holds loads up while it is cleared, so that a test can act between the promise of a hit and the load.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

_VARIABLE = "MOONPOOL_RECORD"
SPAN_NBYTES = 128 * 1024  # one layer of one block of the tests' model
gate = threading.Event()
gate.set()
num_waiting = 0


def install() -> None:
    """Put the recording classes where connectors look, before vLLM imports them. Without the variable, do nothing."""
    if _VARIABLE not in os.environ:
        return
    import mooncake.engine
    import mooncake.store

    mooncake.store.MooncakeDistributedStore = _recording_store(mooncake.store.MooncakeDistributedStore)
    mooncake.engine.TransferEngine = _recording_engine(mooncake.engine.TransferEngine)


def _recording_store(base: Any) -> Any:
    class RecordingStore(base):  # type: ignore[misc]
        def batch_put_from_multi_buffers(
            self, keys: Sequence[str], pointers: Any, sizes: Any, config: Any = None
        ) -> list[int]:
            hashes = _hashes(pointers, sizes)
            codes: list[int] = super().batch_put_from_multi_buffers(keys, pointers, sizes, config)
            _record("put", keys, hashes, codes)
            return codes

        def batch_get_into_multi_buffers(self, keys: Sequence[str], pointers: Any, sizes: Any) -> list[int]:
            _pass_gate()
            began = time.perf_counter()
            codes: list[int] = super().batch_get_into_multi_buffers(keys, pointers, sizes)
            seconds = time.perf_counter() - began
            _record("get", keys, _hashes(pointers, sizes), codes)
            _write([{"op": "load", "seconds": seconds}])
            return codes

        def close(self) -> int:
            counters = self.counters()
            if counters:
                _write([{"op": "counters", **counters}])
            code: int = super().close()
            return code

    return RecordingStore


def _recording_engine(base: Any) -> Any:
    class RecordingEngine(base):  # type: ignore[misc]
        def batch_transfer_sync_write(
            self, target: str, buffers: Sequence[int], peer_buffers: Sequence[int], lengths: Sequence[int]
        ) -> int:
            """Records each span of SPAN_NBYTES with its address in the peer's process."""
            _pass_gate()
            rows = [
                {"op": "sent", "to": peer + at, "sha256": _hashes([[buffer + at]], [[SPAN_NBYTES]])[0]}
                for buffer, peer, length in zip(buffers, peer_buffers, lengths, strict=True)
                for at in range(0, length, SPAN_NBYTES)
            ]
            code: int = super().batch_transfer_sync_write(target, buffers, peer_buffers, lengths)
            _write([row | {"code": code} for row in rows])
            return code

    return RecordingEngine


def _pass_gate() -> None:
    global num_waiting
    num_waiting += 1
    gate.wait()
    num_waiting -= 1


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
    with open(os.environ[_VARIABLE], "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
