"""The first token is the client's when the prefill worker has it. The hand-off of the KV goes on meanwhile, and what
happens to it then changes no token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from frontend_cluster import BLOCK_TOKENS, HANDOFF_S, MODEL, ToyCluster, expected
from letter_codec import LetterCodec
from severe import check_tokens
from waiting import until

from moonpool.base.clock import Deadline
from moonpool.base.cluster import WorkerRole
from moonpool.base.errors import Corrupt, MoonpoolError, PeerLost
from moonpool.base.keys import chain_keys
from moonpool.conductor.messages import Route
from moonpool.conductor.retries import Loss
from moonpool.engine.sequence import SamplingParams
from moonpool.frontend.attempt import LOST, Attempt
from moonpool.frontend.workers import Connections
from moonpool.worker.messages import RequestSpec

PROMPT = "once upon a time"
TEXT, REASON = expected(PROMPT, 30, seed=12)
BODY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "seed": 12, "max_tokens": 30}


class Reading:
    """A streamed completion; `text` is what the client has so far."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.text, self.reason = "", ""
        self.task = asyncio.create_task(self._read(http))

    async def _read(self, http: httpx.AsyncClient) -> None:
        async with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    self.text += choice["text"]
                    self.reason = choice["finish_reason"] or self.reason

    async def whole(self) -> None:
        await self.task
        check_tokens([self.text, self.reason], [TEXT, REASON])


@asynccontextmanager
async def reading(cluster: ToyCluster) -> AsyncIterator[Reading]:
    """A client that has its first token while the hand-off has not begun."""
    cluster.prefill.may_hand_over.clear()
    async with cluster.client() as http:
        client = Reading(http)
        await until(lambda: client.text or client.task.done(), "the first token has come")
        assert client.text == TEXT[:1]
        yield client
    await cluster.until_idle()


async def test_the_first_token_does_not_wait_for_the_hand_off(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path) as cluster, reading(cluster) as client:
        assert cluster.decode.num_handed_over == 0
        cluster.prefill.may_hand_over.set()
        await client.whole()
        assert cluster.num_seen == 2, "one attempt"
        await until(lambda: cluster.records()[0].outcome == "done", "it is recorded")
        record = cluster.records()[0]
        assert record.parts is not None
        assert record.parts.handoff_s == HANDOFF_S


async def test_an_answer_of_one_token_has_no_hand_off(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path) as cluster:
        cluster.prefill.may_hand_over.clear()
        async with cluster.client() as http:
            reply = await http.post("/v1/completions", json={**BODY, "max_tokens": 1})
        assert reply.json()["choices"][0]["text"] == TEXT[:1]
        await cluster.until_idle()
        await until(lambda: cluster.records()[0].outcome == "done", "it is recorded")
        record = cluster.records()[0]
        assert record.parts is not None
        assert record.parts.handoff_s is None


async def test_a_token_of_the_decode_worker_shows_that_it_has_the_kv(tmp_path: Path) -> None:
    """The prefill worker dies before it says so."""
    async with ToyCluster(tmp_path) as cluster, reading(cluster) as client:
        cluster.prefill.may_report.clear()
        cluster.decode.token_s = 0.001
        cluster.prefill.may_hand_over.set()
        await until(lambda: len(client.text) > 1, "the decode worker's tokens come")
        await cluster.prefill.kill()
        await client.whole()
        assert cluster.num_seen == 2, "one attempt"


@pytest.mark.parametrize("what", ["refused", "prefill dies", "decode dies"])
async def test_a_hand_off_that_fails_after_the_first_token_is_made_again(tmp_path: Path, what: str) -> None:
    async with ToyCluster(tmp_path) as cluster, reading(cluster) as client:
        for role in WorkerRole:
            await cluster.add_worker(f"{role}1", role)
        if what == "refused":
            cluster.prefill.handoff_errors = [Corrupt("the KV was damaged on its way")]
        elif what == "prefill dies":
            cluster.prefill.die_during_handoff = True
        else:
            await cluster.decode.kill()
        cluster.prefill.may_hand_over.set()
        await client.whole()
        specs = [spec for worker in cluster.workers.values() for spec in worker.specs]
        again = [spec.tokens for spec in specs if spec.epoch == 2]
        assert again == [LetterCodec().encode(PROMPT + TEXT[0])] * 2, "it goes on behind the first token"


async def attempt_at(cluster: ToyCluster, connections: Connections) -> Attempt:
    """One attempt, as the front end makes them."""
    tokens, root = LetterCodec().encode(PROMPT), bytes(32)
    keys = chain_keys(root, tokens, BLOCK_TOKENS)
    conductor = await connections.conductor()
    decision = await conductor.call(Route(request_id="r", keys=keys, num_tokens=len(tokens), max_tokens=9))
    spec = RequestSpec(
        request_id="r", epoch=1, tokens=tokens, num_prompt_tokens=len(tokens), root=root,
        params=SamplingParams(max_tokens=9, seed=12),
    )  # fmt: skip
    return Attempt(connections, decision, spec, Deadline(600.0))


def refuse(cluster: ToyCluster) -> None:
    cluster.prefill.handoff_errors = [Corrupt("the KV was damaged on its way")]


def die_as_prefill(cluster: ToyCluster) -> None:
    cluster.prefill.die_during_handoff = True


def die_with_the_kv(cluster: ToyCluster) -> None:
    cluster.decode.die_after = 0


@pytest.mark.parametrize(
    ("how", "failed", "loss"),
    [
        (refuse, "prefill0", Loss.REFUSED),
        (die_as_prefill, "prefill0", Loss.DIED),
        (die_with_the_kv, "decode0", Loss.DIED),  # it may have been the request that it died of
    ],
)
async def test_the_worker_that_failed_a_hand_off_is_named(
    tmp_path: Path, how: Callable[[ToyCluster], None], failed: str, loss: Loss
) -> None:
    async with ToyCluster(tmp_path) as cluster:
        how(cluster)
        error, attempt = await failure_of(cluster, lambda: None)
        assert isinstance(error, LOST)
        assert (attempt.failed, attempt.loss) == ({failed}, loss)


async def test_a_decode_worker_that_dies_before_the_hand_off_did_not_die_of_the_request(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path) as cluster:
        cluster.prefill.may_hand_over.clear()
        killing: list[asyncio.Task[None]] = []
        error, attempt = await failure_of(cluster, lambda: killing.append(asyncio.create_task(cluster.decode.kill())))
        await killing[0]
        assert isinstance(error, PeerLost)
        assert (attempt.failed, attempt.loss) == ({"decode0"}, Loss.ABSENT)


async def failure_of(cluster: ToyCluster, after_first: Callable[[], None]) -> tuple[MoonpoolError, Attempt]:
    """Return what an attempt failed with after its first token."""
    connections = Connections(cluster.conductor_address)
    try:
        attempt, tokens = await attempt_at(cluster, connections), list[int]()

        async def read() -> None:
            async for batch in attempt.batches():
                tokens.extend(out.token for out in batch.tokens)
                after_first()

        with pytest.raises(MoonpoolError) as caught:
            await read()
        check_tokens(tokens, LetterCodec().encode(TEXT[0]))
        return caught.value, attempt
    finally:
        await connections.close()
        await cluster.until_idle()
