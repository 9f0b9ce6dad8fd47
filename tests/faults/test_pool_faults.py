"""A pool that lies, forgets, fills up or is gone costs time, never a token and never a request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from severe import check_tokens
from tiny_cluster import Answer, Oracle, TinyCluster, greedy, prompt_of, tiny_cluster
from tiny_gates import Gate
from waiting import HANG_S

from moonpool.base.clock import VirtualClock
from moonpool.base.errors import DeadlineExceeded, MoonpoolError, NoSpace
from moonpool.base.object_header import ObjectHeader, ObjectKind, Piece, unpack
from moonpool.store import Store
from moonpool.store.client.read_session import PieceReads, ReadSession
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine
from moonpool.worker.kv_link.pool import PoolHealth

PROMPT = prompt_of(90)  # five full blocks and a partial one
PARAMS = greedy(12)


async def ask(cluster: TinyCluster, oracle: Oracle, prompt: list[int] = PROMPT) -> Answer:
    answer = await cluster.generate(prompt, PARAMS)
    check_tokens(answer.tokens, await oracle(prompt, PARAMS))
    await cluster.check_idle()
    return answer


async def warm_pool_only(cluster: TinyCluster, oracle: Oracle) -> list[bytes]:
    """Afterwards PROMPT's full blocks are in the pool and in no worker; their keys."""
    await ask(cluster, oracle)
    await cluster.forget_pages()
    keys = cluster.object_keys(PROMPT)
    assert cluster.master.state.exist(keys, time.monotonic()) == [True] * 5
    return keys


def is_stored(cluster: TinyCluster, key: bytes) -> bool:
    return cluster.master.state.lookup([key], time.monotonic())[0] is not None


async def check_not_read_again(cluster: TinyCluster, oracle: Oracle, keys: list[bytes], block: int) -> None:
    """The replica of this block is never handed out again. If the pull had ended before its prompt was in a step, the
    block was put anew when it was computed."""
    is_there = is_stored(cluster, keys[block])
    await cluster.forget_pages()
    again = await ask(cluster, oracle)
    assert again.prefills[0].pool_tokens == (80 if is_there else block * 16)


@pytest.mark.parametrize(("block", "piece"), [(0, 0), (3, 2), (4, 1)])
async def test_a_bit_flipped_in_the_pool_ends_the_pull_there(
    tiny_model: str, oracle: Oracle, block: int, piece: int
) -> None:
    async with tiny_cluster(tiny_model) as cluster:
        keys = await warm_pool_only(cluster, oracle)
        memory = cluster.object_memory(keys[block])
        memory[unpack(memory).piece_offset(piece) + 5] ^= 0x10
        answer = await ask(cluster, oracle)
        assert answer.num_attempts == 1
        assert answer.prefills[0].pool_tokens == block * 16, "what lies before it is used"
        assert cluster.stats("prefill0").pull_failures == {"corrupt": 1}
        await check_not_read_again(cluster, oracle, keys, block)
        assert cluster.stats("prefill0").pull_failures == {"corrupt": 1}, "a miss now, not a failure"


async def test_a_damaged_header_is_as_bad_as_damaged_kv(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model) as cluster:
        keys = await warm_pool_only(cluster, oracle)
        cluster.object_memory(keys[2])[30] ^= 1
        answer = await ask(cluster, oracle)
        assert answer.prefills[0].pool_tokens == 32
        assert cluster.stats("prefill0").pull_failures == {"corrupt": 1}
        await check_not_read_again(cluster, oracle, keys, 2)


def forge(memory: memoryview, **changes: Any) -> None:
    """Writes another header, whole and with a right checksum, over the one that is there."""
    header = unpack(memory)
    packed = ObjectHeader(**{**msgspec.structs.asdict(header), **changes}).pack()
    memory[: len(packed)] = packed


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"identity": bytes(reversed(range(32)))}, "identity_mismatch"),
        ({"key": bytes(36)}, "stale_generation"),
        ({"valid_tokens": 15}, "corrupt"),
        ({"kind": ObjectKind.OPAQUE}, "corrupt"),
        ({"pieces": (Piece(2048, 0), Piece(2048, 0))}, "corrupt"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else value,
)
async def test_something_else_under_the_right_key_is_refused(
    tiny_model: str, oracle: Oracle, changes: dict[str, Any], code: str
) -> None:
    async with tiny_cluster(tiny_model) as cluster:
        keys = await warm_pool_only(cluster, oracle)
        forge(cluster.object_memory(keys[1]), **changes)
        answer = await ask(cluster, oracle)
        assert answer.num_attempts == 1
        assert answer.prefills[0].pool_tokens == 16
        assert cluster.stats("prefill0").pull_failures == {code: 1}


