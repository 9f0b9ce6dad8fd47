"""Snapshots of the state, written in steps while the state goes on changing. Pure.

The first step writes everything that is small, at the moment at which the new journal begins. The reasons of removals
and the objects follow in bounded steps: callers wait while one is taken. Changes made meanwhile are in the journal too,
and records are absolute, so replaying the snapshot and then the journal gives the present state.
"""

from __future__ import annotations

from collections.abc import Iterator

from moonpool.master.state import records as r
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.objects import FIRST_SESSION
from moonpool.master.state.pool import PoolState
from moonpool.master.state.table import Flag
from moonpool.store.messages import Tier

STEP_SLOTS = 1024


def snapshot_keys(index: ObjectIndex) -> Iterator[list[tuple[bytes, Tier]]]:
    """Yield the readable keys with their tiers, in parts. Together with the changes taken after the first part, they
    are complete.
    """
    table, start = index.table, 0
    while start < table.end:
        part = enumerate(table.keys[start : start + STEP_SLOTS], start)
        found = [(key, index.tier(slot)) for slot, key in part if key is not None]
        yield [(key, tier) for key, tier in found if tier]
        start += STEP_SLOTS


def snapshot_records(state: PoolState, now_s: float) -> Iterator[list[bytes]]:
    """Yield the state as encoded records, in steps. Together with the records taken after the first step, they are
    complete.
    """
    yield [r.encode([record]) for record in _small(state, now_s)]
    for fated in _reasons(state.index, now_s):
        yield [r.encode([fated])]
    table, start = state.index.table, 0
    while start < table.end:
        placed = _placed(state.index, start, min(start + STEP_SLOTS, table.end), now_s)
        yield [r.encode([placed])] if placed.keys else []
        start += STEP_SLOTS


def _small(state: PoolState, now_s: float) -> Iterator[r.Record]:
    segments, index = state.table_of_segments, state.index
    members = state.members
    yield r.Began(state.epoch, segments.last_number, state.generations.last, members.adopts, sorted(members.listed))
    for number, at in segments.by_number.items():
        yield r.Mounted(
            number, at.node, at.descriptor, at.tier, at.registry_address, at.capacity_nbytes, at.floor, at.draining
        )
    yield members.recounting()
    yield r.SessionsEnded(list(members.ended_sessions))
    yield r.SegmentsAway([number for number, each in segments.by_number.items() if each.is_away])
    yield r.SegmentsEnded(list(index.losses.backing_ssds), list(index.losses.backing_ssds.values()))
    for number, digest in state.identities.items():
        yield r.Identified(number, digest)
    yield from state.answers.records()
    for session, up_to in state.space.stopped_sessions():
        yield r.LetGo(session, up_to)
    for put in state.puts.pending.values():
        terms, groups = put.terms, [put.group] if put.group else None
        yield r.Granted(
            [put.key],
            [put.nbytes],
            [put.generation],
            [put.places],
            terms.session,
            terms.flags,
            terms.identity,
            terms.soft_pin_s,
            terms.replace,
            groups,
            [put.parent] if put.parent else None,
            number=terms.number,
        )
    for generation, kept in state.space.of_puts.items():
        ahead = state.space.is_ahead(generation)
        yield r.HeldPut(generation, kept.session, list(kept.places), kept.nbytes, ahead, kept.number)
    if unsettled := state.voids.unsettled(now_s):
        yield r.Unsettled(unsettled)
    yield from _pins(index)


def _reasons(index: ObjectIndex, now_s: float) -> Iterator[r.Fated]:
    for part in index.removals.parts(STEP_SLOTS):
        yield r.Fated(
            [key for key, _, _ in part], [int(reason) for _, reason, _ in part], [now_s - at for _, _, at in part]
        )


def _pins(index: ObjectIndex) -> Iterator[r.Record]:
    for pinned, owners in index.pins.all():
        sessions = [owner for owner in owners if owner >= FIRST_SESSION]
        for session in sessions:
            yield r.Pinned(session, [pinned.key])
        if sessions and (pinned.left or pinned.slot is None):
            yield r.Viewed(pinned.key, pinned.left, pinned.nbytes, pinned.slot is None)


def _placed(index: ObjectIndex, start: int, end: int, now_s: float) -> r.Placed:
    table = index.table
    made = r.Placed([], [], [], [], [], [], [], {}, {})
    for slot in range(start, end):
        if table.keys[slot] is None:
            continue
        if table.flags[slot] & Flag.SOFT_PIN:
            made.soft_pins_s[len(made.keys)] = table.soft_pins[slot] - now_s
        made.add(table, slot)
    return made
