"""Hand-offs from prefill to decode: the bytes that arrive are the bytes that left, or the request starts over."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from severe import check_tokens
from tiny_cluster import Answer, Oracle, TinyCluster, greedy, prompt_of, tiny_cluster
from tiny_gates import Gate, Hold

from moonpool.base.errors import MoonpoolError, StaleGeneration
from moonpool.engine.sequence import SamplingParams
from moonpool.transfer.transports.base import RemoteSegment
from moonpool.transfer.transports.shm.transport import ShmRemote
from moonpool.worker.kv_link.push import Push
from moonpool.worker.messages import TokenOut

PROMPT = prompt_of(70)
PARAMS = greedy(20)


def on_writes(
    patch: pytest.MonkeyPatch, segment: str, around: Callable[[Callable[[Sequence[Any]], None], Sequence[Any]], None]
) -> None:
    """Calls `around(write, buffers)` for every write to that segment, on the writer's thread."""
    write_from = ShmRemote.write_from

    def hooked(remote: ShmRemote, offset: int, buffers: Sequence[Any], **options: Any) -> None:
        if remote._descriptor.name == segment:
            around(lambda sent: write_from(remote, offset, sent, **options), buffers)
        else:
            write_from(remote, offset, buffers, **options)

    patch.setattr(ShmRemote, "write_from", hooked)
    patch.setattr(ShmRemote, "write_many", RemoteSegment.write_many)  # one after the other


