"""The pool is measured without a request: read back, left as it was, and again when nothing is pulled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_pool import LocalPool

from moonpool.base.clock import SystemClock
from moonpool.base.cluster import PullSample
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine
from moonpool.worker.kv_link import pool as pool_module
from moonpool.worker.kv_link.pool import PoolProbe


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    pool = LocalPool(tmp_path, dram_nbytes=4 << 20)
    try:
        yield pool
    finally:
        pool.close()


def test_it_measures_and_leaves_nothing(pool: LocalPool) -> None:
    samples = PoolProbe(pool.client, 1 << 20, SystemClock()).measure()
    assert samples
    assert [each.nbytes for each in samples] == [64 * 1024, 1 << 20][: len(samples)]
    assert all(each.seconds > 0 for each in samples)
    assert list(pool.client().objects()) == []


def test_a_pool_that_is_slow_is_known_by_the_small_object(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_FAST_S", 0.0)
    assert [each.nbytes for each in PoolProbe(pool.client, 1 << 20, SystemClock()).measure()] == [64 * 1024]


def test_no_pool_is_no_sample(tmp_path: Path) -> None:
    engine = TransferEngine(TransferConfig(run_dir=str(tmp_path / "run"), tcp_host=None))

    def connect() -> Store:
        return Store(f"unix:{tmp_path}/nobody.sock", engine=engine, config=ClientConfig(retry_s=0.0))

    try:
        assert PoolProbe(connect, 1 << 20, SystemClock()).measure() == []
    finally:
        engine.close()


async def test_it_goes_on_only_while_nothing_is_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_UNKNOWN_EVERY_S", 0.0)
    clock, pulled_s, added = SystemClock(), [SystemClock().now_s()], []
    probe = PoolProbe(lambda: pytest.fail("not asked"), 1, clock)

    class Enough(Exception):
        """Ends the task."""

    def measure() -> list[PullSample]:
        return [PullSample(1, 1.0)]

    def add(found: list[PullSample]) -> None:
        added.extend(found)
        raise Enough

    looks = 0

    def last_pull_s() -> float | None:
        nonlocal looks
        looks += 1
        return pulled_s[0] if looks < 4 else None

    monkeypatch.setattr(probe, "measure", measure)
    with pytest.raises(Enough):
        await probe.keep_measuring(add, last_pull_s)
    assert (looks, added) == (4, [PullSample(1, 1.0)])
