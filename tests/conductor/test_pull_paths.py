"""Where the pool's blocks are: what the index knows of it, and how a pull is priced by it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_pool import MIB, LocalPool
from waiting import until
from worker_info import info

from moonpool.base.cluster import PrefillSample, PullSample
from moonpool.base.keys import chain_keys, object_key
from moonpool.conductor.messages import Decision, RequestEnded, Route
from moonpool.conductor.placement.paths import PoolPaths
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.placement.prefix_index import NodeRuns, PrefixIndex, fingerprints
from moonpool.conductor.placement.traffic import Traffic, crowding
from moonpool.conductor.pool_feed import PoolFeed
from moonpool.conductor.state import ConductorState
from moonpool.store.messages import Tier

TOKENS, NUM_BLOCKS = 640, 8
KEYS = chain_keys(b"r" * 32, range(64 * NUM_BLOCKS), 64)
NAMES = [object_key(key) for key in KEYS]
PRINTS = fingerprints(KEYS)
BLOCK_NBYTES = 1 << 20
HOSTS = {"na": "a", "nb": "b", "nc": "c"}


def pulls(node: str, block_s: float, is_near: bool = False) -> list[PullSample]:
    return [PullSample(num * BLOCK_NBYTES, num * block_s, 0, node, is_near) for num in (1, 4, 8)] * 3


class World:
    """A prefill worker on machine a and one on b; a block takes 0.1 s to compute."""

    def __init__(self, nodes: NodeRuns, samples: list[PullSample]) -> None:
        self.state = ConductorState(PolicyConfig(), PrefixIndex(), 100)
        for name, host in (("pa", "a"), ("pb", "b"), ("d0", "d")):
            self.state.register(info(name, host=host))
        self.state.set_pool_nodes(HOSTS)
        self.state.costs.learn(prefills=[PrefillSample(TOKENS, 0, 1.0)] * 9, pulls=samples)
        self.state.index.replace_pool(NAMES, (), nodes)
        self.num_sent = 0

    def send(self, keys: list[bytes] = KEYS, max_tokens: int = 20, exclude: tuple[str, ...] = ()) -> Decision:
        self.num_sent += 1
        name = f"r{self.num_sent}"
        route = Route(request_id=name, keys=keys, num_tokens=TOKENS, max_tokens=max_tokens, exclude=exclude)
        return self.state.route(route, "fe", 0.0, 0.0)


def test_a_prompt_goes_to_the_machine_that_has_its_blocks() -> None:
    samples = pulls("na", 0.06) + pulls("nb", 0.06) + pulls("nb", 0.001, is_near=True)
    for node, worker in (("na", "pa"), ("nb", "pb")):
        best = World([(node, NUM_BLOCKS)], samples).send().candidates[0]
        assert (best.worker, best.pulled_blocks) == (worker, NUM_BLOCKS)
        assert best.transfer_s == pytest.approx(0.008, rel=0.2)


def test_a_pull_is_as_slow_as_the_node_that_it_comes_from() -> None:
    samples = pulls("na", 0.001) + pulls("nc", 5.0)
    assert World([("na", NUM_BLOCKS)], samples).send().candidates[0].pulled_blocks == NUM_BLOCKS
    assert World([("nc", NUM_BLOCKS)], samples).send().candidates[0].pulled_blocks == 0, "computing is faster"
    assert World([("na", 3), ("nc", 5)], samples).send().candidates[0].pulled_blocks == 3, "only the fast node's"


def test_a_pull_leaves_a_link_to_the_hand_offs_that_fill_it() -> None:
    """A prompt of 10 MiB/s leaves machine a, whose link has 17 MiB/s: a pull from there by pb would take 1.0 s in place
    of 0.5 s, and computing takes 0.8 s."""
    plans = []
    for max_tokens in (1, 20):  # an answer of one token is not handed over
        world = World([("na", NUM_BLOCKS)], pulls("na", 0.06))
        first = world.send(chain_keys(b"x" * 32, range(TOKENS), 64), max_tokens, exclude=("pb",))
        assert first.prefill.name == "pa"
        plans.append(world.send(exclude=("pa",)).candidates[0])
    assert [(plan.worker, plan.pulled_blocks) for plan in plans] == [("pb", NUM_BLOCKS), ("pb", 0)]


def test_hand_offs_leave_a_machine_from_their_start_to_their_end() -> None:
    traffic = Traffic()
    traffic.expect_handoff("r0", "a", 100, 1.0, 2.0)
    traffic.expect_handoff("r1", "a", 100, 1.0, 3.0)
    assert traffic.leaving == {}
    traffic.advance(1.0)
    assert (traffic.leaving["a"].num_flows, traffic.leaving["a"].nbytes_per_s) == (2, 150.0)
    assert traffic.others(None) == (0.0, 0.0), "they are no pulls"
    traffic.advance(2.0)
    assert traffic.leaving["a"].num_flows == 1
    traffic.end("r1")
    assert traffic.leaving["a"].num_flows == 1
    traffic.end_handoff("r1")
    traffic.end_handoff("no such request")
    assert traffic.leaving == {}


def test_hand_offs_of_a_request_that_has_ended_do_not_count() -> None:
    world = World([("na", NUM_BLOCKS)], pulls("na", 0.06))
    worker = world.send().prefill.name
    assert worker == "pa"
    world.state.traffic.advance(0.0)
    assert set(world.state.traffic.leaving) == {"a"}
    world.state.request_ended(RequestEnded(request_id="r1", output_tokens=2), 0.0)
    assert world.state.traffic.leaving == {}


@pytest.mark.parametrize(
    ("num_flows", "used", "times"),
    [(0, 0.0, 1.0), (1, 0.5, 2.0), (4, 0.5, 2.0), (1, 1.0, 3.0), (3, 1.0, 5.0), (1, 2.0, 5.0)],
)
def test_a_pull_counts_as_long_as_it_takes_and_for_what_hand_offs_lose(
    num_flows: int, used: float, times: float
) -> None:
    """With half of the link in use it takes twice as long and slows no other; on a full one all have equal shares."""
    assert crowding(num_flows, used) == pytest.approx(times)


def test_workers_and_nodes_of_one_machine_need_no_paths() -> None:
    paths = PoolPaths()
    paths.set_nodes({"na": "a", "nx": ""})
    paths.add("a", 3)
    paths.add("", 4)
    assert (paths.sources, paths.machines(((8, "na"),), 0)) == (frozenset(), [("a", 1 << 3)])
    paths.add("b", 5)
    assert paths.sources == {"a"}
    paths.drop("b", 5)
    paths.drop("", 4)
    assert paths.sources == frozenset()


def test_the_index_knows_the_nodes_of_a_prefix() -> None:
    index = PrefixIndex()
    index.replace_pool(NAMES[:5], (), [("na", 2), ("nb", 3)])
    assert index.leading(PRINTS, 0).places == ((2, "na"), (5, "nb"))
    index.update_pool(NAMES[5:6], (), (), [("", 1)])
    assert index.leading(PRINTS, 0).places == ((2, "na"), (5, "nb"), (6, ""))
    index.update_pool((), (), [(NAMES[1], Tier.SSD), (NAMES[2], Tier.SSD | Tier.DRAM)])
    found = index.leading(PRINTS, 0)
    assert (found.pool, found.on_ssd, found.places) == (6, (1,), ((1, "na"), (2, ""), (5, "nb"), (6, "")))
    index.update_pool(NAMES[:1], (), (), [("nb", 1)])
    assert index.leading(PRINTS, 0).places[0] == (1, "nb"), "it was stored again, elsewhere"
    index.update_pool((), NAMES[:1])
    assert index.leading(PRINTS, 0)[:2] == (0, ())
    index.replace_pool(NAMES)
    assert (index.leading(PRINTS, 0).pool, index.leading(PRINTS, 0).places) == (NUM_BLOCKS, ())


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    pool = LocalPool(tmp_path, 4 * MIB, num_nodes=2)
    yield pool
    pool.close()


@pytest.mark.parametrize("is_late", [False, True], ids=["by changes", "by a snapshot"])
async def test_a_real_pool_tells_where_its_blocks_are(pool: LocalPool, is_late: bool) -> None:
    store, index, hosts = pool.client(), PrefixIndex(), {}  # type: ignore[var-annotated]

    def put() -> None:
        for at, name in enumerate(NAMES):
            store.put(name, bytes(1000), preferred=("n0.dram" if at < 3 else "n1.dram",))

    feed = PoolFeed(pool.address, index, hosts.update, name="test")
    if is_late:
        await asyncio.to_thread(put)
    task = asyncio.create_task(feed.run())
    try:
        await until(lambda: feed.connected and hosts, "the feed knows the nodes")
        if not is_late:
            await asyncio.to_thread(put)
        await until(lambda: index.pool_blocks >= NUM_BLOCKS, "the feed knows the blocks")
        assert index.leading(PRINTS, 0).places == ((3, "n0"), (8, "n1"))
        assert set(hosts) == {"n0", "n1"}
        assert all(hosts.values())
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
