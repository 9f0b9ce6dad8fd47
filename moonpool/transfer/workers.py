"""The engine's threads: each takes a run of slices, moves it, and takes the next."""

from __future__ import annotations

import threading

from moonpool.transfer.batch import Batch
from moonpool.transfer.paths.slice_queue import SliceQueue


class Workers:
    """Owns the threads and the queue they take from."""

    def __init__(self, queue: SliceQueue[Batch], num_threads: int) -> None:
        self.queue = queue
        self._threads = [
            threading.Thread(target=self._work, name=f"transfer-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Idempotent. What has not begun fails with PeerLost; what is under way ends by itself."""
        for batch, parts in self.queue.close():
            batch.abandon(parts)

    def join(self, timeout_s: float) -> None:
        for thread in self._threads:
            thread.join(timeout_s)

    def _work(self) -> None:
        while self._work_once():
            pass

    def _work_once(self) -> bool:
        """A function of its own, so that an idle thread keeps no caller's buffers alive."""
        run = self.queue.take()
        if run is None:
            return False
        run.work.run(run.slices)
        return True
