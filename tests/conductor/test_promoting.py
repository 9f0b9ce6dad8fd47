"""A request that waits for its turn, and blocks of its prefix that are on SSD: they come to the pool's memory first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_pool import MIB, LocalPool
from waiting import HANG_S, until, wait_until
from watched_status import until_status
from worker_info import info

from moonpool.base.cluster import CONDUCTOR_SERVICE, PrefillSample, PullSample, RegisterWorker, ReportWorker, WorkerLoad
from moonpool.base.keys import chain_keys, object_key
from moonpool.base.rpc import AsyncClient
from moonpool.conductor.messages import Decision, PrefillEnded, Route
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.placement.prefix_index import PrefixIndex, fingerprints
from moonpool.conductor.request_queue import RequestQueue
from moonpool.conductor.service import Conductor, ConductorConfig
from moonpool.conductor.state import ConductorState
from moonpool.store.messages import Tier

TOKENS, NUM_BLOCKS = 640, 8
KEYS = chain_keys(b"r" * 32, range(64 * NUM_BLOCKS), 64)
FAST = PullSample(1 << 20, 1e-3)  # computing takes 0.1 s a block
SLOW = PullSample(1 << 20, 1e3)
PREFILL = PrefillSample(TOKENS, 0, 1.0)


def route(request_id: str, keys: list[bytes]) -> Route:
    return Route(request_id=request_id, keys=keys, num_tokens=TOKENS, max_tokens=20)


class Asked:
    """A conductor whose one worker has so much to do that the second request waits. What it asks to be promoted."""

    def __init__(self, pull: PullSample = FAST, on_ssd: range = range(2, 6), **config: object) -> None:
        policy = PolicyConfig(**{"ttft_slo_s": 3.0, **config})  # type: ignore[arg-type]
        self.state = ConductorState(policy, PrefixIndex(), 100)
        for name in ("p0", "d0"):
            self.state.register(info(name))
        self.state.costs.learn(prefills=[PREFILL] * 9, pulls=[pull] * 9)
        names = [object_key(key) for key in KEYS]
        self.state.index.update_pool(names, [], [(names[at], Tier.SSD) for at in on_ssd])
        self.keys: list[bytes] = []
        queue = RequestQueue(self.state, policy, self.keys.extend)
        assert queue.submit(route("first", []), "fe", 0.0, 0.0) is not None
        self.is_sent = queue.submit(route("second", KEYS), "fe", 0.0, 0.0) is not None


def test_a_request_that_waits_has_its_blocks_brought_to_memory() -> None:
    asked = Asked()
    assert (asked.is_sent, asked.keys) == (False, KEYS[2:6])


def test_nothing_is_asked_for_a_request_that_is_sent_at_once() -> None:
    asked = Asked(ttft_slo_s=None, worker_backlog_s=10.0)
    assert (asked.is_sent, asked.keys) == (True, [])


@pytest.mark.parametrize(
    "changes",
    [{"on_ssd": range(0)}, {"pull": SLOW}, {"name": "local"}],
    ids=["in memory", "a slow network", "no pulls"],
)
def test_nothing_is_asked_for_blocks_that_are_not_pulled_from_ssd(changes: dict[str, object]) -> None:
    asked = Asked(**changes)  # type: ignore[arg-type]
    assert (asked.is_sent, asked.keys) == (False, [])


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    pool = LocalPool(tmp_path, num_nodes=0)
    yield pool
    pool.close()


async def test_with_a_real_pool_the_blocks_are_in_memory_when_the_turn_comes(pool: LocalPool, tmp_path: Path) -> None:
    node = pool.start_node("n0", 4 * MIB, ssd_dir=str(tmp_path / "disk"), ssd_nbytes=64 * MIB, ssd_file_nbytes=4 * MIB)
    store = pool.client()
    for key in KEYS:
        store.put(object_key(key), bytes(1000))
    await asyncio.to_thread(pool.leave_on_ssd, node, NUM_BLOCKS)
    config = ConductorConfig(
        address=f"unix:{tmp_path}/c.sock", store_address=pool.address, policy=PolicyConfig(ttft_slo_s=3000.0)
    )
    conductor = Conductor(config)
    client = await AsyncClient.connect(await conductor.start(), CONDUCTOR_SERVICE)
    try:
        await until_status(client, lambda status: status.pool_blocks == NUM_BLOCKS)
        samples = {"prefills": (PrefillSample(TOKENS, 0, 1000.0),) * 9, "pulls": (FAST,) * 9}
        for name in ("p0", "d0"):
            await client.call(RegisterWorker(info(name)))
            load = WorkerLoad(free_pages=1000)
            await client.call(ReportWorker(name=name, incarnation=1, sequence=1, load=load, **samples))  # type: ignore[arg-type]
        first = await client.call(route("first", []))
        assert isinstance(first, Decision)
        waiting = asyncio.create_task(client.call(route("second", KEYS), timeout_s=HANG_S))
        await until_status(client, lambda status: status.num_waiting == 1)

        def in_memory() -> int:
            found = store.lookup([object_key(key) for key in KEYS], reads=False)
            return sum(info is not None and info.replicas[0].segment == "n0.dram" for info in found)

        def is_known() -> bool:
            state = conductor.state
            return not state.index.leading(fingerprints(KEYS), state.prefills.mask).on_ssd

        await asyncio.to_thread(wait_until, lambda: in_memory() == NUM_BLOCKS, "all blocks are copied into memory")
        await until(is_known, "the pool's events have told the conductor")
        assert not waiting.done()
        await client.call(PrefillEnded(request_id="first"))
        decision = await asyncio.wait_for(waiting, HANG_S)
        assert (decision.candidates[0].pulled_blocks, decision.candidates[0].ssd_blocks) == (NUM_BLOCKS, 0)
    finally:
        client.close()
        await conductor.close()
