"""What must be true of a pool, kept in the simplest way: who owns which byte until when, and what lies in it.

Nodes are dictionaries: memory by place, an SSD log by (key, generation). So every placement that the state hands out
can be checked against what is really there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moonpool.master.state import PoolState
from moonpool.master.state.table import Flag
from moonpool.store import messages as m
from moonpool.store.messages import GRANULE_NBYTES, num_granules

G = GRANULE_NBYTES
FOREVER = float("inf")


@dataclass
class Claim:
    """Bytes that must not be granted to another before a moment, for the sake of `owner`."""

    segment: str
    incarnation: int
    start: int
    end: int
    until_s: float
    owner: tuple[object, ...]

    @property
    def session(self) -> object:
        """The process that holds it, if one does. (Generations look like sessions.)"""
        kind, *details = self.owner
        return details[1] if kind == "put" else details[0] if kind == "pin" else None

    def overlaps(self, other: Claim) -> bool:
        same = (self.segment, self.incarnation) == (other.segment, other.incarnation)
        return same and self.start < other.end and other.start < self.end


def claims_on(replicas: tuple[m.Placement, ...], nbytes: int, until_s: float, owner: tuple[object, ...]) -> list[Claim]:
    """Of replicas in DRAM."""
    size = num_granules(nbytes) * G
    return [
        Claim(each.segment, each.incarnation, each.offset, each.offset + size, until_s, owner)
        for each in replicas
        if each.segment.endswith(".dram")
    ]


@dataclass
class FakeNode:
    """A node process. Its memory is new with every incarnation; its log stays."""

    name: str
    has_ssd: bool
    alive: bool = False
    dram: int = 0  # incarnations, 0 while not mounted
    ssd: int = 0
    epoch: int = 0  # of the master that it last spoke to
    memory: dict[tuple[int, int], tuple[bytes, int]] = field(default_factory=dict)  # (incarnation, offset) -> object
    stamps: dict[int, int] = field(default_factory=dict)  # offset -> generation, of this incarnation
    log: dict[tuple[bytes, int], tuple[int, int]] = field(default_factory=dict)  # (key, generation) -> nbytes, offset
    inbox: list[m.Order] = field(default_factory=list)
    answers: list[m.OrderResult] = field(default_factory=list)
    end_of_log: int = 0
    void_generations: set[int] = field(default_factory=set)  # of replicas whose header is void

    def die(self) -> None:
        self.alive, self.dram, self.ssd, self.epoch = False, 0, 0, 0
        self.memory.clear()
        self.stamps.clear()
        self.inbox.clear()
        self.answers.clear()

    def write(self, place: m.Placement, nbytes: int, key: bytes) -> None:
        """A write that carries an older generation than the memory has is refused, as by a real node."""
        if not self.alive or place.incarnation != self.dram:
            return
        offsets = range(place.offset, place.offset + nbytes, G)
        if any(self.stamps.get(offset, 0) > place.generation for offset in offsets):
            return
        for offset in offsets:
            self.stamps[offset] = place.generation
            self.memory.pop((self.dram, offset), None)
        self.memory[self.dram, place.offset] = (key, place.generation)

    def void(self, key: bytes, place: m.Placement) -> None:
        if self.holds(key, place):
            self.void_generations.add(place.generation)

    def spans_above(self, generation: int) -> list[tuple[int, int]]:
        return [(offset, G) for offset, stamp in sorted(self.stamps.items()) if stamp > generation]

    def append(self, key: bytes, generation: int, nbytes: int) -> int:
        offset = self.end_of_log
        self.end_of_log += num_granules(nbytes) * G
        self.log[key, generation] = (nbytes, offset)
        return offset

    def items(self) -> list[m.HeldItem]:
        return [m.HeldItem(key, generation, *place) for (key, generation), place in self.log.items()]

    def holds(self, key: bytes, place: m.Placement) -> bool:
        """Whether that replica is really there."""
        if place.segment.endswith(".ssd"):
            return (key, place.generation) in self.log
        return self.memory.get((place.incarnation, place.offset)) == (key, place.generation)


@dataclass
class OpenPut:
    key: bytes
    generation: int
    replicas: tuple[m.Placement, ...]
    nbytes: int
    session: int
    hard: bool
    renewed_s: float
    number: int = 0  # of its PutStart, until a call shows that its client has the answer


@dataclass
class Stored:
    """An acknowledged object."""

    generation: int
    hard: bool
    lease_until_s: float = 0.0
    replicas: tuple[m.Placement, ...] = ()
    generations: set[int] = field(default_factory=set)
    maybe_bad: set[tuple[str, int]] = field(default_factory=set)


def picture(state: PoolState) -> dict[str, Any]:
    """What must survive the master."""
    table, pins = state.index.table, state.index.pins
    objects = {
        table.keys[slot]: (
            table.version[slot],
            table.nbytes[slot],
            table.dram_replicas(slot),
            table.ssd_replica(slot),
            table.flags[slot] & Flag.HARD_PIN,
            table.group_of.get(slot),
            table.identity[slot],
        )
        for slot in table.slots()
    }
    held = [
        (each.key, each.slot is None, sorted(holder for holder in holders if holder >= 2**32))
        for each, holders in pins.all()
    ]
    segments = {
        number: (each.name, each.incarnation, each.is_away, each.draining, each.floor)
        for number, each in state.table_of_segments.by_number.items()
    }
    return {
        "objects": objects,
        "puts": {put.key: (put.generation, put.places, put.group) for put in state.puts.pending.values()},
        "pins": sorted(each for each in held if each[2]),
        "hot": {table.keys[slot]: sorted(mark.generations) for slot, mark in table.hot.items()},
        "segments": segments,
    }


def held_puts(state: PoolState) -> dict[int, object]:
    """Space of ended puts that processes may be writing to."""
    return {generation: kept for generation, kept in state.space.of_puts.items() if kept[2]}
