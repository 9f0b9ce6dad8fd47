"""The simulated pool: the master's own PoolState, whose orders simulated nodes carry out over simulated links.

All decisions (store, find, evict, offload, promote, replicate) are PoolState's. The time of its messages is not counted
(a thousandth of the time to move a block); the time of the data is.

Blocks that always come together are one object of the simulated pool: a run. A block and its successor are in the same
run if every prompt that has one of them has both. So a prompt uses a run whole (except for its last block, of which one
token is always computed), and a search by runs finds what a search by blocks would. One thing differs: a run is evicted
whole, while a real pool may keep the first of its blocks. `max_blocks` limits this; with 1 nothing differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.keys import object_key
from moonpool.base.object_header import ALIGN_NBYTES
from moonpool.master.rules import PoolRules
from moonpool.master.state import PoolState
from moonpool.master.state.changes import Changes
from moonpool.sim.physics.hardware import NodeSpec
from moonpool.sim.world.clock import SimClock
from moonpool.sim.world.sequence import block_key, block_number
from moonpool.store.messages import Order, OrderKind, OrderResult, PutOptions, Tier
from moonpool.traces.columns import Ints, Trace


class BlockRuns:
    """The runs of a trace's full blocks; partial blocks are never stored."""

    def __init__(self, trace: Trace, max_blocks: int) -> None:
        ids, is_first = _full_blocks(trace)
        size = int(ids.max()) + 1 if len(ids) else 0
        counts = np.bincount(ids, minlength=size)
        begins = is_first.copy()
        begins[1:] |= counts[ids[1:]] != counts[ids[:-1]]
        positions = np.arange(len(ids))
        begins |= (positions - np.maximum.accumulate(np.where(begins, positions, 0))) % max_blocks == 0
        starts = np.maximum.accumulate(np.where(begins, positions, 0))
        heads = np.zeros(size, dtype=np.int64)
        heads[ids] = ids[starts]
        lengths = np.zeros(size, dtype=np.int64)
        np.maximum.at(lengths, ids[starts], positions - starts + 1)
        places = np.zeros(size, dtype=np.int64)
        places[ids[begins]] = positions[begins]
        self._ids, self._places = ids, places
        self._heads: list[int] = heads.tolist()
        self._lengths: list[int] = lengths.tolist()

    def split(self, numbers: list[int]) -> list[tuple[int, int, int]]:
        """Return (first block, begin, end) of each run of a prompt's leading blocks; begin and end count blocks."""
        found, begin, end = [], 0, len(numbers)
        heads, lengths = self._heads, self._lengths
        while begin < end:
            head = heads[numbers[begin]]
            stop = min(begin + lengths[head], end)
            found.append((head, begin, stop))
            begin = stop
        return found

    def heads(self, numbers: Sequence[int]) -> list[int]:
        """Return the first blocks of the runs that these blocks are in."""
        return list(dict.fromkeys([self._heads[number] for number in numbers]))

    def blocks(self, name: bytes) -> list[int]:
        """Return the blocks of a run, given the pool's key of its first block."""
        head = block_number(name)
        place = self._places.item(head)
        numbers: list[int] = self._ids[place : place + self._lengths[head]].tolist()
        return numbers

    def blocks_of_all(self, names: Sequence[bytes]) -> list[int]:
        return self.blocks(names[0]) if len(names) == 1 else [number for name in names for number in self.blocks(name)]


