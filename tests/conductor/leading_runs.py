"""The leading runs of a prefix index by worker name, as tests compare them."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.conductor.placement.prefix_index import PrefixIndex, fingerprints


def leading_blocks(index: PrefixIndex, keys: Sequence[bytes]) -> tuple[int, dict[str, int]]:
    """Return the pool's run and every worker's."""
    among = sum(part.bit for part in index._workers.values())
    leading = index.leading(fingerprints(keys), among)
    return leading.pool, {name: leading.run_of(part.slot) for name, part in index._workers.items()}
