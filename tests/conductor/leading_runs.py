"""What tests see of a prefix index: the leading runs by worker name, and its size."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.conductor.placement.prefix_index import PrefixIndex, fingerprints


def leading_blocks(index: PrefixIndex, keys: Sequence[bytes]) -> tuple[int, dict[str, int]]:
    """Return the pool's run and every worker's."""
    workers = index._workers
    leading = index.leading(fingerprints(keys), sum(part.bit for part in workers.values()))
    return leading.pool, {name: leading.run_of(part.slot) for name, part in workers.items()}


def num_keys(index: PrefixIndex) -> int:
    return sum(map(len, index._shards))


def num_slots(index: PrefixIndex) -> int:
    return index._slots.num_slots
