"""Lists objects with their places in the tree of prefixes and in the order of eviction, in bounded steps. Pure."""

from __future__ import annotations

from moonpool.base.errors import InvalidInput
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.table import Flag
from moonpool.store.messages import BlockPage, StoredBlock

STEP_SLOTS = 2048  # about 10 ms


def list_blocks(index: ObjectIndex, cursor: int, limit: int, now_s: float) -> BlockPage:
    """Return objects from slot `cursor` on. A page may have fewer than `limit` objects, or none; the listing ends when
    the page has no cursor. Raise InvalidInput for a negative cursor or a limit below 1."""
    if cursor < 0 or limit < 1:
        raise InvalidInput("a cursor is what an earlier answer gave, or 0; a page has room for one block at least")
    table = index.table
    end = min(cursor + min(limit, STEP_SLOTS), table.end)
    slots = [slot for slot in range(cursor, end) if table.keys[slot] is not None]
    standing = index.policy.standing(slots)
    blocks = [_block(index, slot, *each, now_s) for slot, each in zip(slots, standing, strict=True)]
    return BlockPage(blocks, end if end < table.end else None)


def _block(index: ObjectIndex, slot: int, uses: int, rank: float | None, now_s: float) -> StoredBlock:
    table = index.table
    is_pinned = bool(table.flags[slot] & (Flag.PINNED | Flag.HARD_PIN))
    return StoredBlock(
        table.key(slot),
        table.parent_key(slot) or b"",
        table.nbytes[slot],
        tuple(each.segment for each in index.placements(slot)),
        uses,
        rank,
        is_pinned or table.lease_until_s[slot] > now_s,
    )
