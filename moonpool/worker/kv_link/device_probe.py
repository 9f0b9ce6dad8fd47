"""How fast the pool is for a GPU, measured before a request needs it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator

from moonpool.base.clock import Clock
from moonpool.base.cluster import PullSample
from moonpool.base.errors import MoonpoolError
from moonpool.base.keys import object_key
from moonpool.engine.sequence import AdmittedSequence, FullBlock
from moonpool.store import Store
from moonpool.worker.kv_link.device_pieces import DevicePieces
from moonpool.worker.kv_link.pool import PoolProbe, PoolWriter
from moonpool.worker.kv_link.pull import Puller

_NUM_BLOCKS = (1, 1, 32, 128)  # of each pull; the first one is not counted
_TIMEOUT_S = 5.0


class DeviceProbe(PoolProbe):
    """A PoolProbe for a worker whose pages are on a GPU: a page of its own goes to the pool, and comes back as it would
    for a request, once and then many times in one pull. `scratch` is that page.
    """

    def __init__(self, connect: Callable[[], Store], scratch: DevicePieces, clock: Clock) -> None:
        super().__init__(connect, scratch.layout.page_nbytes, clock)
        self._scratch = scratch

    def _read_back(self, store: Store) -> Iterator[PullSample]:
        key, identity = secrets.token_bytes(32), secrets.token_bytes(32)
        PoolWriter(store, self._scratch, identity).put_pages({0: FullBlock("probe", 0, 0, key)})
        puller = Puller(store, self._scratch, identity, num_threads=1)
        try:
            for at, number in enumerate(_NUM_BLOCKS):
                wanted = AdmittedSequence("probe", 0, tuple(range(number)), (0,) * number, (key,) * number)
                result = puller.start(wanted, lambda: None, compute_s=0.0).wait_end(_TIMEOUT_S)
                if result.num_good < number:
                    return
                if at > 0:
                    yield PullSample(result.nbytes, max(result.seconds, 1e-9))
        finally:
            puller.close()
            with contextlib.suppress(MoonpoolError):
                store.remove(object_key(key), force=True)
