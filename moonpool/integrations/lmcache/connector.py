"""The class that LMCache's `native_plugin` adapter loads. It is called from LMCache's threads, and none of its calls
waits for the pool or raises because of it.

Each submit_... returns a number at once. When its request is done, the number appears once in drain_completions(), and
`event_fd()` becomes readable. Until then the memory of a load or a store belongs to this class, afterwards to LMCache.
Look-ups, loads and stores have threads of their own, so that a look-up does not wait for a transfer.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from moonpool.base.config import from_mapping
from moonpool.base.errors import Overloaded, PeerLost
from moonpool.integrations.lmcache.pool_calls import PoolCalls, PoolResult
from moonpool.integrations.lmcache.request_lane import RequestLane
from moonpool.integrations.lmcache.settings import LmcacheSettings

_LOG = logging.getLogger(__name__)
_WRITE_COUNTERS_S = 1.0

Completion = tuple[int, bool, str, list[bool]]  # number, whether all keys succeeded, the failure, per key


class LmcacheConnector:
    """Thread-safe. Settings by name as in LmcacheSettings. Raise ConfigError for a wrong one, or when no master is
    named or found; a master that is away is no error, its chunks are misses until it comes.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = from_mapping(LmcacheSettings, settings)
        self._calls = PoolCalls(self._settings)
        max_requests = self._settings.max_requests
        self._look_ups = RequestLane("lmcache-look-up", 1, max_requests)
        self._loads = RequestLane("lmcache-load", self._settings.num_loaders, max_requests)
        self._stores = RequestLane("lmcache-store", 1, max_requests, self._settings.max_store_nbytes)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._done: list[Completion] = []
        self._longest_s = {"look_up": 0.0, "load": 0.0, "store": 0.0, "delete": 0.0}
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._closing = threading.Event()
        self._reporter: threading.Thread | None = None
        if self._settings.counters_file:
            self._reporter = threading.Thread(target=self._report_loop, name="lmcache-counters", daemon=True)
            self._reporter.start()

    def event_fd(self) -> int:
        """Return a descriptor that is readable while completions wait. It stays this object's."""
        return self._event_fd

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Ask which chunks are in the pool. Those found are leased for some seconds, so that a load finds them."""
        return self._submit(self._look_ups, "look_up", len(keys), lambda: self._calls.look_up(keys))

    def submit_batch_get(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Load each chunk into its view. Bytes are verified; a chunk that fails a check is not loaded."""
        return self._submit(self._loads, "load", len(keys), lambda: self._calls.load(keys, views))

    def submit_batch_set(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Store each chunk. Refused at once when too many bytes wait: LMCache's own memory holds them meanwhile."""
        nbytes = sum(view.nbytes for view in views)
        return self._submit(self._stores, "store", len(keys), lambda: self._calls.store(keys, views), nbytes)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Remove chunks, for an LMCache that is told to evict the second tier itself."""
        return self._submit(self._look_ups, "delete", len(keys), lambda: self._calls.remove(keys))

    def drain_completions(self) -> list[Completion]:
        """Return the requests that are done since the last call. `ok` is False when a key failed other than by being
        absent; the list says which keys succeeded.
        """
        with self._lock:
            if self._event_fd >= 0:
                with contextlib.suppress(BlockingIOError):  # nothing is done
                    os.eventfd_read(self._event_fd)
            done, self._done = self._done, []
        return done

    def counters(self) -> dict[str, int]:
        """Return PoolCalls.counters(), and for each call the longest time in ms that LMCache waited for an answer."""
        with self._lock:
            longest = {f"longest_{call}_ms": round(1000 * wait_s) for call, wait_s in self._longest_s.items()}
        return {**self._calls.counters(), **longest}

    def close(self) -> None:
        """Give up what waits, let what runs end, and disconnect. Idempotent. Takes at most the longest timeout."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for lane in (self._stores, self._loads, self._look_ups):
            lane.close()
        self._closing.set()
        if self._reporter is not None:
            self._reporter.join()
        counters = self.counters()
        _LOG.info("LMCache on the pool ends: %s", ", ".join(f"{name} {value}" for name, value in counters.items()))
        self._calls.close()
        with self._lock:
            os.close(self._event_fd)
            self._event_fd = -1

    def _submit(
        self, lane: RequestLane, call: str, num_keys: int, act: Callable[[], PoolResult], nbytes: int = 0
    ) -> int:
        number, begun_s = next(self._numbers), time.monotonic()

        def complete(result: PoolResult) -> None:
            waited_s = time.monotonic() - begun_s
            with self._lock:
                self._longest_s[call] = max(self._longest_s[call], waited_s)
                text = "" if result.error is None else f"{result.error.code}: {result.error}"
                self._done.append((number, result.error is None, text, result.done))
                if self._event_fd >= 0:
                    os.eventfd_write(self._event_fd, 1)

        def answer(is_wanted: bool) -> None:
            complete(act() if is_wanted else self._calls.refuse(call, num_keys, PeerLost("the connector was closed")))

        if not lane.submit(answer, nbytes):
            full = Overloaded("too many requests wait for the pool, or the connector is closed")
            complete(self._calls.refuse(call, num_keys, full))
        return number

    def _report_loop(self) -> None:
        written: dict[str, int] | None = None
        while True:
            is_last = self._closing.wait(_WRITE_COUNTERS_S)
            counters = self.counters()
            if counters != written:
                _write_json(self._settings.counters_file, counters)
                written = counters
            if is_last:
                return


def _write_json(path: str, values: dict[str, int]) -> None:
    """Replace the file as a whole, so that readers never see half of it. A disk that fails is logged."""
    try:
        with open(f"{path}.new", "w") as file:
            json.dump(values, file)
        os.replace(f"{path}.new", path)
    except OSError as error:
        _LOG.warning("the counters cannot be written to %s: %s", path, error)
