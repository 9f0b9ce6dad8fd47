"""Two conductors with the same workers: either may die, one of them may change roles, and workers refuse an old one."""

from __future__ import annotations

import asyncio

import pytest
from role_changes import roles_known_to
from severe import check_tokens
from tiny_cluster import Oracle, TinyCluster, greedy, prompt_of, tiny_cluster
from tiny_gates import Hold

from moonpool.base.cluster import AssignedRole, WorkerRole
from moonpool.base.errors import Unavailable
from moonpool.conductor.service import Conductor

PARAMS = greedy(12)


def holder(cluster: TinyCluster) -> Conductor | None:
    found = [each for each in cluster.conductors if each.state.roles.lease() is not None]
    assert len(found) <= 1, "the right is with one of them"
    return found[0] if found else None


def assign(conductor: Conductor, worker: str, role: WorkerRole) -> None:
    conductor.state.roles.assign(worker, role, conductor.state.workers)


async def test_either_may_die(tiny_model: str, oracle: Oracle) -> None:
    """Answers go on while one dies; the other one has the right to change roles then, and knows the roles."""
    long, params, shorts = prompt_of(40, 1), greedy(150), [prompt_of(30, seed) for seed in range(4)]
    async with tiny_cluster(tiny_model, num_prefill=2, num_decode=2, num_conductors=2) as cluster:
        everyone = {"prefill0", "prefill1", "decode0", "decode1"}

        def all_know(names: set[str]) -> bool:
            return all(roles_known_to(each).keys() == names for each in cluster.conductors)

        await cluster.until(lambda: all_know(everyone), "both know all")
        await cluster.until(lambda: holder(cluster) is not None, "one may change roles")
        first = holder(cluster)
        assert first is not None
        (second,) = [each for each in cluster.conductors if each is not first]
        with pytest.raises(Unavailable, match="another one has the right"):
            assign(second, "prefill1", WorkerRole.DECODE)
        assign(first, "prefill1", WorkerRole.DECODE)

        def is_decoding(conductor: Conductor) -> bool:
            return roles_known_to(conductor).get("prefill1") is WorkerRole.DECODE

        await cluster.until(lambda: all(is_decoding(each) for each in cluster.conductors), "both see it")
        hold = Hold((cluster.decode0, cluster.decode1), 2)
        running = asyncio.create_task(cluster.generate(long, params))
        decoders = (cluster.decode0, cluster.decode1)
        await cluster.until(lambda: any(worker.stats().num_running for worker in decoders), "it decodes")
        await first.close()
        hold.release()
        answers = await asyncio.gather(*(cluster.generate(prompt, PARAMS) for prompt in shorts))
        check_tokens([answer.tokens for answer in answers], [await oracle(prompt, PARAMS) for prompt in shorts])
        answer = await running
        check_tokens(answer.tokens, await oracle(long, params))
        assert answer.num_attempts == 1, "what runs is not touched"

        await cluster.until(lambda: second.state.roles.lease() is not None, "the other one has the right now")
        number = second.state.roles.lease()
        assert number is not None
        assert number > cluster.workers["prefill1"].assigned.lease > 0
        assign(second, "prefill1", WorkerRole.PREFILL)
        await cluster.until(lambda: roles_known_to(second).get("prefill1") is WorkerRole.PREFILL, "it changes roles")


async def test_a_worker_refuses_what_an_older_lease_says(tiny_model: str) -> None:
    async with tiny_cluster(tiny_model, num_prefill=2) as cluster:
        await cluster.until(lambda: holder(cluster) is not None, "it may change roles")
        assign(cluster.conductor, "prefill1", WorkerRole.DECODE)
        worker = cluster.workers["prefill1"]
        await cluster.until(lambda: worker.assigned.role is WorkerRole.DECODE, "it has its role")
        taken = worker.assigned
        for leaves in (False, True):
            worker.take_role(AssignedRole(role=WorkerRole.PREFILL, fixed=False, leaves=leaves, lease=taken.lease - 1))
        assert worker.assigned == taken
        assert not worker.is_leaving


async def test_each_sees_what_the_other_has_sent(tiny_model: str, oracle: Oracle) -> None:
    """The second conductor routes nothing, and knows from reports that the decode worker is busy."""
    async with tiny_cluster(tiny_model, num_conductors=2) as cluster:
        other = cluster.conductors[1]

        def busy() -> int:
            return sum(one.decode_load.num_seqs for one in other.state.workers if not one.is_prefill)

        await cluster.until(lambda: len(roles_known_to(other)) == 2, "it knows both workers")
        prompt, params, hold = prompt_of(40, 1), greedy(30), Hold([cluster.decode0], 2)
        running = asyncio.create_task(cluster.generate(prompt, params))
        await cluster.until(lambda: busy() == 1, "the other conductor sees the running request")
        hold.release()
        answer = await running
        check_tokens(answer.tokens, await oracle(prompt, params))
        assert not other.state.num_open
        await cluster.until(lambda: busy() == 0, "and its end")
