"""Measures how fast the pool is before it is needed, so that no request has to find out by waiting.

An object is put into the pool, read back and removed, small first, so that a slow pool is known by its small one. A
worker does it before it registers, and again when it has pulled nothing for a while: a policy that leaves a slow pool
alone would otherwise never learn that it is fast again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator

from moonpool.base.clock import Clock
from moonpool.base.cluster import PullSample
from moonpool.base.errors import MoonpoolError
from moonpool.store.client import StoreClient

_LOG = logging.getLogger(__name__)
_SMALL_NBYTES = 64 * 1024
_MAX_NBYTES = 8 * 1024**2
_FAST_S = 0.1  # a larger object is tried only if the one before took less
_UNKNOWN_EVERY_S = 5.0
_QUIET_S = 30.0


class PoolProbe:
    """`connect` makes a client of its own, so that a worker's counters know only requests. `block_nbytes` is the size
    of what requests will pull."""

    def __init__(self, connect: Callable[[], StoreClient], block_nbytes: int, clock: Clock) -> None:
        self._connect, self._clock = connect, clock
        self._sizes = sorted({_SMALL_NBYTES, min(max(block_nbytes, _SMALL_NBYTES), _MAX_NBYTES)})

    def measure(self) -> list[PullSample]:
        """Return what was measured; [] if there is no pool to measure."""
        samples: list[PullSample] = []
        try:
            with self._connect() as store:
                for sample in self._read_back(store):
                    samples.append(sample)
                    if sample.seconds > _FAST_S:
                        break
        except MoonpoolError as error:
            _LOG.debug("the pool was not measured: %s", error)
        return samples

    def _read_back(self, store: StoreClient) -> Iterator[PullSample]:
        for nbytes in self._sizes:
            key = f"moonpool-probe/{secrets.token_hex(8)}".encode()
            store.put(key, bytes(nbytes))
            into = bytearray(nbytes)
            try:
                began_s = self._clock.now_s()
                if store.get_into(key, into) == nbytes:
                    yield PullSample(nbytes, max(self._clock.now_s() - began_s, 1e-9))
            finally:
                with contextlib.suppress(MoonpoolError):
                    store.remove([key], force=True)

    async def keep_measuring(
        self, add: Callable[[list[PullSample]], None], last_pull_s: Callable[[], float | None]
    ) -> None:
        """Measure again whenever nothing has been pulled for a while. Runs until it is cancelled.

        `add` gets what was measured; `last_pull_s` tells when a request last pulled, or None.
        """
        measured_s: float | None = None
        while True:
            await asyncio.sleep(_UNKNOWN_EVERY_S)
            known_s = max((at_s for at_s in (last_pull_s(), measured_s) if at_s is not None), default=None)
            if known_s is not None and self._clock.now_s() - known_s < _QUIET_S:
                continue
            found = await asyncio.to_thread(self.measure)
            if found:
                add(found)
                measured_s = self._clock.now_s()
