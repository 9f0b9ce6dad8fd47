"""A profile of the live service, measured through it: what steps take, and what a request takes beside them.

Prompts are sent one at a time, as a front end sends them, with and without a cached prefix; workers say how long they
computed. Decode batches of several sizes and contexts are timed by their clients. Workers that share a machine slow
each other down, so each sample is taken twice: once with the other kind of worker idle, once with it at work; the
profile is of both. No request here is one of those that a profile is later used to predict: tokens, lengths and times
are others.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from _live_load import VOCAB, ask

from moonpool.base.clock import Deadline
from moonpool.base.cluster import DecodeSample, PrefillSample
from moonpool.base.keys import chain_keys
from moonpool.conductor.messages import RequestEnded, Route
from moonpool.engine.sequence import SamplingParams
from moonpool.frontend.attempt import Attempt
from moonpool.frontend.workers import Connections
from moonpool.sim.fleet import Profile
from moonpool.worker.messages import PrefillReply, RequestSpec

PREFILLS = (
    *((24, 0), (48, 0), (100, 0), (200, 0), (300, 0), (420, 0), (500, 0)),  # tokens, the first so many of them cached
    *((280, 256), (360, 256), (480, 256), (600, 576), (700, 576), (900, 576), (980, 960), (1060, 960), (1160, 960)),
)
DECODES = tuple(itertools.product((1, 2, 3, 4, 6), (192, 576, 960)))
DECODE_TOKENS = 20
OVERHEADS = ((20, 0), (340, 320), (660, 640), (980, 960)) * 6
BUSY_DECODES = 2  # sequences that a busy decode worker has
BUSY_PROMPT = 200  # tokens of what a busy prefill worker computes
_BASE_TOKENS = 960
_TIMEOUT_S = 60.0
_FOREVER_TOKENS = 900  # longer than all prefill samples take
_BUSY_AFTER_S = 0.5


class Calibration:
    """One measurement of one service. Needs it to itself."""

    def __init__(self, url: str, connections: Connections, block_tokens: int, seed: int) -> None:
        self._url, self._connections, self._block_tokens = url, connections, block_tokens
        self._rng = random.Random(seed)
        self._base = self._tokens(_BASE_TOKENS)
        self._numbers = itertools.count()

    async def measure(self) -> Profile:
        await self._prefill(self._base)  # now its blocks are cached
        await ask(self._url, self._base, 2)  # and by the front end's own keys
        prefills = [await self._sample(*shape) for shape in self._shuffled(PREFILLS)]
        decodes = [await self._decode(*shape) for shape in self._shuffled(DECODES)]
        request_s, handoff_s = await self._overheads()
        async with self._decodes_busy():
            prefills += [await self._sample(*shape) for shape in self._shuffled(PREFILLS)]
        async with self._prefills_busy():
            decodes += [await self._decode(*shape) for shape in self._shuffled(DECODES)]
        return Profile(prefills, decodes, request_s, handoff_s)

    @asynccontextmanager
    async def _decodes_busy(self) -> AsyncIterator[None]:
        prompts = [self._prompt(584, 576) for _ in range(BUSY_DECODES)]
        async with _meanwhile([ask(self._url, prompt, _FOREVER_TOKENS) for prompt in prompts]):
            await asyncio.sleep(_BUSY_AFTER_S)
            yield

    @asynccontextmanager
    async def _prefills_busy(self) -> AsyncIterator[None]:
        async def go_on() -> None:
            while True:
                await self._prefill(self._prompt(BUSY_PROMPT, 0))

        async with _meanwhile([go_on()]):
            yield

    def _shuffled(self, shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """So that a slow moment of the machine does not fall on one of them alone."""
        return self._rng.sample(shapes, len(shapes))

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(3, VOCAB) for _ in range(count)]

    def _prompt(self, num_tokens: int, prefix_tokens: int) -> list[int]:
        return self._base[:prefix_tokens] + self._tokens(num_tokens - prefix_tokens)

    async def _sample(self, num_tokens: int, prefix_tokens: int) -> PrefillSample:
        reply = await self._prefill(self._prompt(num_tokens, prefix_tokens))
        return PrefillSample(num_tokens, reply.local_tokens + reply.pool_tokens, reply.compute_s)

    async def _prefill(self, prompt: list[int]) -> PrefillReply:
        """As the front end would do it, for one token."""
        root = bytes(32)
        route = Route(
            request_id=f"calibrate-{next(self._numbers)}",
            keys=chain_keys(root, prompt, self._block_tokens),
            num_tokens=len(prompt),
            max_tokens=1,
        )
        conductor = await self._connections.conductor()
        decision = await conductor.call(route)
        spec = RequestSpec(
            request_id=route.request_id,
            epoch=1,
            tokens=prompt,
            num_prompt_tokens=len(prompt),
            root=root,
            params=SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0),
        )
        attempt = Attempt(self._connections, decision, spec, Deadline(_TIMEOUT_S))
        batches = [batch async for batch in attempt.batches()]
        await conductor.call(RequestEnded(request_id=route.request_id))
        reply = batches[0].prefill
        assert reply is not None
        return reply

    async def _decode(self, num_seqs: int, context: int) -> DecodeSample:
        """Over the steps that have all of them; their prompts are cached but for the last few tokens."""
        length = DECODE_TOKENS + 2 * num_seqs  # they do not all begin at once
        while True:
            prompts = [self._prompt(context + 8, context) for _ in range(num_seqs)]
            answers = await asyncio.gather(*[ask(self._url, prompt, length) for prompt in prompts])
            begin, end = max(each.token_s[0] for each in answers), min(each.token_s[-1] for each in answers)
            inside = [[at for at in each.token_s if begin <= at <= end] for each in answers]
            if min(map(len, inside)) >= DECODE_TOKENS // 2:
                break
            length *= 2  # on a busy machine one may end before another begins
        gaps = [(each[-1] - each[0]) / (len(each) - 1) for each in inside]
        tokens = [context + 8 + sum(at <= (begin + end) / 2 for at in each.token_s) for each in answers]
        return DecodeSample(num_seqs, sum(tokens), statistics.mean(gaps))

    async def _overheads(self) -> tuple[float, float]:
        """What requests take to their prefill, and to be handed off, that find nobody else there. The hand-off comes
        between the first two tokens, together with a step."""
        request_s, handoff_s = [], []
        for num_tokens, prefix_tokens in OVERHEADS:
            compute_s = (await self._prefill(self._prompt(num_tokens, prefix_tokens))).compute_s
            one = await ask(self._url, self._prompt(num_tokens, prefix_tokens), 1)
            few = await ask(self._url, self._prompt(num_tokens, prefix_tokens), 4)
            request_s.append(one.ttft_s - compute_s)
            handoff_s.append(few.gaps_s[0] - statistics.mean(few.gaps_s[1:]))
        return max(0.0, statistics.median(request_s)), max(0.0, statistics.median(handoff_s))


@asynccontextmanager
async def _meanwhile(work: Sequence[Coroutine[Any, Any, object]]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
        ended = [task for task in tasks if task.done()]
        assert not ended, f"what was to go on has ended: {ended}"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