@pytest.mark.parametrize("gone", [0, 2])
async def test_a_block_that_leaves_between_look_up_and_pull(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    async with tiny_cluster(tiny_model) as cluster:
        keys = await warm_pool_only(cluster, oracle)
        puller, store = cluster.prefill0.puller, cluster.prefill0.store
        count_stored = puller.count_stored

        def count_then_remove(chain_keys: list[bytes]) -> int:
            found = int(count_stored(chain_keys))
            assert store.remove_many([keys[gone]], force=True) == [True]
            return found

        monkeypatch.setattr(puller, "count_stored", count_then_remove)
        answer = await ask(cluster, oracle)
        assert answer.num_attempts == 1
        assert answer.prefills[0].pool_tokens == gone * 16
        assert cluster.stats("prefill0").pull_failures == {"not_found": 1}


async def test_a_block_whose_space_is_reused_while_it_is_read(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pieces were right when they were read one by one; the last look at the header tells."""
    async with tiny_cluster(tiny_model) as cluster:
        keys = await warm_pool_only(cluster, oracle)
        memory, finish = cluster.object_memory(keys[3]), PieceReads.finish

        def reuse_then_finish(pieces: PieceReads, sessions: Sequence[ReadSession]) -> list[MoonpoolError | None]:
            for session in sessions:
                if session.info.key == keys[3]:
                    forge(memory, generation=session.info.replicas[0].generation + 1)
            return finish(pieces, sessions)

        monkeypatch.setattr(PieceReads, "finish", reuse_then_finish)
        answer = await ask(cluster, oracle)
        assert answer.prefills[0].pool_tokens == 48
        assert cluster.stats("prefill0").pull_failures == {"stale_generation": 1}


async def test_without_a_pool_requests_go_on_and_find_the_next_one(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = Waits(monkeypatch)
    async with tiny_cluster(tiny_model, pool_timeout_s=600.0) as cluster:
        await warm_pool_only(cluster, oracle)
        await cluster.stop_pool()
        started_s = time.monotonic()
        for seed in range(3):
            answer = await cluster.generate(prompt_of(60, seed), PARAMS)
            check_tokens(answer.tokens, await oracle(prompt_of(60, seed), PARAMS))
            assert (answer.num_attempts, answer.prefills[0].pool_tokens) == (1, 0)
        assert time.monotonic() - started_s < HANG_S / 2, "nobody waits for the pool"
        assert waited.counts.total() == 0, "a pool that is away is a miss, not a wait"
        await cluster.until(lambda: cluster.stats("decode0").pull_failures.get("breaker_open", 0) > 0, "it is counted")
        assert cluster.stats("prefill0").pull_failures.keys() == {"breaker_open"}

        await cluster.start_pool()
        await until_found(cluster)
        prompt = await until_stored(cluster, oracle)
        await cluster.forget_pages()
        again = await ask(cluster, oracle, prompt)
        stats = cluster.stats("prefill0")
        assert again.prefills[0].pool_tokens == 64, f"the new pool is used without a restart: {stats}"


async def until_found(cluster: TinyCluster) -> None:
    """The probes of all workers have found the pool's master."""
    await cluster.until(
        lambda: all(worker.store.wait_for_master(0.0) for worker in cluster.workers.values()), "the master is back"
    )


async def until_stored(cluster: TinyCluster, oracle: Oracle) -> list[int]:
    """A prompt whose full blocks are in the pool. The first puts may come before the node has offered its memory."""
    give_up_s = time.monotonic() + HANG_S
    for seed in itertools.count(9):
        prompt = prompt_of(80, seed)
        await ask(cluster, oracle, prompt)
        keys = cluster.object_keys(prompt)[:4]
        if all(cluster.master.state.exist(keys, time.monotonic())):
            return prompt
        assert time.monotonic() < give_up_s, f"nothing is put into the new pool: {cluster.stats('prefill0')}"
    raise AssertionError("unreachable")


async def test_a_master_that_hangs_costs_no_request_its_timeout(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for hand-offs, which leave by the same thread as puts: the breaker ends every wait."""
    clock, waited = VirtualClock(), Waits(monkeypatch)
    async with tiny_cluster(tiny_model, pool_silence_s=1.0, pool_timeout_s=600.0, pool_rest_s=10.0) as cluster:
        for worker in cluster.workers.values():
            worker.pool_health._clock = clock
        await warm_pool_only(cluster, oracle)
        await cluster.stop_pool()
        with mute_server(cluster.prefill0.config.master_address.removeprefix("unix:")):
            for turn in range(3):
                prompts = [prompt_of(60, 3 * turn + n) for n in range(3)]
                answers = await asyncio.gather(*(cluster.generate(prompt, PARAMS) for prompt in prompts))
                check_tokens(
                    [answer.tokens for answer in answers], [await oracle(prompt, PARAMS) for prompt in prompts]
                )
                assert [answer.num_attempts for answer in answers] == [1, 1, 1]
        assert waited.counts.total() == 0, "nobody has waited until a deadline, so the pool is not left alone either"
        assert cluster.stats("prefill0").pull_failures["breaker_open"] > 0

        await cluster.start_pool()
        await until_found(cluster)
        prompt = await until_stored(cluster, oracle)
        await cluster.forget_pages()
        assert (await ask(cluster, oracle, prompt)).prefills[0].pool_tokens == 64


class Waits:
    """Counts, for each worker, how often somebody waited for the pool in vain."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[PoolHealth] = Counter()
        record_error = PoolHealth.record_error

        def count_then_record(health: PoolHealth, error: MoonpoolError | None) -> None:
            self.counts[health] += isinstance(error, DeadlineExceeded)
            record_error(health, error)

        patch.setattr(PoolHealth, "record_error", count_then_record)


@contextlib.contextmanager
def mute_server(path: str) -> Iterator[None]:
    """Listen at the path and never answer. The kernel still completes connections, as it does for a stopped process."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(1024)
        yield


def stop_reads(patch: pytest.MonkeyPatch, gate: Gate, key: bytes) -> None:
    """Stops before pieces of the object with that key are read; other pieces go on."""
    start_reads = PieceReads.start

    def stop_or_read(pieces: PieceReads, reads: Sequence[tuple[ReadSession, int, Any]], num_ahead: int) -> Any:
        if any(session.info.key == key for session, _, _ in reads):
            gate.stop_here()
        return start_reads(pieces, reads, num_ahead)

    patch.setattr(PieceReads, "start", stop_or_read)


async def test_a_pool_that_dies_under_a_pull(tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tiny_cluster(tiny_model) as cluster:
        keys = await warm_pool_only(cluster, oracle)
        gate = Gate()  # inside the first layer
        stop_reads(monkeypatch, gate, keys[2])
        asking = asyncio.create_task(cluster.generate(PROMPT, PARAMS))
        await gate.reached()
        await cluster.stop_pool()
        gate.open()
        answer = await asking
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert answer.num_attempts == 1
        assert answer.prefills[0].pool_tokens < 80
        assert cluster.stats("prefill0").pull_failures["peer_lost"] >= 1
        await cluster.start_pool()


async def test_a_pull_that_takes_too_long_is_left_behind(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request computes its prompt elsewhere; what the late puller still writes, garbage here, touches nothing."""
    async with tiny_cluster(tiny_model, pull_timeout_s=0.5) as cluster:
        keys = await warm_pool_only(cluster, oracle)
        gate = Gate()
        stop_reads(monkeypatch, gate, keys[2])
        asking = asyncio.create_task(cluster.generate(PROMPT, PARAMS))
        await gate.reached()
        piece = cluster.object_memory(keys[2])[4096 : 4096 + 2048]
        piece[:] = b"?" * len(piece)
        answer = await asking
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS))
        assert (answer.num_attempts, answer.prefills[0].pool_tokens) == (1, 0)
        assert cluster.stats("prefill0").pull_failures == {"deadline_exceeded": 1}
        assert [len(pages) for pages in cluster.prefill0.pages.owned.values()] == [5], "the puller may write there"
        gate.open()
        await cluster.check_idle()
        assert (await ask(cluster, oracle)).prefills[0].local_tokens == 80
        await cluster.forget_pages("decode0")
        assert (await ask(cluster, oracle)).prefills[0].local_tokens == 80


async def test_a_pool_full_of_pinned_objects(tiny_model: str, oracle: Oracle) -> None:
    async with tiny_cluster(tiny_model, dram_nbytes=64 * 1024) as cluster:
        with TransferEngine(TransferConfig(run_dir=cluster.prefill0.config.run_dir, tcp_host=None)) as engine:
            with Store(cluster.prefill0.config.master_address, engine=engine) as client:
                await asyncio.to_thread(_fill_and_pin, client)
                for seed in range(2):
                    answer = await ask(cluster, oracle, prompt_of(90, seed))
                    assert (answer.num_attempts, answer.prefills[0].pool_tokens) == (1, 0)
                assert cluster.stats("prefill0").pull_failures == {"no_space": 10}
                assert cluster.stats("decode0").pull_failures == {"no_space": 2}


def _fill_and_pin(client: Store) -> None:
    with contextlib.suppress(NoSpace):
        for number in range(1000):
            client.put(b"pinned %d" % number, bytes(4096), pinned=True)
