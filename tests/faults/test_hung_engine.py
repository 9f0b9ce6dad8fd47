"""A worker whose engine does not go on: the others get its requests, and those that it has are answered elsewhere."""

from __future__ import annotations

import asyncio

from severe import check_tokens
from tiny_cluster import RETRY, Answer, Oracle, TinyCluster, greedy, prompt_of, tiny_cluster
from tiny_gates import Gate

from moonpool.worker.watchdog import EngineTask, TaskLimits

PARAMS = greedy(6)


class LateSoon(TaskLimits):
    """A task is overdue soon and never hangs."""

    def due_s(self, task: EngineTask) -> float:
        return 0.5


LATE_SOON = LateSoon(600.0, 600.0)
HANGS_SOON = TaskLimits(1.0, 1.0)


async def answers(cluster: TinyCluster, oracle: Oracle, seeds: range) -> list[Answer]:
    """Return the right answers to new prompts."""
    prompts = [prompt_of(40, seed) for seed in seeds]
    found = await asyncio.gather(*(cluster.generate(prompt, PARAMS) for prompt in prompts))
    check_tokens([answer.tokens for answer in found], [await oracle(prompt, PARAMS) for prompt in prompts])
    return found


async def test_an_engine_that_stands_for_a_while_and_then_for_good(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model, num_prefill=2) as cluster:
        worker, state = cluster.prefill0, cluster.conductor.state
        await answers(cluster, oracle, range(4))

        # For a while, while it has no request: others are chosen, then both again.
        gate, num_steps = Gate(), worker.engine.num_steps
        blocked = asyncio.create_task(worker.on_engine(gate.stop_here))
        await gate.reached()
        worker.watch_with(LATE_SOON)
        await cluster.until(lambda: state.late == {"prefill0"}, "the conductor knows")
        assert [answer.num_attempts for answer in await answers(cluster, oracle, range(4, 10))] == [1] * 6
        assert worker.engine.num_steps == num_steps
        gate.open()
        assert await blocked
        await cluster.until(lambda: not state.late, "it has come back")
        await answers(cluster, oracle, range(10, 14))
        assert worker.engine.num_steps > num_steps, "and is chosen"

        # For good, in the middle of a step.
        gate = Gate()
        worker.runner.execute = gate.around(worker.runner.execute)  # type: ignore[method-assign]
        asking = asyncio.create_task(answers(cluster, oracle, range(14, 18)))
        await gate.reached()
        worker.watch_with(HANGS_SOON)
        await cluster.until(lambda: "prefill0" in cluster.hung, "its watchdog would end the process")
        assert not asking.done()
        await cluster.kill("prefill0")
        found = await asking
        assert max(answer.num_attempts for answer in found) == 2
        assert state.counters["lost_late"] == 1
        gate.open()


async def test_a_decode_worker_whose_engine_stands_takes_nothing_new(tiny_model: str, oracle: Oracle) -> None:
    """What had just been sent there goes on elsewhere, because its calls do not wait for the engine."""
    async with tiny_cluster(tiny_model, num_decode=2) as cluster:
        gate = Gate()
        blocked = asyncio.create_task(cluster.decode0.on_engine(gate.stop_here))
        await gate.reached()
        asking = asyncio.create_task(answers(cluster, oracle, range(4)))
        await cluster.until(lambda: cluster.decode0.num_posted > 1, "beside the next report a request waits there")
        cluster.decode0.watch_with(LATE_SOON)
        assert max(answer.num_attempts for answer in await asking) == 2
        gate.open()
        assert await blocked


async def test_the_only_worker_may_stand_for_longer_than_attempts_last(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model) as cluster:
        gate, worker = Gate(), cluster.prefill0
        blocked = asyncio.create_task(worker.on_engine(gate.stop_here))
        await gate.reached()
        worker.watch_with(LATE_SOON)
        asking = asyncio.create_task(answers(cluster, oracle, range(1)))
        # Each attempt leaves two functions that wait: it enters, and leaves again.
        await cluster.until(lambda: worker.num_posted > 2 * RETRY.max_attempts + 1, "it was tried more often than that")
        gate.open()
        assert await blocked
        assert (await asking)[0].num_attempts > RETRY.max_attempts
