"""What a client process of `moonpool bench store` does with objects: put, get, view; and plain loops beside them.

Rates are GB/s of payload or objects/s. Copies within the machine are given as the `best` pass through all
objects, as are the loops beside them; what stands beside sockets and disks as the mean.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.base.checksum import crc32c
from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.store import Store
from moonpool.store.client import ClientConfig, ObjectView, Put
from moonpool.store.client.view_ledger import SPARE_S
from moonpool.store.messages import Tier
from moonpool.transfer import TransferConfig, TransferEngine, aligned_buffer

MIB = 1 << 20
SMALL_NBYTES = 4096
SMALL_BATCH = 1000
_TIMEOUT_S = 60.0
Page = NDArray[np.uint8]


def key_of(label: str, number: int) -> bytes:
    """As long as the key of a block."""
    return f"{label}-{number}".encode().ljust(36, b".")


def _number_of(key: bytes) -> int:
    return int(key.rstrip(b".").rpartition(b"-")[2])


def times_s(work: Callable[[], object], for_s: float, after: Callable[[], object] | None = None) -> list[float]:
    """How long each of as many runs took as fit in the time, one that is not counted before them. `after` each run, and
    not in its time, all is put back.
    """
    taken: list[float] = []
    ends_s = time.perf_counter() + for_s
    while True:
        started_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started_s)
        if after is not None:
            after()
        if len(taken) > 1 and time.perf_counter() >= ends_s:
            return taken[1:]


class ObjectWork:
    """Each way of reaching the node is a client of its own, made when it is first used."""

    def __init__(self, address: str, run_dir: str, stack: ExitStack) -> None:
        self._address, self._run_dir, self._stack = address, run_dir, stack
        self._clients: dict[str, Store] = {}
        self._pages: list[Page] = []
        self._round = 0
        self._removable: list[list[bytes]] = []

    def work(self) -> dict[str, Callable[..., Any]]:
        return {
            "fill": self.fill,
            "get": self.get,
            "get_bytes": self.get_bytes,
            "copy_out": self.copy_out,
            "put": self.put,
            "copy_in": self.copy_in,
            "view_us": self.view_us,
            "first_view_us": self.first_view_us,
            "get_small": self.get_small,
            "put_small": self.put_small,
            "get_cold": self.get_cold,
            "stats": self.stats,
        }

    # 1 MiB

    def fill(self, label: str, count: int, first: int = 0) -> None:
        """Stores objects of 1 MiB of noise."""
        for start in range(first, first + count, 64):
            numbers = range(start, min(start + 64, first + count))
            pages = self._memory(len(numbers))
            _check(self._client("shm").put_objects(_puts([key_of(label, number) for number in numbers], pages)))

    def get(self, way: str, label: str, count: int, batch: bool, seconds: float, best: bool = True) -> float:
        """GB/s, each object into memory of its own."""
        client, keys, pages = self._client(way), _keys(label, count), self._memory(count)
        buffers = [[page] for page in pages]

        def one_by_one() -> None:
            for key, page in zip(keys, pages, strict=True):
                _require(client.get_into(key, page) == MIB)

        def all_at_once() -> None:
            _check_sizes(client.get_many_into(keys, buffers))

        return _gb(count) / _typical(times_s(all_at_once if batch else one_by_one, seconds), best=best)

    def get_bytes(self, label: str, count: int, batch: bool, seconds: float) -> float:
        """GB/s as new bytes, which is what other clients for Python give."""
        client, keys = self._client("shm"), _keys(label, count)

        def one_by_one() -> None:
            for key in keys:
                _require(client.get(key) is not None)

        taken = times_s((lambda: client.get_many(keys)) if batch else one_by_one, seconds)
        return _gb(count) / statistics.fmean(taken)

    def copy_out(self, label: str, count: int, seconds: float) -> float:
        """GB/s of a loop that copies the same bytes from where they lie, and takes the checksum of each copy."""
        pages = self._memory(count)
        views = self._client("shm").view_many(_keys(label, count))
        sources = [np.frombuffer(view.pieces[0], np.uint8) for view in _only_views(views)]

        def work() -> None:
            for page, source in zip(pages, sources, strict=True):
                np.copyto(page, source)
                crc32c(page.data)

        taken = times_s(work, seconds)
        for view in _only_views(views):
            view.close()
        return _gb(count) / min(taken)

    def put(self, way: str, count: int, batch: bool, seconds: float, best: bool = True) -> float:
        """GB/s under keys that are new each time; removing them again is not in the time."""
        client, pages = self._client(way), self._memory(count)
        keys: list[bytes] = []

        def one_by_one() -> None:
            for key, page in zip(keys, pages, strict=True):
                _require(client.put(key, page))

        def all_at_once() -> None:
            _check(client.put_objects(_puts(keys, pages)))

        def renew() -> None:
            if keys:
                _require(all(client.remove_many(keys)))
            keys[:] = _keys(self._fresh("put"), count)

        renew()
        taken = times_s(all_at_once if batch else one_by_one, seconds, renew)
        return _gb(count) / _typical(taken, best=best)

    def copy_in(self, count: int, seconds: float) -> float:
        """GB/s of a loop that takes the checksum of each object and copies it into shared memory, as put must."""
        pages = self._memory(count)
        shared = np.frombuffer(mmap.mmap(-1, count * MIB), np.uint8).reshape(count, MIB)  # unmapped when it goes

        def work() -> None:
            for number, page in enumerate(pages):
                crc32c(page.data)
                np.copyto(shared[number], page)

        return _gb(count) / min(times_s(work, seconds))

    def view_us(self, label: str, count: int, always: bool, seconds: float) -> float:
        """The median time until a view of 1 MiB is there, of objects that were viewed within the last second. Closing
        it is not in the time.
        """
        client, keys = self._client("shm"), _keys(label, count)
        opened: list[ObjectView | MoonpoolError] = []
        turn = iter(range(1 << 60))

        def work() -> None:
            opened[:] = client.view_many([keys[next(turn) % count]], verify="always" if always else "once")

        def close() -> None:
            for view in _only_views(opened):
                _require(not view.is_copy)
                view.close()

        return statistics.median(times_s(work, seconds, close)) * 1e6

    def first_view_us(self, label: str, count: int, seconds: float) -> float:
        """The same of objects that were not viewed lately, so that the master is asked each time."""
        client, keys = self._client("shm"), _keys(label, count)
        taken: list[float] = []
        ends_s = time.perf_counter() + seconds
        while not taken or time.perf_counter() < ends_s:
            time.sleep(1.5 * SPARE_S)  # until none of them is pinned
            for key in keys:
                started_s = time.perf_counter()
                opened = client.view_many([key])
                taken.append(time.perf_counter() - started_s)
                for view in _only_views(opened):
                    view.close()
                del opened
        return statistics.median(taken) * 1e6

    # 4 KiB

    def get_small(self, label: str, num_batches: int, seconds: float) -> float:
        """Objects/s, in batches, into memory of the caller's."""
        client = self._client("shm")
        memory = np.zeros((SMALL_BATCH, SMALL_NBYTES), np.uint8)
        buffers = [[memory[row]] for row in range(SMALL_BATCH)]
        batches = [_small_keys(label, number) for number in range(num_batches)]

        def work() -> None:
            for keys in batches:
                _require(client.get_many_into(keys, buffers).count(SMALL_NBYTES) == SMALL_BATCH)

        return num_batches * SMALL_BATCH / statistics.fmean(times_s(work, seconds))

    def put_small(self, num_batches: int, label: str | None = None) -> float:
        """Objects/s, in batches, once through. Without a label they are removed before the next time, in no one's time:
        so both clients put at once, and remove at once.
        """
        client = self._client("shm")
        pages = list(np.random.default_rng(1).integers(0, 256, (SMALL_BATCH, SMALL_NBYTES), np.uint8))
        for keys in self._removable:
            _require(all(client.remove_many(keys)))
        name = self._fresh("small") if label is None else label
        batches = [_small_keys(name, number) for number in range(num_batches)]
        self._removable = batches if label is None else []
        started_s = time.perf_counter()
        for keys in batches:
            _check(client.put_objects(_puts(keys, pages)))
        return num_batches * SMALL_BATCH / (time.perf_counter() - started_s)

    # on disk

    def get_cold(self, batch: int) -> float:
        """GB/s of reading what is on disk alone, each object once, in the order it was put, into aligned memory."""
        client = self._client("shm")
        pages = [_touched(aligned_buffer(MIB)) for _ in range(batch)]
        cold = sorted((each.key for each in client.objects() if each.tier == Tier.SSD), key=_number_of)
        started_s = time.perf_counter()
        for start in range(0, len(cold), batch):
            keys = cold[start : start + batch]
            _check_sizes(client.get_many_into(keys, [[page] for page in pages[: len(keys)]]))
        return _gb(len(cold)) / (time.perf_counter() - started_s)

    def stats(self) -> dict[str, int]:
        """The master's counters, and how many objects each segment has, by its name."""
        found = self._client("shm").stats()
        return {**found.counters, **{each.name: each.num_objects for each in found.segments}}

    def _client(self, way: str) -> Store:
        if way not in self._clients:
            wires = TransferConfig(run_dir=self._run_dir, tcp_host=None, shm=way == "shm")
            engine = self._stack.enter_context(TransferEngine(wires))
            config = ClientConfig(name=f"bench {way}", rpc_timeout_s=_TIMEOUT_S)
            client = Store(self._address, engine=engine, config=config)
            self._clients[way] = self._stack.enter_context(client)
        return self._clients[way]

    def _memory(self, count: int) -> list[Page]:
        """So many MiB of noise, the same each time."""
        if len(self._pages) < count:
            noise = np.random.default_rng(0).integers(0, 256, (count, MIB), np.uint8)
            self._pages = list(noise)
        return self._pages[:count]

    def _fresh(self, label: str) -> str:
        """A label that was never used before: this client's own, and new each time."""
        self._round += 1
        return f"{label}-{id(self):x}-{self._round}"


