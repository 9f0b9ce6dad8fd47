"""Workers change their roles under load: no request is lost, repeated or different, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from role_changes import change, roles, set_role
from severe import check_tokens
from tiny_cluster import Oracle, TinyCluster, greedy, prompt_of, tiny_cluster
from tiny_gates import Hold
from waiting import HANG_S

from moonpool.base.cluster import WorkerRole
from moonpool.base.errors import InvalidInput, NotFound
from moonpool.conductor.costs import CostModels

PARAMS = greedy(12)
NUM_CLIENTS = 4


def pick(current: dict[str, WorkerRole], rng: random.Random) -> tuple[str, WorkerRole]:
    """A worker and its other role, so that each role keeps a worker."""
    common = [role for role in WorkerRole if list(current.values()).count(role) > 1]
    name = rng.choice(sorted(name for name, role in current.items() if role in common))
    return name, WorkerRole.DECODE if current[name] is WorkerRole.PREFILL else WorkerRole.PREFILL


async def client(cluster: TinyCluster, oracle: Oracle, number: int, done: asyncio.Event, served: Counter[int]) -> None:
    """Sends requests until it is told to stop, each with a prefix that others share; counts them."""
    rng = random.Random(number)
    while not done.is_set():
        own = rng.randrange(16)
        prompt = prompt_of(32, rng.randrange(3)) + prompt_of(1 + 4 * own, own)
        answer = await cluster.generate(prompt, PARAMS)
        check_tokens(answer.tokens, await oracle(prompt, PARAMS))
        assert answer.num_attempts == 1, "a change of roles is no failure"
        served[number] += 1


async def until_served(cluster: TinyCluster, served: Counter[int], num_answers: int) -> None:
    await cluster.until(lambda: served.total() >= num_answers, "answers between the changes")


@pytest.mark.parametrize("num_pages", [48, 20])
async def test_twenty_changes_under_load(tiny_model: str, oracle: Oracle, num_pages: int) -> None:
    """With few pages, sequences are preempted while roles change."""
    rng, done = random.Random(num_pages), asyncio.Event()
    async with tiny_cluster(
        tiny_model, num_prefill=2, num_decode=2, prefill_pages=num_pages, decode_pages=num_pages
    ) as cluster:
        served: Counter[int] = Counter()

        def have_computed() -> bool:
            return all(cluster.stats(name).handoff_nbytes > 0 for name in cluster.workers)

        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(client(cluster, oracle, number, done, served))
            num_changes = 0
            while num_changes < 20 or not have_computed():  # until every worker has had prompts to compute
                await change(cluster, *pick(roles(cluster), rng))
                num_changes += 1
                await until_served(cluster, served, served.total() + rng.randrange(3))
            done.set()
        assert all(served[number] > 0 for number in range(NUM_CLIENTS))


async def test_the_rule_moves_workers_to_the_role_that_is_short(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts wait at the only prefill worker, while three decode workers have little to do."""
    monkeypatch.setattr("moonpool.conductor.elastic._TTFT_S", 0.002)
    monkeypatch.setattr(CostModels, "learn", lambda *_: None)  # by the priors a prompt takes longer than that
    monkeypatch.setattr("moonpool.conductor.elastic.HOLD_S", 0.2)
    monkeypatch.setattr("moonpool.conductor.elastic.REST_S", 0.5)
    monkeypatch.setattr("moonpool.conductor.service.REBALANCE_S", 0.05)
    async with tiny_cluster(tiny_model, num_prefill=1, num_decode=3, elastic=True) as cluster:
        done = asyncio.Event()

        async def send(number: int) -> None:
            count = 0
            while not done.is_set():
                prompt = prompt_of(150, 1000 * number + count)
                answer = await cluster.generate(prompt, greedy(2))
                check_tokens(answer.tokens, await oracle(prompt, greedy(2)))
                assert answer.num_attempts == 1
                count += 1

        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(send(number))

            def has_moved() -> bool:
                return list(roles(cluster).values()).count(WorkerRole.PREFILL) >= 2

            await cluster.until(has_moved, "a decode worker computes prompts")
            done.set()
        assert cluster.conductor.state.roles.num_moved >= 1