def _full_blocks(trace: Trace) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the full blocks of all prompts in a row, and which of them are the first of a prompt."""
    num_full = trace.num_input // trace.block_tokens
    offsets = trace.block_offsets
    ends = offsets[:-1] + num_full
    keep = np.zeros(len(trace.block_ids) + 1, dtype=np.int64)
    np.add.at(keep, offsets[:-1], 1)
    np.add.at(keep, ends, -1)
    mask = np.cumsum(keep[:-1]) > 0
    is_first = np.zeros(len(trace.block_ids), dtype=np.bool_)
    is_first[offsets[:-1][num_full > 0]] = True
    return trace.block_ids[mask], is_first[mask]


_NEVER_S = 1e12
_GRANULE_NBYTES = 4096
_TICK_S = 0.5
Run = tuple[int, int, int]  # first block, begin and end in the prompt
Sources = dict[tuple[str, bool], int]  # numbers of blocks by node, and whether they are on its SSD


def only_source(sources: Sources) -> str:
    """Return the node that all blocks come from, of one tier; "" if there are several."""
    return next(iter(sources))[0] if len(sources) == 1 else ""


class PoolHit(NamedTuple):
    """The leading blocks of a prompt that are stored; per run its end, its node, and whether it is on SSD only."""

    ends: list[int]
    nodes: list[str]
    on_ssd: list[bool]

    @property
    def num_blocks(self) -> int:
        return self.ends[-1] if self.ends else 0

    def first_of(self, source: str, begin: int) -> int:
        """Return the first block from `begin` on that would come from `source`."""
        start = 0
        for stop, node in zip(self.ends, self.nodes, strict=True):
            if node == source and stop > begin:
                return max(start, begin)
            start = stop
        return begin

    def sources(self, begin: int, end: int) -> Sources:
        """Return how many of the blocks begin..end each node has."""
        counts: Sources = {}
        start = 0
        for stop, node, on_ssd in zip(self.ends, self.nodes, self.on_ssd, strict=True):
            count = min(stop, end) - max(start, begin)
            if count > 0:
                counts[node, on_ssd] = counts.get((node, on_ssd), 0) + count
            start = stop
        return counts


class _PutBatch:
    """Objects being copied from one node's GPUs into one node's memory."""

    __slots__ = ("generations", "names", "nbytes")

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.generations: list[int] = []
        self.nbytes = 0

    def add(self, name: bytes, generation: int, nbytes: int) -> None:
        self.names.append(name)
        self.generations.append(generation)
        self.nbytes += nbytes


class SimPool:
    """Calls `on_changes` with stored and removed objects, as a real pool notifies its listeners."""

    def __init__(
        self,
        clock: SimClock,
        nodes: Sequence[str],
        spec: NodeSpec,
        block_nbytes: int,
        rules: PoolRules,
        on_changes: Callable[[Changes], None],
    ) -> None:
        self._clock = clock
        self._block_nbytes = block_nbytes
        self._keys: dict[int, bytes] = {}
        self._dram_of = {node: f"{node}.dram" for node in nodes}
        self._on_changes = on_changes
        self.state = PoolState(rules, 1)
        self._node_of: dict[str, str] = {}
        self._log_end: dict[str, int] = {}
        self._next_tick_s = 0.0
        self._options = {node: PutOptions(preferred=(f"{node}.dram",)) for node in nodes}
        for node in nodes:
            self._mount(node, Tier.DRAM, int(spec.dram_nbytes))
            if spec.ssd_nbytes:
                self._mount(node, Tier.SSD, int(spec.ssd_nbytes))

    def find(self, runs: Sequence[Run], node: str) -> PoolHit:
        """Look up and lease the leading runs. Of several replicas of a run, prefer the one in `node`'s memory."""
        found = PoolHit([], [], [])
        names = [self._key(head) for head, _, _ in runs]
        for info, (_, _, end) in zip(self.state.lookup(names, self._clock.now_s, prefix=True), runs, strict=True):
            if info is None:
                break
            segment = info.replicas[0].segment
            for each in info.replicas[1:]:
                if each.segment == self._dram_of[node]:
                    segment = each.segment
            found.ends.append(end)
            found.nodes.append(self._node_of[segment])
            found.on_ssd.append(segment.endswith("ssd"))
        self.process_changes()
        return found

    def promote(self, heads: Sequence[int]) -> None:
        """Ask for the runs with these first blocks to be in memory, as the conductor and workers do."""
        self.state.promotions.ask([self._key(head) for head in heads], self._clock.now_s)
        self.process_changes()

    def put(self, node: str, runs: Sequence[Run], parents: Sequence[int | None]) -> None:
        """Copy runs from a node's GPUs into its own memory if there is room there, else into another node's.

        A run can be found when its copy has ended. Refused runs are not stored. `parents` has the first block of the
        run before each run.
        """
        now_s, state = self._clock.now_s, self.state
        names = [self._key(head) for head, _, _ in runs]
        sizes = [(end - begin) * self._block_nbytes + ALIGN_NBYTES for _, begin, end in runs]
        above = [b"" if parent is None else self._key(parent) for parent in parents]
        reply = state.put_start(names, sizes, self._options[node], now_s, parents=above)
        batches: dict[str, _PutBatch] = {}
        for name, nbytes, generation, place in zip(names, sizes, reply.generations, reply.replicas, strict=True):
            if generation:
                target = self._node_of[place[0].segment]
                batches.setdefault(target, _PutBatch()).add(name, generation, nbytes)
        for target, batch in batches.items():
            self._store(node, target, batch)
        self._tick(now_s)
        self.process_changes()

    def _store(self, node: str, target: str, batch: _PutBatch) -> None:
        links = (f"{node}/d2h",) if target == node else (f"{node}/nic_out", f"{target}/nic_in")

        def stored() -> None:
            self.state.put_end(batch.names, batch.generations, {}, self._clock.now_s)
            self.process_changes()

        def lost() -> None:
            self.state.put_revoke(batch.names, batch.generations, True, self._clock.now_s)
            self.process_changes()

        self._clock.send(links, batch.nbytes, stored, lost)

    def route(self, source: str, target: str, on_ssd: bool) -> tuple[str, ...]:
        """Return the links from one node's memory or disk to another node's GPUs."""
        links = (f"{source}/ssd_read",) if on_ssd else ()
        return (*links, f"{target}/h2d") if source == target else (*links, f"{source}/nic_out", f"{target}/nic_in")

    def _tick(self, now_s: float) -> None:
        """Tick a tenth as often as a real master: nothing that waits for ticks is urgent."""
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + _TICK_S
            while self.state.tick(now_s):
                pass

    def _key(self, head: int) -> bytes:
        key = self._keys.get(head)
        if key is None:
            key = self._keys[head] = object_key(block_key(head))
        return key

    # --- nodes ---

    def _mount(self, node: str, tier: Tier, nbytes: int) -> None:
        name = f"{node}.{'dram' if tier is Tier.DRAM else 'ssd'}"
        self._node_of[name] = node
        descriptor = SegmentDescriptor(
            name=name,
            host=node,
            incarnation=1,
            nbytes=nbytes // _GRANULE_NBYTES * _GRANULE_NBYTES,
            granule_nbytes=_GRANULE_NBYTES,
            endpoints=(),
        )
        capacity_nbytes = descriptor.nbytes if tier is Tier.SSD else None
        self.state.mount(node, descriptor, 0.0, tier=tier, capacity_nbytes=capacity_nbytes)
        self.state.heartbeat(name, 1, 0.0)
        if tier is Tier.SSD:
            self.state.members.inventory(name, 1, [], True, 0.0)

    def process_changes(self) -> None:
        """Publish the changes, and execute the orders for nodes."""
        changes = self.state.take_changes()
        if changes is not None:
            self._on_changes(changes)
        orders = self.state.orders
        while orders.unsent:
            for node in list(orders.unsent):
                for order in orders.take_unsent(node):
                    self._execute_order(node, order)

    def _execute_order(self, node: str, order: Order) -> None:
        source = self._node_of[order.source.segment]
        if order.kind in (OrderKind.DROP, OrderKind.VOID):
            self._order_done(OrderResult(order.order_id))
        elif order.kind is OrderKind.OFFLOAD:
            offset = self._log_end.get(node, 0)
            self._log_end[node] = offset + order.nbytes
            result = OrderResult(order.order_id, offset=offset)
            self._clock.send((f"{node}/ssd_write",), order.nbytes, lambda: self._order_done(result))
        else:
            links: tuple[str, ...] = () if source == node else (f"{source}/nic_out", f"{node}/nic_in")
            if order.source.segment.endswith("ssd"):
                links = (f"{source}/ssd_read", *links)
            self._clock.send(
                links or (f"{node}/h2d",), order.nbytes, lambda: self._order_done(OrderResult(order.order_id))
            )

    def _order_done(self, result: OrderResult) -> None:
        self.state.orders_done([result], self._clock.now_s)
        self.process_changes()


def sim_pool_rules(**changes: float | str) -> PoolRules:
    """Return pool rules without heartbeat timeouts: simulated segments send no heartbeats, and failed nodes are
    unmounted instead."""
    return PoolRules(segment_ttl_s=_NEVER_S, away_ttl_s=_NEVER_S, **changes)  # type: ignore[arg-type]
