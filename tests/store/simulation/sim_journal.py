"""The master's simulated journal: what it appended outlives a kill; a power loss cuts what was not synced yet.

The real one (master/journal/) has tests of its own for torn frames, full disks and half-written snapshots. This one
keeps its promises and no more than them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from moonpool.master.journal.journal import JournalHealth

from .sim_scheduler import Process, Scheduler


class JournalDisk:
    """What is on the master's disk. Entries before `base` are replaced by the snapshot."""

    def __init__(self) -> None:
        self.epoch = 0
        self.snapshot: list[bytes] = []
        self.base = 0
        self.entries: list[bytes] = []
        self.num_synced = 0
        self.synced_s = 0.0  # everything appended until then is durable

    def lose_power(self, rng: random.Random) -> None:
        del self.entries[rng.randint(self.num_synced, len(self.entries)) :]
        self.num_synced = len(self.entries)

    def replay(self) -> Iterator[bytes]:
        yield from self.snapshot
        yield from self.entries[self.base :]


class SimJournal:
    """Stands for Journal in master/service.py."""

    has_unwritten = False  # its disk takes everything

    def __init__(
        self, disk: JournalDisk, scheduler: Scheduler, process: Process, sync_s: float, snapshot_entries: int
    ) -> None:
        disk.epoch += 1
        self.epoch = disk.epoch
        self._disk, self._scheduler, self._process = disk, scheduler, process
        self._sync_s, self._snapshot_entries = sync_s, snapshot_entries
        self._num_appended, self.num_synced = 1, 0
        self._sync_planned = True
        scheduler.call_later(sync_s, process, self._sync)
        self._writing: SimSnapshot | None = None

    def append(self, records: bytes | Sequence[bytes]) -> None:
        several = [records] if isinstance(records, bytes) else records
        self._num_appended += 1
        self._disk.entries.extend(bytes(each) for each in several)
        if not self._sync_planned:
            self._sync_planned = True
            self._scheduler.call_later(self._sync_s, self._process, self._sync)

    def rise_to(self, epoch: int) -> None:
        """As Journal.rise_to."""
        self._disk.epoch = max(self._disk.epoch, epoch)

    def sync_soon(self) -> None:
        """Do nothing: the slower the disk, the more a power failure finds to lose."""

    def look_for_file(self) -> None:
        """Do nothing: its folder stays."""

    def _sync(self) -> None:
        self._sync_planned = False
        self._disk.num_synced = len(self._disk.entries)
        self._disk.synced_s = self._scheduler.now_s
        self.num_synced = self._num_appended

    @property
    def should_snapshot(self) -> bool:
        return self._writing is None and len(self._disk.entries) - self._disk.base > self._snapshot_entries

    def begin_snapshot(self) -> SimSnapshot:
        self._writing = SimSnapshot(len(self._disk.entries), self._scheduler, self._publish_soon)
        return self._writing

    def _publish_soon(self, chunks: list[bytes], base: int) -> None:
        delay_s = self._scheduler.rng.random() * 0.5
        self._scheduler.call_later(delay_s, self._process, self._publish, chunks, base)

    def _publish(self, chunks: list[bytes], base: int) -> None:
        self._sync()
        self._disk.snapshot, self._disk.base = chunks, base
        self._writing = None

    def health(self) -> JournalHealth:
        return JournalHealth(True, None, 0, 0, 0, 0, self._writing is not None)

    def close(self) -> None:
        """Idempotent."""


class SimSnapshot:
    """Stands for SnapshotWriter; takes a chunk now and then only."""

    def __init__(self, base: int, scheduler: Scheduler, publish: Callable[[list[bytes], int], None]) -> None:
        self._base, self._scheduler, self._publish = base, scheduler, publish
        self._chunks: list[bytes] = []

    @property
    def ready(self) -> bool:
        return self._scheduler.rng.random() < 0.7

    def add(self, chunk: bytes) -> None:
        self._chunks.append(bytes(chunk))

    def finish_soon(self) -> None:
        self._publish(self._chunks, self._base)
