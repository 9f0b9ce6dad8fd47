"""`moonpool serve --pipeline 2`: a long prompt at two workers, and what a kill -9 in the middle of it does."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from pathlib import Path

from e2e_service import BLOCK_TOKENS, Service, running, wait_until

from moonpool.base.cluster import CONDUCTOR_SERVICE
from moonpool.conductor.messages import DecisionRecord, Records
from moonpool.conductor.retries import RetryPolicy
from moonpool.engine.sequence import SamplingParams
from moonpool.frontend.choice import ChoiceRequest, ChoiceRunner
from moonpool.frontend.workers import Connections
from moonpool.worker.messages import WorkerStats

NUM_TOKENS = 1500
PROMPT = [100 + number * 7919 % 1800 for number in range(NUM_TOKENS)]


async def generate(service: Service, name: str) -> list[int]:
    """Answer the prompt for a tenant of this name, who finds nothing of the others' KV."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    root = name.encode().ljust(32, b"\0")
    request, tokens = ChoiceRequest(name, PROMPT, root, BLOCK_TOKENS, params, timeout_s=100), list[int]()
    connections = Connections(service.address("conductor"))
    try:
        async with aclosing(ChoiceRunner(request, connections, RetryPolicy()).batches()) as batches:
            async for batch in batches:
                tokens += [out.token for out in batch.tokens]
    finally:
        await connections.close()
    return tokens


def records(service: Service, name: str) -> list[DecisionRecord]:
    """Return the attempts at this request, the last one last."""
    found = service.ask(service.address("conductor"), CONDUCTOR_SERVICE, Records(limit=20))
    return [each for each in found if each.request_id == name]


def holds_pages(stats: WorkerStats) -> bool:
    return stats.free_pages < stats.num_pages


def test_a_stage_killed_in_the_middle_of_a_prompt_changes_no_token(tmp_path: Path) -> None:
    with running(tmp_path, "--prefill", "2", "--pipeline", "2", "--threads", "1") as service:
        expected = asyncio.run(generate(service, "undisturbed"))
        [record] = records(service, "undisturbed")
        assert record.candidates[0].stages, "two workers compute it"
        idle = lambda: not any(holds_pages(service.stats(f"prefill-{n}")) for n in (0, 1))  # noqa: E731
        wait_until(idle, 30, "both stages to end")
        answers: list[list[int]] = []
        asking = threading.Thread(target=lambda: answers.append(asyncio.run(generate(service, "disturbed"))))
        asking.start()
        wait_until(lambda: all(holds_pages(service.stats(f"prefill-{n}")) for n in (0, 1)), 30, "both stages to begin")
        [helper] = records(service, "disturbed")[-1].candidates[0].stages
        assert not answers
        service.role(helper).kill()
        asking.join(100)
        assert answers == [expected]
        last = records(service, "disturbed")[-1]
        assert last.attempt == 2
        assert last.candidates[0].stages == (), "the second attempt depends on one worker alone"