async def test_a_worker_keeps_its_pages_through_a_change(tiny_model: str, oracle: Oracle) -> None:
    """Blocks of its time as a decode worker are found when it computes prompts, and not computed again."""
    prompt = prompt_of(70)
    async with tiny_cluster(tiny_model, num_prefill=2, num_decode=2) as cluster:
        await change(cluster, "decode1", WorkerRole.PREFILL)  # one decode worker is left: it gets the request
        await cluster.generate(prompt, PARAMS)
        await change(cluster, "decode1", WorkerRole.DECODE)
        await change(cluster, "decode0", WorkerRole.PREFILL)
        await cluster.check_idle()
        for name in ("prefill0", "prefill1", "decode1"):
            await cluster.workers[name].on_engine(cluster.workers[name].pages.drop_cached)
        state = cluster.conductor.state
        await cluster.until(lambda: state.index.worker_blocks("decode0") > 0, "its blocks are known")
        await cluster.until(lambda: not state.index.worker_blocks("prefill0"), "others' are gone")
        answer = await cluster.generate(prompt, PARAMS)
        check_tokens(answer.tokens, await oracle(prompt, PARAMS))
        assert answer.prefills[0].local_tokens == 64
        assert answer.prefills[0].pool_tokens == 0


async def test_a_conductor_that_starts_again_learns_the_roles(tiny_model: str) -> None:
    async with tiny_cluster(tiny_model, num_prefill=2, num_decode=1) as cluster:
        await change(cluster, "prefill1", WorkerRole.DECODE)
        await cluster.connections.close()
        await cluster.conductor.close()
        await cluster.start_conductor()
        await cluster.until(lambda: len(roles(cluster)) == 3, "all register again")
        assert roles(cluster)["prefill1"] is WorkerRole.DECODE


async def test_a_worker_that_drains_ends_its_requests_and_gets_no_new_ones(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model, num_prefill=2, num_decode=2) as cluster:
        long, params = prompt_of(40, 1), greedy(200)
        hold = Hold((cluster.decode0, cluster.decode1), 2)
        running = asyncio.create_task(cluster.generate(long, params))
        busy: list[str] = []

        def is_decoding() -> bool:
            busy[:] = [name for name in ("decode0", "decode1") if cluster.stats(name).num_running]
            return bool(busy)

        await cluster.until(is_decoding, "it decodes")
        [name] = busy
        draining = asyncio.create_task(cluster.workers[name].drain())
        await cluster.until(lambda: name not in roles(cluster), "it has left")
        hold.release()
        answers = await asyncio.gather(*(cluster.generate(prompt_of(30, seed), PARAMS) for seed in range(4)))
        assert [answer.num_attempts for answer in answers] == [1] * 4
        answer = await running
        check_tokens(answer.tokens, await oracle(long, params))
        assert answer.num_attempts == 1
        await asyncio.wait_for(draining, HANG_S)


async def test_what_cannot_be(tiny_model: str) -> None:
    async with tiny_cluster(tiny_model) as cluster:
        with pytest.raises(NotFound, match="decode0, prefill0"):
            await set_role(cluster, "nobody", WorkerRole.DECODE)
        with pytest.raises(InvalidInput, match="only prefill worker"):
            await set_role(cluster, "prefill0", WorkerRole.DECODE)
        await set_role(cluster, "prefill0", None)

        def is_elastic() -> bool:
            return any(not worker.info.fixed for worker in cluster.conductor.state.workers)

        await cluster.until(is_elastic, "the rule may change it")
        assert roles(cluster)["prefill0"] is WorkerRole.PREFILL
