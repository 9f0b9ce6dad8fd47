"""A pipelined prompt whose first blocks are in the pool: the stages pull their layers, and what is missing, damaged or
late costs computing, never a token. The conductor sends every prompt to both workers."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
from pipelines import LONG, NUM_BLOCKS, PIPELINE, check_pool, helper_of, leads, on_chunks
from severe import check_tokens
from tiny_cluster import (
    ALWAYS_PULLS,
    PAGE_NBYTES,
    ROOT,
    Answer,
    Oracle,
    TinyCluster,
    greedy,
    prompt_of,
    tiny_cluster,
)
from tiny_gates import Gate
from waiting import HANG_S

from moonpool.base.errors import InvalidInput
from moonpool.base.keys import chain_keys
from moonpool.base.object_header import unpack
from moonpool.conductor.records.store import RecordFilter
from moonpool.engine.stages import MAX_CHUNKS
from moonpool.worker.kv_link.pull import Puller, _PieceStream
from moonpool.worker.pipeline.stage_runner import StagedPrompt
from moonpool.worker.prefill import PrefillRole

PIPELINE = {**PIPELINE, "policy": replace(ALWAYS_PULLS, pipeline_min_tokens=1)}
PARAMS = greedy(8)
PROMPT = prompt_of(LONG, seed=21)
NUM_LAYERS = 3  # two of them at the first stage


class Computed:
    """Which tokens the stages have computed: the first token of each chunk, by the first layer of the stage."""

    def __init__(self, cluster: TinyCluster) -> None:
        self.starts: dict[int, list[int]] = {}
        on_chunks(cluster, lambda chunk, layers: self.starts.setdefault(layers.start, []).append(chunk.start))

    def check(self, first_token: int) -> None:
        """All stages have begun there, with the same chunks, and not with many small ones where less than expected came
        from the pool: for the 8 tokens behind the whole prefix chunks of one token are right, for 600 they are not."""
        first, *others = self.starts.values()
        assert others
        assert all(other == first for other in others)
        assert first[0] == first_token
        assert len(first) <= MAX_CHUNKS


async def decode_pages(cluster: TinyCluster, prompt: list[int]) -> list[bytes]:
    """Return the bytes of the prompt's full blocks at the decode worker."""
    worker = cluster.decode0

    def read() -> list[bytes]:
        pages = [worker.pages.page_of(key) for key in chain_keys(ROOT, prompt, 16)]
        return [b"" if page is None else worker.page_bytes(page) for page in pages]

    return await worker.on_engine(read)


async def store_prompt(cluster: TinyCluster) -> Answer:
    """Answer PROMPT, so that the pool has its blocks and no page has."""
    answer = await cluster.generate(PROMPT, PARAMS)
    await check_pool(cluster, PROMPT, NUM_BLOCKS)
    return answer


def pool_read_nbytes(cluster: TinyCluster) -> dict[str, int]:
    return {name: cluster.stats(name).pool_read_nbytes for name in ("prefill0", "prefill1")}


@pytest.mark.parametrize("shm", [True, False])
async def test_an_equal_prompt_is_read_and_not_computed(tiny_model: str, oracle: Oracle, shm: bool) -> None:
    async with tiny_cluster(tiny_model, num_prefill=2, shm=shm, **PIPELINE) as cluster:
        first = await store_prompt(cluster)
        assert first.prefills[0].pool_tokens == 0
        pages = await decode_pages(cluster, PROMPT)
        assert all(pages)
        await cluster.forget_pages()
        before, computed = pool_read_nbytes(cluster), Computed(cluster)
        again = await cluster.generate(PROMPT, PARAMS)
        check_tokens(again.tokens, first.tokens)
        check_tokens(again.tokens, await oracle(PROMPT, PARAMS))
        assert (sum(leads(cluster)), again.num_attempts) == (2, 1)
        reply = again.prefills[0]
        assert (reply.pool_tokens, reply.local_tokens) == (NUM_BLOCKS * 16, 0)
        assert reply.pool_nbytes == NUM_BLOCKS * PAGE_NBYTES
        assert 0 < reply.pull_s <= reply.compute_s
        computed.check(NUM_BLOCKS * 16)
        read = sorted(nbytes - before[name] for name, nbytes in pool_read_nbytes(cluster).items())
        layer_nbytes = NUM_BLOCKS * PAGE_NBYTES // NUM_LAYERS
        assert read == [layer_nbytes, 2 * layer_nbytes], "each stage has read its layers"
        assert await decode_pages(cluster, PROMPT) == pages
        record = cluster.conductor.state.records.find(RecordFilter(), 1)[-1]
        assert record.candidates[0].pulled_blocks == NUM_BLOCKS
        await cluster.until(lambda: record.pool_tokens == record.cached_tokens == NUM_BLOCKS * 16, "the record has it")


