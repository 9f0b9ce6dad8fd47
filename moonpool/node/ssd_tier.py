"""A node's disk in the pool: the log, served to readers as one folder segment, mounted beside the memory.

After a mount the master hears what the log holds and says which records it does not want. Compaction runs beside the
orders: what it moved is told to the master, and a file that was emptied so stays for a while, for readers who still
know the old places.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from moonpool.base.clock import AttendedClock
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import MoonpoolError
from moonpool.base.limits import require_disk
from moonpool.base.log import RateLimitedLog
from moonpool.base.rpc import AsyncClient
from moonpool.base.units import format_nbytes
from moonpool.node.config import NodeConfig
from moonpool.node.mount import CALL_TIMEOUT_S, Mount, Pause
from moonpool.node.ssd import LogLocation, MovedRecord, SsdConfig, SsdLog, SsdStats, StoredRecord
from moonpool.store.messages import (
    Doubt,
    HeldItem,
    Inventory,
    MountReply,
    MountSegment,
    Relocated,
    ReportCorrupt,
    Tier,
)
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.transports.file.folder import FolderSegment, address_of_byte

_LOG = logging.getLogger(__name__)
_ITEMS_PER_CALL = 2000
_COMPACT_EVERY_S = 1.0
_COMPACT_NBYTES = 64 * 1024 * 1024  # moved in one step, while offloads wait
_LOW_FREE_PART = 0.05  # of the log's bytes: with less it is compacted
_HIGH_DEAD_PART = 0.25

Hold = Callable[[], AbstractAsyncContextManager[None]]


def offset_of(location: LogLocation) -> int:
    """Return the offset of a location as placements have it."""
    return address_of_byte(location.file_number, location.offset)


class NodeSsd:
    """The open log and its segment; owns both. The constructor recovers the log, which may take long."""

    def __init__(self, config: NodeConfig) -> None:
        """ConfigError when another process uses the folder, or the disk is smaller than the log is to be; NoSpace or
        Unavailable when the disk fails."""
        assert config.ssd_dir is not None, "there is an SSD"
        require_disk(Path(config.ssd_dir).absolute(), config.ssd_nbytes)
        self.max_nbytes = config.ssd_nbytes
        self.capacity_nbytes = _capacity_nbytes(config.ssd_log())
        self.log = SsdLog.open(config.ssd_dir, config.ssd_log())
        try:
            self.segment = FolderSegment.open(f"{config.name}.ssd", config.ssd_dir, incarnation=0)
        except BaseException:
            self.log.close()
            raise
        self.lock = asyncio.Lock()  # held while records are listed, and while they are moved

    def needs_compaction(self) -> bool:
        return is_compaction_due(self.log.stats(), self.max_nbytes)

    def close(self) -> None:
        """Idempotent."""
        self.segment.close()
        self.log.close()


def _capacity_nbytes(log: SsdConfig) -> int:
    """Return how much the pool may keep in the log: so much less than fits that the files of a full log are, on
    average, dead enough to be compacted.
    """
    return int((log.max_nbytes - log.reserved_nbytes - log.file_nbytes) * (1 - log.compact_dead_fraction))


def is_compaction_due(stats: SsdStats, max_nbytes: int) -> bool:
    """Return whether moving records is worth its cost now."""
    short = stats.free_nbytes < _LOW_FREE_PART * max_nbytes and stats.dead_nbytes > 0
    return short or stats.dead_nbytes > _HIGH_DEAD_PART * max_nbytes


class SsdMount(Mount):
    tier = Tier.SSD
    keeps_contents = True

    def __init__(self, node: str, ssd: NodeSsd, engine: TransferEngine, pause_orders: Pause) -> None:
        super().__init__(node, ssd.segment, engine, pause_orders)
        self._ssd = ssd

    def _mount_call(self, descriptor: SegmentDescriptor) -> MountSegment:
        return MountSegment(
            node=self._node, descriptor=descriptor, tier=self.tier, capacity_nbytes=self._ssd.capacity_nbytes
        )

    def _describe(self, descriptor: SegmentDescriptor) -> str:
        return f"{descriptor.name}, {format_nbytes(self._ssd.capacity_nbytes)} at {descriptor.location}"

    async def _fence_off(self, reply: MountReply) -> None:
        """Do nothing: only this process writes to the log."""

    async def _recount(self, client: AsyncClient, above: int, refuse_up_to: int) -> None:
        """Report every record, in parts. Remove those that the master does not want."""
        async with self._ssd.lock:
            items = await asyncio.to_thread(lambda: [*self._ssd.log.items(), *self._ssd.log.salvaged()])
            parts = [items[at : at + _ITEMS_PER_CALL] for at in range(0, len(items), _ITEMS_PER_CALL)] or [[]]
            num_dropped = 0
            for number, part in enumerate(parts, 1):
                num_dropped += await self._send_part(client, part, number == len(parts))
        _LOG.info("%s: %d records, %d of them not wanted any more", self.segment.name, len(items), num_dropped)

    async def _send_part(self, client: AsyncClient, part: list[StoredRecord], last: bool) -> int:
        held = [
            HeldItem(each.key, each.generation, each.location.nbytes, offset_of(each.location), each.doubt)
            for each in part
        ]
        damaged_nbytes = self._ssd.log.stats().damaged_nbytes if last else 0
        call = Inventory(
            segment=self.segment.name,
            incarnation=self.segment.incarnation,
            items=held,
            last=last,
            damaged_nbytes=damaged_nbytes,
        )
        wanted = await client.call(call, timeout_s=CALL_TIMEOUT_S)
        salvaged: dict[bool, list[tuple[bytes, int]]] = {True: [], False: []}
        unwanted: list[tuple[bytes, int]] = []
        for each, keep in zip(part, wanted, strict=True):
            if each.doubt is Doubt.SALVAGED:
                salvaged[keep].append((each.key, each.generation))
            elif not keep:
                unwanted.append((each.key, each.generation))
        self._ssd.log.confirm(salvaged[True])
        self._ssd.log.refuse(salvaged[False])
        if unwanted:
            await asyncio.to_thread(self._ssd.log.remove, unwanted)
        return len(unwanted) + len(salvaged[False])


class LogMaintenance:
    """Compacts the log in steps. During a step no order touches the log, and the master has all earlier results: the
    master learns of a record before it learns that the record was moved. After a mount, moves are reported only when
    the master knows the contents; before that it would not want any of the records.
    """

    def __init__(self, ssd: NodeSsd, mount: SsdMount, hold_log: Hold, rest_s: float) -> None:
        self._ssd = ssd
        self._mount = mount
        self._hold_log = hold_log
        self._rest_s = rest_s
        self._unreported: list[MovedRecord] = []  # moves that the master does not know of yet
        self._release_at_s: dict[int, float] = {}  # by number of a drained file
        # A reader keeps its full lease even when this process stood still.
        self._clock = AttendedClock(2 * _COMPACT_EVERY_S)
        self._rare_log = RateLimitedLog(_LOG)

    async def run(self, client: AsyncClient) -> None:
        """Run until the connection is lost."""
        while True:
            await self._mount.mounted.wait()
            try:
                moved = await self._compact_step(client)
                await self._release_drained()
            except MoonpoolError as error:
                if client.closed.is_set():
                    raise
                self._rare_log.warning("%s: the log is not compacted: %s", self._ssd.segment.name, error)
                moved = False
            await asyncio.sleep(0 if moved else self._pause_s())

    def _pause_s(self) -> float:
        """Return the seconds until the next step, or until a drained file may be released if that is sooner."""
        rested_in_s = min(self._release_at_s.values(), default=math.inf) - self._clock.now_s()
        return min(_COMPACT_EVERY_S, max(0.0, rested_in_s))

    async def _compact_step(self, client: AsyncClient) -> bool:
        """Do one step; orders for the log wait meanwhile. Return False when there was nothing to move."""
        is_due = await asyncio.to_thread(self._ssd.needs_compaction)
        if not self._mount.is_reported or (not is_due and not self._unreported):
            return False
        async with self._hold_log(), self._ssd.lock:
            if not self._unreported:
                await asyncio.to_thread(self._compact)
            moved = bool(self._unreported)
            await self._report_moves(client)
        return moved

    def _compact(self) -> None:
        """Runs on a thread, which continues after a cancellation: what it moved must be kept then."""
        self._unreported += self._ssd.log.compact(_COMPACT_NBYTES)

    async def _release_drained(self) -> None:
        now_s = self._clock.now_s()
        for number in await asyncio.to_thread(self._ssd.log.drained):
            if now_s >= self._release_at_s.setdefault(number, now_s + self._rest_s):
                await asyncio.to_thread(self._ssd.log.release, number)
                del self._release_at_s[number]

    async def _report_moves(self, client: AsyncClient) -> None:
        """Report moves and damaged records. Remove records that the master does not want."""
        name, incarnation = self._ssd.segment.name, self._ssd.segment.incarnation
        while self._unreported and self._mount.is_reported:  # otherwise it was mounted again meanwhile
            some = self._unreported[:_ITEMS_PER_CALL]
            moves = [
                (each.key, each.generation, offset_of(each.new))
                for each in some
                if each.new is not None and self._is_there(each)
            ]
            wanted = await client.call(
                Relocated(segment=name, incarnation=incarnation, items=moves), timeout_s=CALL_TIMEOUT_S
            )
            unwanted = [(key, generation) for (key, generation, _), keep in zip(moves, wanted, strict=True) if not keep]
            for each in some:
                if each.new is None:
                    damaged = ReportCorrupt(each.key, each.generation, name, offset_of(each.old))
                    await client.call(damaged, timeout_s=CALL_TIMEOUT_S)
            del self._unreported[: len(some)]
            if unwanted:
                await asyncio.to_thread(self._ssd.log.remove, unwanted)

    def _is_there(self, moved: MovedRecord) -> bool:
        """Return whether the record is still where it was moved. While a master was away, it may have been removed, or
        even written again under the same generation.
        """
        return self._ssd.log.find(moved.key, moved.generation) == moved.new
