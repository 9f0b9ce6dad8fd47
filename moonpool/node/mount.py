"""The life of a segment at the master: mounted, kept by heartbeats, mounted again when the master has forgotten it.

Whenever the master does not know the segment (the first mount, or a node that was silent for too long) the node mounts
it as a new incarnation; handles opened for an earlier incarnation are void from then on. A master that came back and
knows the segment from its journal asks for a recount instead, and no handle becomes void. No order is executed during a
mount or a recount.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import ClassVar

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import AlreadyExists, MoonpoolError, NoSpace, NotFound
from moonpool.base.log import RateLimitedLog
from moonpool.base.rpc import AsyncClient
from moonpool.store.messages import (
    MAX_GENERATION,
    SESSIONS_ALONE,
    FenceAhead,
    Heartbeat,
    HeartbeatReply,
    MountReply,
    MountSegment,
    Recount,
    Tier,
    UnmountSegment,
)
from moonpool.transfer.config import describe_segment
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.memory.fence import Fence
from moonpool.transfer.memory.segment import Segment

_LOG = logging.getLogger(__name__)
CALL_TIMEOUT_S = 5.0
_GOODBYE_TIMEOUT_S = 1.0
_REFUSED_PAUSE_S = 0.2
_MAX_SPANS = 256  # asked about at once; the rest at the next check

Pause = Callable[[], AbstractAsyncContextManager[None]]


class Mount(ABC):
    """Borrows the segment and the engine. `mounted` is set while the master knows the segment."""

    tier: ClassVar[Tier]
    keeps_contents: ClassVar[bool]  # its contents outlive a mount, and are reported to the master

    def __init__(self, node: str, segment: Segment, engine: TransferEngine, pause_orders: Pause) -> None:
        self.segment = segment
        self.mounted = asyncio.Event()
        self.refusal: AlreadyExists | None = None  # the master knows another node of this name
        self._node = node
        self._engine = engine
        self._pause_orders = pause_orders
        self._heartbeat_s = 1.0
        self._epoch = 0  # of the master that answered last
        self._reported = (0, 0)  # incarnation and epoch in which the contents were reported
        self._is_settled = False  # this incarnation may be used

    async def run(self, client: AsyncClient) -> None:
        """Send heartbeats until the connection is lost, also while a recount waits for running orders."""
        self.mounted.clear()
        recount: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            while not client.closed.is_set():
                # The master may know a mount that was cut short; but its earlier generations are not fenced off.
                reply = await self._checked_heartbeat(client) if self._is_settled else HeartbeatReply(known=False)
                if not reply.known:
                    self.mounted.clear()
                if reply.known or await self._mount(client):
                    self.mounted.set()
                unreported = self.keeps_contents and self.mounted.is_set() and not self.is_reported
                is_asked = reply.recount_above is not None or unreported
                if is_asked and (recount is None or recount.done()):
                    above = reply.recount_above or 0
                    recount = tasks.create_task(self._answer_recount(client, above, reply.refuse_up_to))
                await self._rest(client)

    async def leave(self, client: AsyncClient) -> None:
        """Unmount the segment, if the master still answers."""
        self._engine.unserve(self.segment.name)  # first: the master forgets what readers may remember
        call = UnmountSegment(segment=self.segment.name, incarnation=self.segment.incarnation)
        try:
            await client.call(call, timeout_s=_GOODBYE_TIMEOUT_S)
        except MoonpoolError as error:
            _LOG.info("%s: could not be unmounted at the master: %s", self.segment.name, error)

    async def _rest(self, client: AsyncClient) -> None:
        """Wait until the next heartbeat is due, or the connection is lost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._heartbeat_s if self.mounted.is_set() else _REFUSED_PAUSE_S):
                await client.closed.wait()

    @property
    def is_reported(self) -> bool:
        """Whether the node has reported the segment's contents since this master was started."""
        return self.mounted.is_set() and self._reported == (self.segment.incarnation, self._epoch)

    async def _answer_recount(self, client: AsyncClient, above: int, refuse_up_to: int) -> None:
        async with contextlib.nullcontext() if above == SESSIONS_ALONE else self._pause_orders():
            reported = (self.segment.incarnation, self._epoch)
            try:
                await self._recount(client, above, refuse_up_to)
            except NotFound as error:  # the master forgot the segment meanwhile; the next heartbeat shows that too
                _LOG.info("%s: %s", self.segment.name, error)
            else:
                self._reported = reported

    async def _mount(self, client: AsyncClient) -> bool:
        """Mount the segment as a new incarnation. Return False when the master refuses it, perhaps only for now."""
        self._is_settled = False
        async with self._pause_orders():
            self._engine.unserve(self.segment.name)
            if not await self._prepare():
                return False
            self.segment.incarnation = time.time_ns()
            descriptor = self._engine.serve(self.segment)
            try:
                reply = await client.call(self._mount_call(descriptor), timeout_s=CALL_TIMEOUT_S)
            except AlreadyExists as error:
                self._refused(error)
                return False
            self.refusal = None
            self._heartbeat_s, self._epoch = reply.heartbeat_s, reply.epoch
            await self._fence_off(reply)
            self._is_settled = True
            if not (await self._heartbeat(client)).known:
                return False
        _LOG.info("mounted %s", self._describe(descriptor))
        return True

    async def _checked_heartbeat(self, client: AsyncClient) -> HeartbeatReply:
        """Send a heartbeat, with the checks that are made once in a while."""
        return await self._heartbeat(client)

    async def _heartbeat(self, client: AsyncClient) -> HeartbeatReply:
        fence = self.segment.fence
        limit = MAX_GENERATION if fence is None else fence.limit
        beat = Heartbeat(segment=self.segment.name, incarnation=self.segment.incarnation, generation_limit=limit)
        reply = await client.call(beat, timeout_s=CALL_TIMEOUT_S)
        self._epoch = reply.epoch
        if fence is not None and reply.known:
            fence.limit = reply.generation_limit
        return reply

    def _refused(self, error: AlreadyExists) -> None:
        if self.refusal is None:
            _LOG.warning("%s: %s", self.segment.name, error)
        self.refusal = error

    def _describe(self, descriptor: SegmentDescriptor) -> str:
        return describe_segment(descriptor)

    async def _prepare(self) -> bool:
        """Prepare the segment for a mount. Return False when that is not possible now."""
        return True

    @abstractmethod
    def _mount_call(self, descriptor: SegmentDescriptor) -> MountSegment:
        """Return the call that mounts the segment."""

    @abstractmethod
    async def _fence_off(self, reply: MountReply) -> None:
        """Make writes of earlier generations impossible, before the master places anything in the segment."""

    @abstractmethod
    async def _recount(self, client: AsyncClient, above: int, refuse_up_to: int) -> None:
        """Report what the segment holds. The generations above `above`, up to `refuse_up_to`, are refused first."""


