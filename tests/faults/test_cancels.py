"""A client that goes away, at whatever moment, leaves nothing behind on any worker and no open put in the pool."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from severe import check_tokens
from tiny_cluster import Answer, Oracle, TinyCluster, greedy, prompt_of, tiny_cluster
from tiny_gates import Gate
from tiny_models import BLOCK_TOKENS

from moonpool.frontend.attempt import Attempt
from moonpool.worker.messages import RequestSpec

PROMPT = prompt_of(100)
PARAMS = greedy(40)

Arm = Callable[[TinyCluster, pytest.MonkeyPatch, Gate], Awaitable[None]]


async def waiting_for_pages(cluster: TinyCluster, patch: pytest.MonkeyPatch, gate: Gate) -> None:
    decode = cluster.decode0
    await decode.on_engine(lambda: decode.pages.reserve("test", 48))
    reserve = decode.role._reserve

    def reserve_and_tell(spec: RequestSpec) -> Any:
        gate.mark_reached()
        return reserve(spec)

    patch.setattr(decode.role, "_reserve", reserve_and_tell)


async def with_a_ticket(cluster: TinyCluster, patch: pytest.MonkeyPatch, gate: Gate) -> None:
    async def never(*_: object) -> None:
        gate.mark_reached()
        await asyncio.Event().wait()

    patch.setattr(Attempt, "_reply", never)


async def asking_the_pool(cluster: TinyCluster, patch: pytest.MonkeyPatch, gate: Gate) -> None:
    puller = cluster.prefill0.puller
    patch.setattr(puller, "count_stored", gate.around(puller.count_stored))


async def in_the_first_chunk(cluster: TinyCluster, patch: pytest.MonkeyPatch, gate: Gate) -> None:
    role = cluster.prefill0.role
    patch.setattr(role, "before_layer", gate.around(role.before_layer))


async def in_the_third_chunk(cluster: TinyCluster, patch: pytest.MonkeyPatch, gate: Gate) -> None:
    gate.at = 2 * 3 + 2  # three layers per chunk
    await in_the_first_chunk(cluster, patch, gate)


async def while_pieces_go_out(cluster: TinyCluster, patch: pytest.MonkeyPatch, gate: Gate) -> None:
    pieces = cluster.prefill0.pieces  # layers that wait go out together, so there may be one call only
    patch.setattr(pieces, "checksums", gate.around(pieces.checksums))


async def while_the_commit_is_checked(cluster: TinyCluster, patch: pytest.MonkeyPatch, gate: Gate) -> None:
    role = cluster.decode0.role
    patch.setattr(role, "_verify", gate.around(role._verify))


async def before_the_first_decode_step(cluster: TinyCluster, patch: pytest.MonkeyPatch, gate: Gate) -> None:
    role = cluster.decode0.role
    patch.setattr(role, "begin_step", gate.around(role.begin_step))


async def in_the_middle_of_decoding(cluster: TinyCluster, patch: pytest.MonkeyPatch, gate: Gate) -> None:
    gate.at = 20
    await before_the_first_decode_step(cluster, patch, gate)


async def while_a_decoded_block_is_put(cluster: TinyCluster, patch: pytest.MonkeyPatch, gate: Gate) -> None:
    pool, role = cluster.decode0.pool, cluster.decode0.role
    begin_step, steps = role.begin_step, itertools.count(1)

    def begin_step_or_wait(*args: Any) -> Any:
        # Or all tokens might be out before the block is put, or before the client leaves.
        gate.follow(is_due=next(steps) > 2 * BLOCK_TOKENS)
        return begin_step(*args)

    patch.setattr(pool, "write", gate.around(pool.write))
    patch.setattr(role, "begin_step", begin_step_or_wait)


STAGES: list[Arm] = [
    waiting_for_pages,
    with_a_ticket,
    asking_the_pool,
    in_the_first_chunk,
    in_the_third_chunk,
    while_pieces_go_out,
    while_the_commit_is_checked,
    before_the_first_decode_step,
    in_the_middle_of_decoding,
    while_a_decoded_block_is_put,
]


@pytest.mark.parametrize("arm", STAGES)
async def test_a_cancel_leaves_nothing_behind(
    tiny_model: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, arm: Arm
) -> None:
    async with tiny_cluster(tiny_model, max_batch_tokens=32) as cluster:
        gate = Gate()
        with monkeypatch.context() as patch:
            await arm(cluster, patch, gate)
            asking = asyncio.create_task(cluster.generate(PROMPT, PARAMS))
            await gate.reached()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            gate.open()
        decode = cluster.decode0
        await decode.on_engine(lambda: decode.pages.release("test"))
        await cluster.check_idle()
        answer = await cluster.generate(PROMPT, PARAMS)
        check_tokens(answer.tokens, await oracle(PROMPT, PARAMS), "whatever was left cached is right")


@pytest.mark.parametrize("after", [1, 2, 17, 33])
async def test_a_cancel_after_so_many_tokens(tiny_model: str, oracle: Oracle, after: int) -> None:
    async with tiny_cluster(tiny_model) as cluster:
        others = [asyncio.create_task(cluster.generate(prompt_of(50, seed), PARAMS)) for seed in (1, 2)]
        seen: list[int] = []

        def leave(answer: Answer) -> None:
            seen[:] = answer.tokens
            if len(seen) >= after:
                asking.cancel()

        asking: asyncio.Task[Any] = asyncio.create_task(cluster.generate(PROMPT, PARAMS, on_tokens=leave))
        with pytest.raises(asyncio.CancelledError):
            await asking
        check_tokens(seen, (await oracle(PROMPT, PARAMS))[: len(seen)])
        for seed, task in zip((1, 2), others, strict=True):
            check_tokens((await task).tokens, await oracle(prompt_of(50, seed), PARAMS), "others are not disturbed")