def flipped(buffers: Sequence[Any], bit: int) -> list[bytearray]:
    """A copy with one bit changed."""
    [copy] = [bytearray(buffer) for buffer in buffers]
    copy[bit // 8 % len(copy)] ^= 1 << bit % 8
    return [copy]


class PageComparer:
    """At every commit, compares all pages of the prompt on both sides, byte for byte."""

    def __init__(self, cluster: TinyCluster, patch: pytest.MonkeyPatch) -> None:
        self.cluster = cluster
        self.equal: list[list[bool]] = []
        self.num_present: list[int] = []
        self.transports: set[str] = set()
        commit = Push._commit

        def compare_then_commit(
            push: Push, first: TokenOut, num_tokens: int, on_done: Callable[[MoonpoolError | None], None]
        ) -> None:
            self._compare(push)
            commit(push, first, num_tokens, on_done)

        patch.setattr(Push, "_commit", compare_then_commit)

    def _compare(self, push: Push) -> None:
        ours, theirs = self.cluster.prefill0, self.cluster.decode0
        pairs = zip(push._pages, push._ticket.pages, strict=True)
        self.equal.append([ours.page_bytes(a) == theirs.page_bytes(b) for a, b in pairs])
        self.num_present.append(push._ticket.num_present_blocks)
        assert push._remote is not None
        self.transports.add(push._remote.transport)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_every_page_arrives_byte_for_byte(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    # Chunks of 40 tokens end inside blocks of 16.
    async with tiny_cluster(tiny_model, shm=transport == "shm", max_batch_tokens=40) as cluster:
        comparer = PageComparer(cluster, monkeypatch)

        async def ask(prompt: list[int]) -> Answer:
            answer = await cluster.generate(prompt, PARAMS)
            check_tokens(answer.tokens, await oracle(prompt, PARAMS))
            return answer

        first = await ask(PROMPT)
        await ask(prompt_of(64, seed=1))  # no partial block
        await ask([7])
        await ask(PROMPT[:40] + prompt_of(50, seed=2))  # two blocks are there already, on both sides
        await cluster.forget_pages("decode0")
        await ask(PROMPT)  # prefill has all of it, decode nothing
        await cluster.forget_pages()
        pulled = await ask(PROMPT + first.tokens + prompt_of(9, seed=3))  # a second turn, warm from the pool alone
        assert pulled.prefills[0].pool_tokens == 80, "the block that decoding completed came from the pool too"
        await cluster.forget_pages("prefill0")
        await ask(PROMPT + first.tokens)  # pulled here, present there

        assert comparer.equal == [[True] * n for n in (5, 4, 1, 6, 5, 7, 6)]
        assert comparer.num_present == [0, 0, 0, 2, 0, 0, 5]
        assert comparer.transports == {transport}
        await cluster.check_idle()
        assert cluster.stats("prefill0").pull_failures == cluster.stats("decode0").pull_failures == {}


@pytest.mark.parametrize(("prefill_pages", "decode_pages"), [(7, 60), (60, 7)])
async def test_workers_need_not_have_the_same_number_of_pages(
    tiny_model: str, oracle: Oracle, prefill_pages: int, decode_pages: int
) -> None:
    async with tiny_cluster(tiny_model, prefill_pages=prefill_pages, decode_pages=decode_pages) as cluster:
        prompts = [prompt_of(70, seed) for seed in range(12)]
        answers = await asyncio.gather(*(cluster.generate(prompt, PARAMS) for prompt in prompts))
        check_tokens([answer.tokens for answer in answers], [await oracle(prompt, PARAMS) for prompt in prompts])


@pytest.mark.parametrize("index", [0, 7, 14])  # first piece; one in between; last layer of the partial block
async def test_a_bit_flipped_on_the_way_is_found_at_commit(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    """Layers that wait are written together, so the number of writes differs, but not that of bytes."""
    sent_nbytes, target = 0, -1

    def tamper(write: Callable[[Sequence[Any]], None], buffers: Sequence[Any]) -> None:
        nonlocal sent_nbytes
        start, sent_nbytes = sent_nbytes, sent_nbytes + len(buffers[0])
        write(flipped(buffers, 8 * (target - start)) if start <= target < sent_nbytes else buffers)

    async with tiny_cluster(tiny_model, num_prefill=2) as cluster:
        on_writes(monkeypatch, "decode0/kv", tamper)
        await cluster.generate(prompt_of(len(PROMPT), seed=99), PARAMS)
        assert sent_nbytes > 0
        target = sent_nbytes + sent_nbytes * index // 15
        answer = await cluster.generate(PROMPT, PARAMS)
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert answer.num_attempts == 2
        await cluster.check_idle()
        assert cluster.stats("decode0").pull_failures["corrupt"] == 1


@pytest.mark.parametrize("at", [1, 4])  # opened and nothing written yet; in the middle
async def test_a_prefill_worker_that_dies_while_it_writes(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Its successor gets other pages or a newer generation, and what the dead one's last write does is nothing."""
    gate, late = Gate(at), asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def write_or_hang(write: Callable[[Sequence[Any]], None], buffers: Sequence[Any]) -> None:
        is_last = gate.stop_here()
        try:
            write(flipped(buffers, 99) if is_last else buffers)
        except MoonpoolError as error:
            if is_last:
                loop.call_soon_threadsafe(late.set_result, error)
            raise

    async with tiny_cluster(tiny_model, num_prefill=2, decode_pages=6) as cluster:
        on_writes(monkeypatch, "decode0/kv", write_or_hang)
        verify = cluster.decode0.role._verify

        def verify_after_the_late_write(*args: Any) -> bool:
            gate.open()
            asyncio.run_coroutine_threadsafe(asyncio.wait_for(late, 5), loop).result()
            return bool(verify(*args))

        monkeypatch.setattr(cluster.decode0.role, "_verify", verify_after_the_late_write)
        asking = asyncio.create_task(cluster.generate(PROMPT, PARAMS))
        await gate.reached()
        # Not by what it computes: the prompt may be computed already, and only its last pieces be under way.
        victim = next(name for name, worker in cluster.workers.items() if worker.is_handing_off())
        assert cluster.stats("decode0").reserved_pages == 5
        await cluster.kill(victim)
        answer = await asking
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert answer.num_attempts == 2
        assert isinstance(late.result(), StaleGeneration)


async def test_a_prefill_worker_that_dies_while_its_commit_is_checked(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    async with tiny_cluster(tiny_model, num_prefill=2) as cluster:
        role = cluster.decode0.role
        monkeypatch.setattr(role, "_verify", gate.around(role._verify))
        asking = asyncio.create_task(cluster.generate(PROMPT, PARAMS))
        await gate.reached()
        await cluster.kill(next(name for name, worker in cluster.workers.items() if worker.is_handing_off()))
        await cluster.until(lambda: not role.streams or len(role.streams) > 1, "the front end has given up")
        gate.open()
        answer = await asking
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert answer.num_attempts == 2
        await cluster.check_idle()
        gc.collect()  # tasks tell of errors that nobody looked at when they are collected
        cluster.check_engines()


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_worker_that_dies_between_the_first_token_and_the_commit(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """The client has its first token already, and gets each of the others once."""
    gate, commit = Gate(), Push._commit
    monkeypatch.setattr(Push, "_commit", gate.around(commit))
    async with tiny_cluster(tiny_model, num_prefill=2, num_decode=2) as cluster:
        seen = asyncio.Event()
        asking = asyncio.create_task(cluster.generate(PROMPT, PARAMS, on_tokens=lambda _: seen.set()))
        await gate.reached()
        await cluster.until(seen.is_set, "the client has its first token")
        holds = cluster.prefill0 if cluster.prefill0.is_handing_off() else cluster.prefill1
        answers = next(name for name in ("decode0", "decode1") if cluster.workers[name].role.streams)
        await cluster.kill(holds.config.name if victim == "prefill" else answers)
        gate.open()
        answer = await asking
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert answer.num_attempts == 2
        await cluster.check_idle()


@pytest.mark.parametrize("after", [1, 7])
async def test_a_decode_worker_that_dies_with_the_tokens(tiny_model: str, oracle: Oracle, after: int) -> None:
    """Sampled tokens are a function of seed and position: a replanned request goes on with the same ones."""
    params = SamplingParams(max_tokens=40, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)
    async with tiny_cluster(tiny_model, num_decode=2) as cluster:
        undisturbed = await cluster.generate(PROMPT, params)
        assert undisturbed.num_attempts == 1
        decoders = {name: cluster.workers[name] for name in ("decode0", "decode1")}
        hold, seen = Hold(decoders.values(), after), asyncio.Event()

        def look(answer: Answer) -> None:
            if len(answer.tokens) >= after:
                seen.set()

        asking = asyncio.create_task(cluster.generate(PROMPT, params, on_tokens=look))
        await cluster.until(seen.is_set, "the client has seen tokens")
        [victim] = [name for name, worker in decoders.items() if worker.role.streams]
        await cluster.kill(victim)
        hold.release()
        disturbed = await asking
        assert disturbed.num_attempts == 2
        check_tokens(disturbed.tokens, undisturbed.tokens)
        check_tokens(disturbed.tokens, await oracle(PROMPT, params))
        other = SamplingParams(max_tokens=40, temperature=0.9, top_p=0.95, seed=12, ignore_eos=True)
        assert await oracle(PROMPT, other) != disturbed.tokens, "the seed matters"
