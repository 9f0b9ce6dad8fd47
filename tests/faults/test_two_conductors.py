"""Two conductors with the same workers: either may die, one of them may change roles, and workers refuse an old one."""

from __future__ import annotations

import asyncio

import pytest
from tiny_cluster import Oracle, TinyCluster, greedy, prompt_of, tiny_cluster

from moonpool.base.cluster import AssignedRole, WorkerRole
from moonpool.base.errors import Unavailable
from moonpool.conductor.service import Conductor

PARAMS = greedy(12)


def roles(conductor: Conductor) -> dict[str, WorkerRole]:
    return {worker.info.name: worker.info.role for worker in conductor._state.workers}


def holder(cluster: TinyCluster) -> Conductor | None:
    found = [each for each in cluster.conductors if each._state.roles.lease() is not None]
    assert len(found) <= 1, "the right is with one of them"
    return found[0] if found else None


def assign(conductor: Conductor, worker: str, role: WorkerRole) -> None:
    conductor._state.roles.assign(worker, role, conductor._state.workers)


async def test_either_may_die(tiny_model: str, oracle: Oracle) -> None:
    """Answers go on while one dies; the other one has the right to change roles then, and knows the roles."""
    long, params, shorts = prompt_of(40, 1), greedy(150), [prompt_of(30, seed) for seed in range(4)]
    # Computed first: it holds up the master, which is in this process, for so long that a worker would give its put up.
    expected, others = oracle(long, params), [oracle(prompt, PARAMS) for prompt in shorts]
    async with tiny_cluster(tiny_model, num_prefill=2, num_decode=2, num_conductors=2) as cluster:
        everyone = {"prefill0", "prefill1", "decode0", "decode1"}
        await cluster.until(lambda: all(roles(each).keys() == everyone for each in cluster.conductors), "both know all")
        await cluster.until(lambda: holder(cluster) is not None, "one may change roles")
        first = holder(cluster)
        assert first is not None
        (second,) = [each for each in cluster.conductors if each is not first]
        with pytest.raises(Unavailable, match="another one has the right"):
            assign(second, "prefill1", WorkerRole.DECODE)
        assign(first, "prefill1", WorkerRole.DECODE)
        for each in cluster.conductors:
            await cluster.until(lambda each=each: roles(each).get("prefill1") is WorkerRole.DECODE, "both see it")  # type: ignore[misc]

        begun = asyncio.Event()
        running = asyncio.create_task(cluster.generate(long, params, on_tokens=lambda _: begun.set()))
        await begun.wait()
        await first.close()
        answers = await asyncio.gather(*(cluster.generate(prompt, PARAMS) for prompt in shorts))
        assert [answer.tokens for answer in answers] == others
        answer = await running
        assert (answer.tokens, answer.num_attempts) == (expected, 1), "what runs is not touched"

        await cluster.until(lambda: second._state.roles.lease() is not None, "the other one has the right now")
        number = second._state.roles.lease()
        assert number is not None
        assert number > cluster.workers["prefill1"]._assigned.lease > 0
        assign(second, "prefill1", WorkerRole.PREFILL)
        await cluster.until(lambda: roles(second).get("prefill1") is WorkerRole.PREFILL, "it changes roles")


async def test_a_worker_refuses_what_an_older_lease_says(tiny_model: str) -> None:
    async with tiny_cluster(tiny_model, num_prefill=2) as cluster:
        await cluster.until(lambda: holder(cluster) is not None, "it may change roles")
        assign(cluster.conductor, "prefill1", WorkerRole.DECODE)
        worker = cluster.workers["prefill1"]
        await cluster.until(lambda: worker._assigned.role is WorkerRole.DECODE, "it has its role")
        taken = worker._assigned
        for leaves in (False, True):
            worker._take_role(AssignedRole(role=WorkerRole.PREFILL, fixed=False, leaves=leaves, lease=taken.lease - 1))
        assert worker._assigned == taken
        assert not any(task.get_name() == "leave" for task in worker._tasks)


async def test_each_sees_what_the_other_has_sent(tiny_model: str, oracle: Oracle) -> None:
    """The second conductor routes nothing, and knows from reports that the decode worker is busy."""
    async with tiny_cluster(tiny_model, num_conductors=2) as cluster:
        other = cluster.conductors[1]

        def busy() -> int:
            return sum(one.decode_load.num_seqs for one in other._state.workers if not one.is_prefill)

        await cluster.until(lambda: len(roles(other)) == 2, "it knows both workers")
        seen = asyncio.Event()
        prompt, params = prompt_of(40, 1), greedy(300)
        running = asyncio.create_task(cluster.generate(prompt, params, on_tokens=lambda _: busy() and seen.set()))
        await cluster.until(lambda: seen.is_set() or running.done(), "it decodes")
        answer = await running
        assert answer.tokens == oracle(prompt, params)
        assert seen.is_set(), "the other conductor saw the running request"
        assert not other._state.num_open
        await cluster.until(lambda: busy() == 0, "and its end")
