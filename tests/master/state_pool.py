"""A PoolState with nodes, a journal and a clock around it, for tests: every call is checked, every record kept."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import MoonpoolError
from moonpool.master.rules import PoolRules
from moonpool.master.state import PoolState
from moonpool.master.state.objects import FIRST_SESSION
from moonpool.master.state.recovery import restore
from moonpool.master.state.snapshot import snapshot_records
from moonpool.store import messages as m
from moonpool.store.messages import GRANULE_NBYTES

G = GRANULE_NBYTES
SESSION = 2**32 + 7
RULES: dict[str, Any] = {"segment_ttl_s": 1e6, "max_objects": 4096, "eviction": "lru"}


def descriptor(name: str, granules: int, incarnation: int = 1) -> SegmentDescriptor:
    return SegmentDescriptor(
        name=name, nbytes=granules * G, incarnation=incarnation, host="h", endpoints=(), granule_nbytes=G
    )


def num_calls(act: Callable[[], object]) -> int:
    """How many functions `act` calls: its cost, the same on every machine."""
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return count


class Grant(NamedTuple):
    key: bytes
    generation: int
    replicas: tuple[m.Placement, ...]


class Pool:
    """`now_s` is moved by tests. Nodes do nothing by themselves; `carry_out` answers their orders well.

    Every session registry knows the processes that were heard of (`sessions`), until they are gone.
    """

    def __init__(self, *nodes: str, granules: int = 10, ssd_granules: int = 0, **rules: Any) -> None:
        self.rules = PoolRules(**{**RULES, **rules})
        self.now_s = 0.0
        self.epoch = 1
        self.journal: list[bytes] = []
        self.state = PoolState(self.rules, self.epoch, journalled=True)
        restore(self.state, iter(()), self.now_s)
        self.incarnations: dict[str, int] = {}
        self.sessions: set[int] = set()
        self._ssd_offsets = itertools.count(0, G)
        for node in nodes:
            self.mount(node, granules)
            if ssd_granules:
                self.mount_ssd(node, ssd_granules)

    def check(self) -> None:
        self.state.check_integrity()
        self.journal += self.state.take_records()

    # nodes

    def mount(self, node: str, granules: int = 10) -> m.MountReply:
        name = f"{node}.dram"
        incarnation = self.incarnations[name] = self.incarnations.get(name, 0) + 1
        reply = self.state.mount(
            node, descriptor(name, granules, incarnation), self.now_s, registry_address=f"unix:/{node}"
        )
        if self.state.heartbeat(name, incarnation, self.now_s).recount_above is not None:
            self.recount(name)
        self.check()
        return reply

    def mount_ssd(self, node: str, granules: int = 100, items: Sequence[m.HeldItem] = (), last: bool = True) -> None:
        name = f"{node}.ssd"
        incarnation = self.incarnations[name] = self.incarnations.get(name, 0) + 1
        where = descriptor(name, 2**20, incarnation)
        self.state.mount(node, where, self.now_s, tier=m.Tier.SSD, capacity_nbytes=granules * G)
        self.inventory(node, items, last)

    def inventory(self, node: str, items: Sequence[m.HeldItem], last: bool = True) -> list[bool]:
        name = f"{node}.ssd"
        wanted = self.state.members.inventory(name, self.incarnations[name], items, last, self.now_s)
        self.check()
        return wanted

    def beat(self, *nodes: str) -> dict[str, m.HeartbeatReply]:
        """Of every segment of these nodes; all when none is named."""
        names = [name for name in self.incarnations if not nodes or name.split(".")[0] in nodes]
        replies = {name: self.state.heartbeat(name, self.incarnations[name], self.now_s) for name in names}
        self.check()
        return replies

    def unmount(self, name: str) -> None:
        self.state.unmount(name, self.incarnations[name], self.now_s)
        self.check()

    def orders(self, node: str) -> list[m.Order]:
        return self.state.orders.open_orders(node)

    def answer(self, order: m.Order, error: MoonpoolError | None = None, offset: int | None = None) -> int | None:
        """The offset, for an OFFLOAD that went well."""
        if error is None and order.kind is m.OrderKind.OFFLOAD and offset is None:
            offset = next(self._ssd_offsets)
        refusal = None if error is None else m.Refusal(error.code, str(error))
        self.state.orders_done([m.OrderResult(order.order_id, refusal, offset)], self.now_s)
        self.check()
        return offset

    def carry_out(self, *nodes: str) -> list[m.Order]:
        """All that these nodes are asked to do, and whatever follows from it."""
        done = []
        while orders := [order for node in nodes for order in self.orders(node)]:
            for order in orders:
                self.answer(order)
            done += orders
        return done

    # clients

    def try_start(self, key: bytes, granules: int = 1, *, session: int = 0, **columns: Any) -> Grant | m.Refusal:
        self.sessions |= {session} if session else set()
        lists: dict[str, Any] = {name: [columns.pop(name)] for name in ("parents", "groups") if name in columns}
        options = m.PutOptions(**columns)
        reply = self.state.put_start([key], [granules * G], options, self.now_s, session=session, **lists)
        self.check()
        return reply.refusals[0] if reply.refusals else Grant(key, reply.generations[0], reply.replicas[0])

    def start(self, key: bytes, granules: int = 1, **options: Any) -> Grant:
        grant = self.try_start(key, granules, **options)
        assert isinstance(grant, Grant), grant
        return grant

    def refused(self, key: bytes, granules: int = 1, **options: Any) -> str:
        refusal = self.try_start(key, granules, **options)
        assert isinstance(refusal, m.Refusal)
        return refusal.code

    def end(self, grant: Grant, *failed: str) -> m.Refusal | None:
        refusals = self.state.put_end([grant.key], [grant.generation], {0: failed} if failed else {}, self.now_s)
        self.check()
        return refusals.get(0)

    def put(self, key: bytes, granules: int = 1, **options: Any) -> Grant:
        grant = self.start(key, granules, **options)
        assert self.end(grant) is None
        return grant

    def fill(self, keys: Sequence[bytes], **options: Any) -> None:
        """As put() of one granule each, but checked once: for many."""
        for key in keys:
            reply = self.state.put_start([key], [G], m.PutOptions(**options), self.now_s)
            assert not self.state.put_end([key], reply.generations, {}, self.now_s)
        self.check()

    def revoke(self, grant: Grant, settled: bool) -> None:
        self.state.put_revoke([grant.key], [grant.generation], settled, self.now_s)
        self.check()

    def find(self, key: bytes, *, lease: bool = False, session: int = 0) -> m.ObjectInfo | None:
        """Without a lease unless asked for."""
        self.sessions |= {session} if session else set()
        found = self.state.lookup([key], self.now_s, lease=lease, session=session)[0]
        self.check()
        return found

    def places(self, key: bytes) -> list[str]:
        """Names of the segments that have it; [] for no object."""
        found = self.find(key)
        return [] if found is None else [each.segment for each in found.replicas]

    def has(self, *keys: bytes) -> bool:
        """All of them; without a lease."""
        return all(self.find(key) is not None for key in keys)

    def exist(self, *keys: bytes) -> list[bool]:
        """With a lease."""
        found = self.state.exist(keys, self.now_s)
        self.check()
        return found

    def use(self, *keys: bytes) -> list[bool]:
        """As a client that reads them."""
        found = self.state.lookup(keys, self.now_s)
        self.check()
        return [info is not None for info in found]

    def remove(self, key: bytes, force: bool = False) -> bool:
        gone = self.state.remove([key], force, self.now_s)[0]
        self.check()
        return gone

    def pin(self, holder: int, key: bytes) -> bool:
        self.sessions |= {holder} if holder >= FIRST_SESSION else set()
        pinned = self.state.pin(holder, [key], self.now_s)[0]
        self.check()
        return pinned

    def unpin(self, holder: int, key: bytes) -> None:
        self.state.unpin(holder, [key], self.now_s)
        self.check()

    def sessions_gone(self, *sessions: int) -> None:
        self.sessions.difference_update(sessions)
        self.state.sessions_gone(sessions, self.now_s)
        self.check()

    def corrupt(self, key: bytes, segment: str) -> bool:
        """What a reader reports that found wrong bytes in that replica."""
        found = self.find(key)
        assert found is not None
        at = next((each for each in found.replicas if each.segment == segment), m.Placement(segment, 0, 0, 0))
        return self.report_corrupt(key, at)

    def report_corrupt(self, key: bytes, at: m.Placement) -> bool:
        told = self.state.report_corrupt(key, at.generation, at.segment, at.offset, self.now_s)
        self.check()
        return told

    def why(self, key: bytes, identity: bytes = b"") -> str:
        return self.state.why(key, self.now_s, identity)

    # time

    def tick(self, seconds: float = 0.0) -> None:
        """Lets time pass, and everything be done that it brings."""
        self.now_s += seconds
        while self.state.tick(self.now_s):
            self.check()
        self.check()

    def wait(self, seconds: float) -> None:
        """As tick, with nodes that beat."""
        self.now_s += seconds
        self.beat()
        self.tick()

    # the end of a master

    def crash(self, journal: Sequence[bytes] | None = None) -> None:
        """The master is gone; another one begins with what is in the journal."""
        self.check()
        self.epoch += 1
        self.state = PoolState(self.rules, self.epoch, journalled=True)
        restore(self.state, iter(self.journal if journal is None else journal), self.now_s)
        self.check()

    def restart(self) -> None:
        """As crash, with nodes that answer for the meantime at once."""
        self.crash()
        self.answer_recounts()

    def answer_recounts(self, *nodes: str) -> None:
        """Of all nodes when none is named."""
        for name, reply in self.beat(*nodes).items():
            if reply.recount_above is not None and name.endswith(".dram"):
                self.recount(name)

    def recount(self, name: str, spans: Sequence[tuple[int, int]] = (), sessions: Iterable[int] | None = None) -> None:
        known = self.sessions if sessions is None else sessions
        self.state.members.recount(name, self.incarnations[name], spans, sorted(known), self.now_s)
        self.check()

    def snapshot(self) -> None:
        """In place of the journal so far."""
        self.check()
        self.journal = [entry for part in snapshot_records(self.state, self.now_s) for entry in part]

    @property
    def used(self) -> int:
        """Granules in DRAM."""
        return self.state.stats().used_nbytes // G

    @property
    def counters(self) -> dict[str, int]:
        return self.state.stats().counters


def held(order: m.Order, offset: int = 0) -> m.HeldItem:
    """The record that an OFFLOAD made."""
    return m.HeldItem(order.key, order.source.generation, order.nbytes, offset)


def offload(pool: Pool, node: str = "a") -> dict[bytes, m.HeldItem]:
    """Carries out everything; what the node's log then holds of it."""
    items = {}
    while orders := pool.orders(node):
        for order in orders:
            offset = pool.answer(order)
            if order.kind is m.OrderKind.OFFLOAD:
                assert offset is not None
                items[order.key] = held(order, offset)
    return items


def on_ssd_alone(pool: Pool, *keys: bytes, **options: Any) -> dict[bytes, m.HeldItem]:
    """Objects whose replicas in memory were evicted."""
    for key in keys:
        pool.put(key, **options)
    items = offload(pool)
    everything = pool.state.stats().capacity_nbytes // G
    pool.put(b"filler", everything)
    pool.remove(b"filler")
    assert all(pool.places(key) == ["a.ssd"] for key in keys)
    offload(pool)
    return items
