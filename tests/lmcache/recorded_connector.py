"""The plug-in, writing down what LMCache asked and got: one JSON line per request, with the hash of every chunk as it
lay in LMCache's memory; and one per look-up and load with the time for which the pool held up its thread.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from thread_times import HeldUp

from moonpool.integrations.lmcache import LmcacheConnector
from moonpool.integrations.lmcache.connector import Completion


class RecordedConnector(LmcacheConnector):
    def __init__(self, record_file: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._record_file = record_file
        for name in ("look_up", "load"):
            setattr(self._calls, name, self._timed(name, getattr(self._calls, name)))
        self._recording = threading.Lock()
        self._open: dict[int, tuple[str, list[str], list[memoryview], list[str], float]] = {}

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        return self._opened("look_up", keys, [], super().submit_batch_exists, keys)

    def submit_batch_get(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        return self._opened("load", keys, views, super().submit_batch_get, keys, views)

    def submit_batch_set(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        return self._opened("store", keys, views, super().submit_batch_set, keys, views)

    def drain_completions(self) -> list[Completion]:
        done = super().drain_completions()
        for number, _, error, each in done:
            self._write(number, error, each)
        return done

    def _opened(self, op: str, keys: Sequence[str], views: Sequence[memoryview], submit: Any, *arguments: Any) -> int:
        hashes = [_sha256(view) for view in views] if op == "store" else []
        with self._recording:  # its completion may be drained before submit() returns
            begun_s = time.monotonic()
            number: int = submit(*arguments)
            self._open[number] = (op, list(keys), list(views), hashes, begun_s)
        return number

    def _write(self, number: int, error: str, done: list[bool]) -> None:
        with self._recording:
            opened = self._open.pop(number, None)
        if opened is None:  # a deletion
            return
        op, keys, views, hashes, begun_s = opened
        wait_s = time.monotonic() - begun_s
        if op == "load":
            hashes = [_sha256(view) if is_loaded else "" for view, is_loaded in zip(views, done, strict=True)]
        row = {"op": op, "keys": keys, "sha256": hashes, "done": done, "error": error, "wait_s": wait_s}
        self._append(row)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            held = HeldUp()
            result = call(*arguments)
            self._append({"op": "held", "call": name, "held_s": held.seconds()})
            return result

        return timed

    def _append(self, row: dict[str, Any]) -> None:
        with open(self._record_file, "a") as file:
            file.write(json.dumps(row) + "\n")


def _sha256(view: memoryview) -> str:
    return hashlib.sha256(view).hexdigest()
