"""`moonpool serve --pipeline 2`: long prompts at two workers give the tokens that one engine gives, also
when a stage gets a kill -9 in the middle of a prompt.

`--pipeline-min-tokens` says which prompts are long. Left to the prediction, one worker is really faster where the host
takes a processor away for a while; tests/conductor/test_pipeline_choice.py has the prediction."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing

import pytest
from e2e_service import BLOCK_TOKENS, Service, running
from random_model import small_model, token_prompt
from waiting import HANG_S, wait_until

from moonpool.conductor.retries import RetryPolicy
from moonpool.engine.config import EngineConfig
from moonpool.engine.load import load_engine
from moonpool.engine.sequence import SamplingParams
from moonpool.engine.stages import chunk_bounds
from moonpool.frontend.choice import ChoiceRequest, ChoiceRunner
from moonpool.frontend.workers import Connections
from moonpool.worker.messages import WorkerStats

NUM_TOKENS = 1500
PROMPT = token_prompt(NUM_TOKENS)
MIN_TOKENS = 500
PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_model(tmp_path_factory.mktemp("model") / "small"))


@pytest.fixture(scope="module")
def service(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two prefill workers of one thread each, which compute long prompts together."""
    options = ("--prefill", "2", "--pipeline", "2", "--pipeline-min-tokens", str(MIN_TOKENS), "--threads", "1")
    with running(tmp_path_factory.mktemp("pipeline"), "--model", model, "--random-weights", *options) as service:
        yield service


async def generate(service: Service, tenant: str, prompt: list[int], name: str | None = None) -> list[int]:
    """Answer the prompt for a tenant, who finds nothing of the others' KV. The request has the tenant's name, or this
    one."""
    root, name = tenant.encode().ljust(32, b"\0"), name or tenant
    request, tokens = ChoiceRequest(name, prompt, root, BLOCK_TOKENS, PARAMS, timeout_s=HANG_S), list[int]()
    connections = Connections(service.address("conductor"))
    try:
        async with aclosing(ChoiceRunner(request, connections, RetryPolicy()).batches()) as batches:
            async for batch in batches:
                tokens += [out.token for out in batch.tokens]
    finally:
        await connections.close()
    return tokens


def holds_pages(stats: WorkerStats) -> bool:
    return stats.free_pages < stats.num_pages


def wait_idle(service: Service) -> None:
    idle = lambda: not any(holds_pages(service.stats(f"prefill-{n}")) for n in (0, 1))  # noqa: E731
    wait_until(idle, "both stages to end")


def test_two_workers_together_answer_as_one_engine(service: Service, model: str) -> None:
    """Also with a number of tokens that no chunk divides."""
    engine = load_engine(model, EngineConfig(num_pages=32), random_weights=True)
    for name, prompt in (("even", PROMPT), ("odd", PROMPT[:1111])):
        assert asyncio.run(generate(service, name, prompt)) == engine.generate([prompt], PARAMS)[0].tokens
        wait_idle(service)
        [record] = service.records(name)
        assert len(record.candidates[0].stages) == 1, "two workers compute it"
        assert len(chunk_bounds(len(prompt), record.candidates[0].chunk_tokens)) >= 8


def test_a_short_prompt_is_computed_by_one_worker(service: Service) -> None:
    asyncio.run(generate(service, "short", PROMPT[: MIN_TOKENS - 1]))
    [record] = service.records("short")
    assert record.candidates[0].stages == ()


def test_a_long_prompt_reuses_what_the_pool_has(service: Service, model: str) -> None:
    """The stages pull the beginning that two prompts share, and compute the rest together."""
    engine, shared = load_engine(model, EngineConfig(num_pages=32), random_weights=True), 7 * BLOCK_TOKENS + 5
    other = PROMPT[:shared] + PROMPT[: NUM_TOKENS - shared]
    expected = engine.generate([other], PARAMS)[0].tokens
    asyncio.run(generate(service, "document", PROMPT))
    wait_idle(service)  # the blocks are in the pool
    assert asyncio.run(generate(service, "document", other, "other")) == expected
    wait_idle(service)
    [record] = service.records("other")
    assert record.cached_tokens == record.pool_tokens == 7 * BLOCK_TOKENS
    assert len(record.candidates[0].stages) == 1, "two workers compute the rest"
    assert record.candidates[0].pulled_blocks == 7


def test_a_stage_killed_in_the_middle_of_a_prompt_changes_no_token(service: Service) -> None:
    expected = asyncio.run(generate(service, "undisturbed", PROMPT))
    wait_idle(service)
    answers: list[list[int]] = []
    asking = threading.Thread(target=lambda: answers.append(asyncio.run(generate(service, "disturbed", PROMPT))))
    asking.start()
    wait_until(lambda: bool(service.records("disturbed")), "a decision")
    [helper] = service.records("disturbed")[-1].candidates[0].stages
    wait_until(lambda: all(holds_pages(service.stats(f"prefill-{n}")) for n in (0, 1)), "both stages to begin")
    assert not answers
    service.role(helper).kill()
    asking.join(HANG_S)
    assert answers == [expected]
    last = service.records("disturbed")[-1]
    assert last.attempt == 2
    assert last.candidates[0].stages == (), "the second attempt depends on one worker alone"


def test_an_equal_long_prompt_is_not_computed_again(service: Service) -> None:
    """Next to nothing is left of it, so one worker computes that."""
    num_stored = service.status().pool_blocks
    tokens = asyncio.run(generate(service, "twice", PROMPT))
    wait_until(lambda: service.status().pool_blocks >= num_stored + NUM_TOKENS // BLOCK_TOKENS, "all are stored")
    assert asyncio.run(generate(service, "twice", PROMPT, "again")) == tokens
    [record] = service.records("again")
    assert record.cached_tokens == NUM_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
    assert record.candidates[0].stages == ()