async def test_three_stages_agree(tiny_model: str, oracle: Oracle) -> None:
    """The one in the middle alone finds a damaged piece."""
    async with tiny_cluster(tiny_model, num_prefill=3, **PIPELINE | {"pipeline": 3}) as cluster:
        await store_prompt(cluster)
        await cluster.forget_pages()
        memory = cluster.object_memory(cluster.object_keys(PROMPT)[9])
        memory[unpack(memory).piece_offset(1)] ^= 1
        computed = Computed(cluster)
        answer = await cluster.generate(PROMPT, PARAMS)
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert answer.prefills[0].pool_tokens == 9 * 16
        assert (sum(leads(cluster)), len(computed.starts)) == (2, 3)
        computed.check(9 * 16)


async def test_a_shared_beginning_is_read_and_the_rest_is_put(tiny_model: str, oracle: Oracle) -> None:
    prompt = PROMPT[:333] + prompt_of(LONG - 333, seed=22)
    async with tiny_cluster(tiny_model, num_prefill=2, **PIPELINE) as cluster:
        await store_prompt(cluster)
        await cluster.forget_pages("prefill0", "prefill1")  # the decode worker has the first blocks: they are not sent
        computed = Computed(cluster)
        answer = await cluster.generate(prompt, PARAMS)
        check_tokens(answer.tokens, await oracle(prompt, PARAMS))
        assert answer.prefills[0].pool_tokens == 320
        computed.check(320)
        assert len(computed.starts[0]) >= 8, "the rest is cut into as many chunks as a whole prompt"
        await check_pool(cluster, prompt, NUM_BLOCKS)
        await cluster.forget_pages()
        answer = await cluster.generate(prompt, PARAMS)
        check_tokens(answer.tokens, await oracle(prompt, PARAMS))
        assert answer.prefills[0].pool_tokens == NUM_BLOCKS * 16


@pytest.mark.parametrize(("block", "layer"), [(0, 0), (7, 1), (20, 2), (36, 0)])
async def test_a_damaged_piece_makes_the_prompt_begin_before_it(
    tiny_model: str, oracle: Oracle, block: int, layer: int
) -> None:
    """One stage alone reads that layer; the other one begins there too, in pages that hold more."""
    async with tiny_cluster(tiny_model, num_prefill=2, **PIPELINE) as cluster:
        await store_prompt(cluster)
        pages = await decode_pages(cluster, PROMPT)
        await cluster.forget_pages()
        memory = cluster.object_memory(cluster.object_keys(PROMPT)[block])
        memory[unpack(memory).piece_offset(layer) + 5] ^= 0x10
        computed = Computed(cluster)
        answer = await cluster.generate(PROMPT, PARAMS)
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert (answer.prefills[0].pool_tokens, answer.num_attempts) == (block * 16, 1)
        assert sum(leads(cluster)) == 2
        computed.check(block * 16)
        assert (await decode_pages(cluster, PROMPT))[:block] == pages[:block]


