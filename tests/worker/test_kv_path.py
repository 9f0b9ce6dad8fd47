"""KV over a link with a delay: how many transfers a prompt takes, for each costs a round trip at least.

benchmarks/kv_path.py measures how long they take; a busy machine would spoil such a claim here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _delayed_link import missing
from kv_path import KvLab

NUM_BLOCKS, NUM_LAYERS = 9, 30
REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(scope="module")
def lab() -> Iterator[KvLab]:
    with KvLab(rate_mbit=1000, delay_ms=1.0, slow_mbit=1000) as lab:
        yield lab


def test_a_layer_of_all_blocks_is_one_transfer(lab: KvLab) -> None:
    fast, _ = lab.masters
    handed = lab.handoff(NUM_BLOCKS, fast, 0.0)
    assert handed["failed_puts"] == 0
    assert handed["transfers"] == NUM_LAYERS, "to the decode worker"
    assert handed["pool_transfers"] <= NUM_LAYERS + 1, "and one for the headers"
    pulled = lab.pull(fast, 0.0)
    assert pulled["transfers"] <= 2 * NUM_LAYERS + 2, "two streams, and the headers before and after"