def _keys(label: str, count: int) -> list[bytes]:
    return [key_of(label, number) for number in range(count)]


def _small_keys(label: str, batch: int) -> list[bytes]:
    return [key_of(label, batch * SMALL_BATCH + number) for number in range(SMALL_BATCH)]


def _puts(keys: Sequence[bytes], pages: Sequence[Page]) -> list[Put]:
    return [Put(key=key, buffers=[page]) for key, page in zip(keys, pages, strict=True)]


def _touched(memory: memoryview) -> memoryview:
    """Its pages are there before the clock runs."""
    memory[::SMALL_NBYTES] = bytes(len(memory[::SMALL_NBYTES]))
    return memory


def _only_views(views: Sequence[ObjectView | MoonpoolError]) -> Iterator[ObjectView]:
    for view in views:
        if isinstance(view, MoonpoolError):
            raise view
        yield view


def _require(is_right: bool) -> None:
    if not is_right:
        raise Unavailable("the pool does not have, or did not take, what it was given")


def _check(outcomes: Sequence[MoonpoolError | None]) -> None:
    for error in outcomes:
        if error is not None:
            raise error


def _check_sizes(got: Sequence[int | MoonpoolError]) -> None:
    for each in got:
        if isinstance(each, MoonpoolError):
            raise each


def _gb(count: int) -> float:
    return count * MIB / 1e9


def _typical(taken_s: Sequence[float], *, best: bool) -> float:
    return min(taken_s) if best else statistics.fmean(taken_s)