@pytest.mark.parametrize("gone", [0, 11])
async def test_a_block_that_leaves_after_the_look_up_is_computed(
    tiny_model: str, oracle: Oracle, gone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiny_cluster(tiny_model, num_prefill=2, **PIPELINE) as cluster:
        await store_prompt(cluster)
        await cluster.forget_pages()
        count = Puller.count_stored

        def count_then_remove(puller: Puller, keys: list[bytes]) -> int:
            found = count(puller, keys)
            assert cluster.prefill0.store.remove_many([cluster.object_keys(PROMPT)[gone]], force=True) == [True]
            return found

        monkeypatch.setattr(Puller, "count_stored", count_then_remove)
        computed = Computed(cluster)
        answer = await cluster.generate(PROMPT, PARAMS)
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert answer.prefills[0].pool_tokens == gone * 16
        computed.check(gone * 16)
        await check_pool(cluster, PROMPT, NUM_BLOCKS)


def stop_pulls(cluster: TinyCluster, gate: Gate, monkeypatch: pytest.MonkeyPatch, *, first_layer: int) -> None:
    """Let the gate stop the pull of the stage with this first layer."""
    run = _PieceStream.run

    def gated(stream: _PieceStream) -> None:
        if stream._job.layers.start == first_layer:
            gate.stop_here()
        run(stream)

    monkeypatch.setattr(_PieceStream, "run", gated)


async def test_a_stage_that_dies_while_it_pulls_leaves_the_prompt_to_one_worker(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiny_cluster(tiny_model, num_prefill=2, **PIPELINE) as cluster:
        await store_prompt(cluster)
        await cluster.forget_pages()
        gate = Gate()
        stop_pulls(cluster, gate, monkeypatch, first_layer=0)
        work = asyncio.create_task(cluster.generate(PROMPT, PARAMS))
        await gate.reached()
        victim = helper_of(cluster)
        dying = asyncio.create_task(cluster.kill(victim))
        await cluster.until(lambda: not cluster.workers[victim].stages, "the dead worker's calls have ended")
        gate.open()
        await dying
        answer = await work
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert answer.num_attempts == 1, "nothing was handed over yet"
        assert answer.prefills[0].pool_tokens == NUM_BLOCKS * 16
        assert sum(leads(cluster)) == 1


async def test_a_stage_that_dies_after_its_pull_costs_an_attempt(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiny_cluster(tiny_model, num_prefill=2, **PIPELINE) as cluster:
        await store_prompt(cluster)
        await cluster.forget_pages()
        gate = Gate()
        for worker in (cluster.prefill0, cluster.prefill1):
            stages = worker.stage_service.tools.stages

            def gated(prompt: StagedPrompt, bounds: Any, start: Any = stages.start) -> None:
                if not prompt.is_last:
                    gate.stop_here()
                start(prompt, bounds)

            monkeypatch.setattr(stages, "start", gated)
        work = asyncio.create_task(cluster.generate(PROMPT, PARAMS))
        await gate.reached()
        victim = helper_of(cluster)
        dying = asyncio.create_task(cluster.kill(victim))
        await cluster.until(lambda: not cluster.workers[victim].stages, "the dead worker's calls have ended")
        gate.open()
        await dying
        answer = await work
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert answer.num_attempts == 2, "the last stage may have written already"
        assert cluster.decode0.stats().reserved_pages == 0


def num_late(cluster: TinyCluster) -> int:
    """Return how many pulls took too long."""
    failures = [cluster.stats(name).pull_failures for name in ("prefill0", "prefill1")]
    return sum(each.get("deadline_exceeded", 0) for each in failures)


@pytest.mark.parametrize("num_pages", [96, 48])
@pytest.mark.parametrize("first_layer", [0, 2])
async def test_a_pull_that_takes_too_long_is_left_behind(
    tiny_model: str, oracle: Oracle, num_pages: int, first_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages may still be written to, so the prompt begins in others; if there are none, one worker computes it."""
    late_tokens = math.ceil(NUM_BLOCKS * 16 * (2 if first_layer == 0 else 1) / NUM_LAYERS)  # the late stage's work
    monkeypatch.setattr(PrefillRole, "pull_limit_s", lambda _, tokens: 0.05 if tokens == late_tokens else HANG_S)
    async with tiny_cluster(tiny_model, num_prefill=2, prefill_pages=num_pages, **PIPELINE) as cluster:
        await store_prompt(cluster)
        await cluster.forget_pages()
        gate = Gate()
        stop_pulls(cluster, gate, monkeypatch, first_layer=first_layer)
        work = asyncio.create_task(cluster.generate(PROMPT, PARAMS))
        await gate.reached()
        if num_pages == 96:
            check_tokens((await work).tokens, await oracle(PROMPT, PARAMS))
            assert sum(leads(cluster)) == 2
        else:
            await cluster.until(lambda: num_late(cluster) == 1, "the pull is left behind")
        gate.open()
        answer = await work
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert answer.num_attempts == 1
        assert num_late(cluster) == 1


async def test_a_client_that_leaves_while_stages_pull(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiny_cluster(tiny_model, num_prefill=2, **PIPELINE) as cluster:
        await store_prompt(cluster)
        await cluster.forget_pages()
        gate = Gate()
        stop_pulls(cluster, gate, monkeypatch, first_layer=0)
        work = asyncio.create_task(cluster.generate(PROMPT, PARAMS))
        await gate.reached()
        [stage] = cluster.workers[helper_of(cluster)].stages
        with pytest.raises(InvalidInput):
            await stage.start(16, 1)  # its pull has not ended
        work.cancel()
        await asyncio.wait((work,))
        await cluster.until(
            lambda: not any(worker.stages for worker in cluster.workers.values()), "all stages have ended"
        )
        assert any(worker.pages.owned for worker in cluster.workers.values()), "the pull keeps its pages"
        gate.open()
        await cluster.check_idle()
        answer = await cluster.generate(PROMPT, PARAMS)
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert answer.prefills[0].pool_tokens == NUM_BLOCKS * 16, "the pool does not rest because a client left"


async def test_a_pool_that_rests_costs_nothing_but_computing(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model, num_prefill=2, **PIPELINE) as cluster:
        await store_prompt(cluster)
        await cluster.forget_pages()
        for worker in (cluster.prefill0, cluster.prefill1):
            worker.puller.rest()
        computed = Computed(cluster)
        answer = await cluster.generate(PROMPT, PARAMS)
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        computed.check(0)
