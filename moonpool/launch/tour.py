"""What a launcher does for the tour of the live page: kill one of its workers, fill the pool.

Only `moonpool serve --tour` serves these calls, on the launcher's socket, which only its user can open. The front end
checks who may ask for them (frontend/tour.py).
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from moonpool.base.errors import InvalidInput, Unavailable
from moonpool.base.rpc import RpcPeer
from moonpool.frontend.tour_messages import FillPool, FillReply, KillWorker
from moonpool.launch.launcher import Launcher
from moonpool.launch.supervisor import State

if TYPE_CHECKING:
    from moonpool.store import Store

_WORKER = "worker"  # command of roles
_PREFIX = b"moonpool-tour/"
_NUM_PARTS = 256  # objects that would fill the whole pool
_LEAST_NBYTES, _MOST_NBYTES = 4 * 1024, 16 * 1024 * 1024  # of an object
_BATCH = 16
_FILL_S = 20.0  # a pool that is not full by then is too large to be filled for show


class TourControl:
    """Carries out the calls. `master_address` is the pool's."""

    def __init__(self, launcher: Launcher, master_address: str, secret_file: str | None = None) -> None:
        self._launcher = launcher
        self._master_address = master_address
        self._secret_file = secret_file
        self._filling = asyncio.Lock()

    def kill(self, call: KillWorker, peer: RpcPeer) -> None:
        own = self._launcher.known(_WORKER)
        if call.worker not in own:
            names = ", ".join(own) or "none"
            raise InvalidInput(f"{call.worker!r} is no worker of this service; its workers: {names}", param="worker")
        if self._launcher.state_of(call.worker) is not State.READY:
            raise Unavailable(f"{call.worker} is not up; try again when it is")
        self._launcher.kill(call.worker)

    async def fill(self, call: FillPool, peer: RpcPeer) -> FillReply:
        if self._filling.locked():
            raise Unavailable("the pool is being filled already")
        async with self._filling:
            return await asyncio.to_thread(self._fill)

    def _fill(self) -> FillReply:
        from moonpool.store import Store  # here: a launcher without a tour does not need it

        with Store(self._master_address, name="tour", secret_file=self._secret_file) as store:
            return fill_pool(store)


def fill_pool(store: Store) -> FillReply:
    """Write objects until at least a batch of objects was evicted, for _FILL_S at most; remove them. Raise Unavailable
    if the pool takes none."""
    from moonpool.store.client.put_request import Put

    before = now = store.stats()
    most, written, refusal = before.used_nbytes, 0, None
    value = bytes(min(max(before.capacity_nbytes // _NUM_PARTS, _LEAST_NBYTES), _MOST_NBYTES))
    deadline_s = time.monotonic() + _FILL_S
    try:
        while _evicted(now.counters) - _evicted(before.counters) < _BATCH and time.monotonic() < deadline_s:
            keys = [_PREFIX + b"%08d" % (written + at) for at in range(_BATCH)]
            refusals = store.put_objects([Put(key=key, buffers=[value]) for key in keys])
            stored = refusals.count(None)
            if not stored:
                refusal = refusals[0]
                break
            written += stored
            now = store.stats()
            most = max(most, now.used_nbytes)
    finally:
        store.remove_matching(None, prefix=_PREFIX, force=True)
    if not written:
        raise Unavailable(f"the pool took no object: {refusal}")
    return FillReply(
        num_written=written,
        written_nbytes=written * len(value),
        num_evicted=_evicted(now.counters) - _evicted(before.counters),
        used_before_nbytes=before.used_nbytes,
        used_most_nbytes=most,
        capacity_nbytes=now.capacity_nbytes,
        high_watermark=now.high_watermark,
    )


def _evicted(counters: dict[str, int]) -> int:
    return counters.get("evicted", 0)