class DramMount(Mount):
    """Memory: empty after a mount, with all earlier generations fenced off.

    The fence refuses writes of generations that the master cannot have granted. Once in a while the node compares the
    fence with the highest granted generation: a stamp above that (a flipped bit, a faulty writer) would keep all
    writers out of its space for ever, so the node asks the master for the right stamp.

    A master that forgot the memory forgot its pins too. Processes may still map the old memory (a view, a copy that was
    stopped half way); they keep it unchanged, and the pool gets new memory.
    """

    tier = Tier.DRAM
    keeps_contents = False

    def __init__(
        self,
        node: str,
        segment: Segment,
        engine: TransferEngine,
        pause_orders: Pause,
        *,
        registry_address: str,
        sessions: Callable[[], list[int]],
        fence_check_s: float,
    ) -> None:
        super().__init__(node, segment, engine, pause_orders)
        self._registry_address = registry_address
        self._sessions = sessions
        self._fence_check_s = fence_check_s
        self._next_check_s = 0.0
        self._last_generation = 0  # granted, according to the last reply
        self.num_restamped = 0  # granules whose generation was never granted
        self._may_be_held = False  # mapped by processes of this machine
        self._rare_log = RateLimitedLog(_LOG)

    async def _prepare(self) -> bool:
        if self.segment.fence is not None and not (self._may_be_held and self._sessions()):
            return True
        try:
            await asyncio.to_thread(self.segment.renew)
        except NoSpace as error:  # until those processes unmap the old memory
            self._rare_log.warning("%s cannot be mounted again: %s", self.segment.name, error)
            return False
        self._may_be_held = False
        return True

    def _mount_call(self, descriptor: SegmentDescriptor) -> MountSegment:
        return MountSegment(
            node=self._node, descriptor=descriptor, tier=self.tier, registry_address=self._registry_address
        )

    async def _fence_off(self, reply: MountReply) -> None:
        self._may_be_held = True
        fence = self.segment.fence
        assert fence is not None, "the pool's memory is fenced"
        await asyncio.to_thread(fence.stamp, 0, self.segment.nbytes, reply.generation_floor)
        fence.limit = reply.generation_limit
        self._last_generation = reply.generation_floor

    async def _checked_heartbeat(self, client: AsyncClient) -> HeartbeatReply:
        """Send a heartbeat; restamp granules whose generation was never granted. A stamp that was set before the
        heartbeat was granted before its reply, so a stamp above the reply's `last_generation` was never granted.
        """
        fence, suspects = self.segment.fence, list[tuple[int, int, int]]()
        if fence is not None and time.monotonic() >= self._next_check_s:
            suspects = await asyncio.to_thread(fence.stamps_above, self._last_generation)
            self._next_check_s = time.monotonic() + self._fence_check_s
        reply = await self._heartbeat(client)
        ahead = [span for span in suspects if span[2] > reply.last_generation]
        if ahead and fence is not None and reply.known:
            await self._restamp(client, fence, ahead)
        self._last_generation = reply.last_generation
        return reply

    async def _restamp(self, client: AsyncClient, fence: Fence, ahead: list[tuple[int, int, int]]) -> None:
        name, incarnation = self.segment.name, self.segment.incarnation
        call = FenceAhead(segment=name, incarnation=incarnation, spans=ahead[:_MAX_SPANS])
        restamped = await client.call(call, timeout_s=CALL_TIMEOUT_S)
        for span in restamped:
            fence.restamp(*span)
            self.num_restamped += -(-span[1] // fence.granule_nbytes)
        _LOG.warning(
            "%s: %d spans carried generations that were never granted; %d are free for writers again",
            name,
            len(ahead),
            len(restamped),
        )

    async def _recount(self, client: AsyncClient, above: int, refuse_up_to: int) -> None:
        fence = self.segment.fence
        assert fence is not None, "the pool's memory is fenced"
        fence.refuse(above, refuse_up_to)  # first: later stamps of these generations would not be reported
        spans = await asyncio.to_thread(fence.spans_above, above)
        call = Recount(
            segment=self.segment.name,
            incarnation=self.segment.incarnation,
            spans=spans,
            sessions=self._sessions(),
        )
        await client.call(call, timeout_s=CALL_TIMEOUT_S)
        if above != SESSIONS_ALONE:
            _LOG.info("%s: the master is back; %d spans are newer than it knew", self.segment.name, len(spans))
