"""The client program of vs_mooncake.py: a program written for Mooncake, which uses `mooncake.store` and nothing else of
either system. It runs unchanged in upstream's environment and in ours.

It reads its work as lines of JSON, [what, {arguments}], and answers each with {"result": ...} or {"error": ...}.
Times are those of the calls alone. What it reads is compared with what was written, outside the measured time.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from typing import Any

from mooncake.store import MooncakeDistributedStore

LOCAL_BUFFER_NBYTES = 256 << 20


def key_of(label: str, number: int, nbytes: int) -> str:
    """A key of `nbytes` characters, as long as those of an engine."""
    return f"{label}-{number:06d}-".ljust(nbytes, "k")


def mark_of(label: str, number: int, nbytes: int) -> bytes:
    """What stands at the start and at the end of a value."""
    return f"{label}/{number}/".encode().ljust(32, b".")[: min(32, nbytes)]


class Memory:
    """Memory of this process that the store may read and write, cut into places of one size."""

    def __init__(self, store: Any, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self._map.write(b"\x5a" * nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        require(store.register_buffer(self.address, nbytes) == 0, "the memory cannot be registered")

    def write_mark(self, at: int, nbytes: int, mark: bytes) -> None:
        self._map[at : at + len(mark)] = mark
        self._map[at + nbytes - len(mark) : at + nbytes] = mark

    def check_mark(self, at: int, nbytes: int, mark: bytes) -> None:
        for start in (at, at + nbytes - len(mark)):
            found = self._map[start : start + len(mark)]
            require(found == mark, f"read {found!r} where {mark!r} was written")


def require(is_right: bool, what: str) -> None:
    if not is_right:
        raise RuntimeError(what)


class Client:
    def __init__(self) -> None:
        self._store: Any = MooncakeDistributedStore()
        self._memory: Memory | None = None

    def setup(self, master: str, offered_nbytes: int, memory_nbytes: int) -> None:
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", offered_nbytes, LOCAL_BUFFER_NBYTES, "tcp", "", master)
        require(code == 0, f"setup returned {code}")
        if memory_nbytes:
            self._memory = Memory(self._store, memory_nbytes)

    def put(self, label: str, count: int, nbytes: int, key_nbytes: int, batch: int) -> float:
        """Store `count` new values, `batch` at a time (1: one by one), and return the seconds."""
        memory, keys, places, sizes = self._places(label, count, nbytes, key_nbytes)
        for number, at in enumerate(places):
            memory.write_mark(at - memory.address, nbytes, mark_of(label, number, nbytes))
        began_s = time.perf_counter()
        if batch == 1:
            codes = [self._store.put_from(key, at, nbytes) for key, at in zip(keys, places, strict=True)]
        else:
            codes = []
            for start in range(0, count, batch):
                cut = slice(start, start + batch)
                codes += self._store.batch_put_from(keys[cut], places[cut], sizes[cut])
        took_s = time.perf_counter() - began_s
        require(not any(codes), f"a put returned {[code for code in codes if code][:3]}")
        return took_s

    def get(self, label: str, count: int, nbytes: int, key_nbytes: int, batch: int) -> list[float]:
        """Look for values that another process has stored, and read each of them twice. Return the seconds of the first
        pass and of the second.
        """
        memory, keys, places, sizes = self._places(label, count, nbytes, key_nbytes)
        require(all(found == 1 for found in self._store.batch_is_exist(keys)), "a value is missing")
        passes = []
        for _ in range(2):
            for at in places:
                memory.write_mark(at - memory.address, nbytes, b"-" * 32)
            passes.append(self._get_once(keys, places, sizes, batch))
            for number, at in enumerate(places):
                memory.check_mark(at - memory.address, nbytes, mark_of(label, number, nbytes))
        return passes

    def _get_once(self, keys: list[str], places: list[int], sizes: list[int], batch: int) -> float:
        began_s = time.perf_counter()
        if batch == 1:
            found = [self._store.get_into(key, at, nbytes) for key, at, nbytes in zip(keys, places, sizes, strict=True)]
        else:
            found = []
            for start in range(0, len(keys), batch):
                cut = slice(start, start + batch)
                found += self._store.batch_get_into(keys[cut], places[cut], sizes[cut])
        took_s = time.perf_counter() - began_s
        require(found == sizes, f"a get returned {[each for each in found if each != sizes[0]][:3]}")
        return took_s

    def exist(self, label: str, count: int, key_nbytes: int, batch: int) -> float:
        """Ask for values that exist, and return the seconds."""
        keys = [key_of(label, number, key_nbytes) for number in range(count)]
        began_s = time.perf_counter()
        if batch == 1:
            found = [self._store.is_exist(key) for key in keys]
        else:
            found = []
            for start in range(0, count, batch):
                found += self._store.batch_is_exist(keys[start : start + batch])
        took_s = time.perf_counter() - began_s
        require(found == [1] * count, "a value is missing")
        return took_s

    def close(self) -> int:
        return int(self._store.close())

    def _places(
        self, label: str, count: int, nbytes: int, key_nbytes: int
    ) -> tuple[Memory, list[str], list[int], list[int]]:
        assert self._memory is not None, "set up without memory"
        places = [self._memory.address + number * nbytes for number in range(count)]
        keys = [key_of(label, number, key_nbytes) for number in range(count)]
        return self._memory, keys, places, [nbytes] * count


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    client = Client()
    for line in sys.stdin:
        what, arguments = json.loads(line)
        try:
            answer: dict[str, Any] = {"result": getattr(client, what)(**arguments)}
        except Exception as error:  # noqa: BLE001 - the benchmark reports it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
