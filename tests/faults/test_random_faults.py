"""Random requests that share prefixes, random cancels and random faults, all at once.

Every request that is not cancelled ends, with the right tokens; every cancelled one has seen only right tokens; and
when all is over nothing is held anywhere, and the pool holds nothing wrong.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from severe import check_tokens
from tiny_cluster import Answer, Oracle, TinyCluster, greedy, prompt_of, tiny_cluster

from moonpool.engine.sequence import SamplingParams
from moonpool.master.state.snapshot import snapshot_keys
from moonpool.transfer.transports.base import RemoteSegment
from moonpool.transfer.transports.shm.transport import ShmRemote

Fault = Literal[
    "flip a bit of a hand-off",
    "damage an object",
    "remove an object",
    "forget pages",
    "restart the pool",
    "kill a prefill worker",
    "kill a decode worker",
]


@dataclass(frozen=True)
class Request:
    family: int  # prompts of a family begin with the same tokens
    num_shared: int
    num_own: int
    max_tokens: int
    seed: int | None  # None: greedy
    cancel_after: int | None  # tokens

    @property
    def prompt(self) -> list[int]:
        own = 1000 * self.num_shared + self.num_own
        return prompt_of(80, seed=self.family)[: self.num_shared] + prompt_of(self.num_own, seed=own)

    @property
    def params(self) -> SamplingParams:
        temperature = 0.0 if self.seed is None else 0.8
        return SamplingParams(max_tokens=self.max_tokens, temperature=temperature, seed=self.seed or 0, ignore_eos=True)


REQUESTS = st.builds(
    Request,
    family=st.integers(0, 1),
    num_shared=st.sampled_from([0, 16, 33, 64, 80]),
    num_own=st.integers(1, 40),
    max_tokens=st.integers(1, 40),
    seed=st.sampled_from([None, None, 1]),
    cancel_after=st.sampled_from([None, None, None, 0, 1, 5]),
)
FAULTS = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(get_args(Fault))), max_size=5)


class Chaos:
    """Does each fault when that many tokens have been seen in all."""

    def __init__(self, cluster: TinyCluster, faults: Sequence[tuple[int, Fault]], patch: pytest.MonkeyPatch) -> None:
        self._cluster = cluster
        self._due = sorted(faults)
        self._num_tokens = 0
        self._num_flips = 0
        self._one_at_a_time = asyncio.Lock()
        self._doing: list[asyncio.Task[None]] = []
        self._hook_writes(patch)

    def saw_tokens(self, count: int = 1) -> None:
        self._num_tokens += count
        while self._due and self._due[0][0] <= self._num_tokens:
            self._doing.append(asyncio.create_task(self._do(self._due.pop(0)[1])))

    async def finish(self) -> None:
        self._due.clear()
        await asyncio.gather(*self._doing)

    async def _do(self, fault: Fault) -> None:
        async with self._one_at_a_time:
            cluster = self._cluster
            match fault:
                case "flip a bit of a hand-off":
                    self._num_flips += 1
                case "damage an object":
                    for key in self._some_object():
                        cluster.object_memory(key)[-1] ^= 0x55
                case "remove an object":
                    cluster.master.state.remove(self._some_object(), True, time.monotonic())
                case "forget pages":
                    for worker in cluster.living.values():
                        await worker.on_engine(worker.pages.drop_cached)
                case "restart the pool":
                    await cluster.stop_pool()
                    await cluster.start_pool()
                case "kill a prefill worker":
                    await self._kill("prefill1")
                case "kill a decode worker":
                    await self._kill("decode1")

    async def _kill(self, name: str) -> None:
        if name in self._cluster.living:
            await self._cluster.kill(name)

    def _some_object(self) -> list[bytes]:
        return [key for part in snapshot_keys(self._cluster.master.state.index) for key, _ in part][:1]

    def _hook_writes(self, patch: pytest.MonkeyPatch) -> None:
        write_from = ShmRemote.write_from

        def write(remote: ShmRemote, offset: int, buffers: Sequence[Any], **options: Any) -> None:
            if self._num_flips and remote._descriptor.name.startswith("decode"):
                self._num_flips -= 1
                buffers = [bytearray(buffer) for buffer in buffers]
                buffers[0][7] ^= 2
            write_from(remote, offset, buffers, **options)

        patch.setattr(ShmRemote, "write_from", write)
        patch.setattr(ShmRemote, "write_many", RemoteSegment.write_many)  # one after the other


async def run(model: str, oracle: Oracle, requests: Sequence[Request], faults: Sequence[tuple[int, Fault]]) -> None:
    sizes: dict[str, Any] = {"prefill_pages": 20, "decode_pages": 16, "dram_nbytes": 64 * 12288}
    with pytest.MonkeyPatch.context() as patch:
        async with tiny_cluster(model, num_prefill=2, num_decode=2, max_batch_tokens=40, **sizes) as cluster:
            chaos = Chaos(cluster, faults, patch)
            chaos.saw_tokens(0)
            await asyncio.gather(*(ask(cluster, oracle, chaos, request) for request in requests))
            await chaos.finish()
            await check_pool(cluster, oracle, requests)


async def check_pool(cluster: TinyCluster, oracle: Oracle, requests: Sequence[Request]) -> None:
    """What the mix left in the pool gives the right tokens too, to workers that have nothing else."""
    await cluster.forget_pages(*cluster.living)
    for request in requests:
        prompt, params = request.prompt + await oracle(request.prompt, request.params), greedy(4)
        check_tokens((await cluster.generate(prompt, params)).tokens, await oracle(prompt, params))


async def ask(cluster: TinyCluster, oracle: Oracle, chaos: Chaos, request: Request) -> None:
    expected = await oracle(request.prompt, request.params)
    seen: list[int] = []

    def on_tokens(answer: Answer) -> None:
        chaos.saw_tokens(len(answer.tokens) - len(seen))
        seen[:] = answer.tokens
        if request.cancel_after is not None and len(seen) >= request.cancel_after:
            asking.cancel()

    asking = asyncio.create_task(cluster.generate(request.prompt, request.params, on_tokens=on_tokens))
    if request.cancel_after == 0:
        await asyncio.sleep(0.001 * (request.num_own % 8))
        asking.cancel()
    await asyncio.wait((asking,))
    if asking.cancelled():
        assert request.cancel_after is not None
        check_tokens(seen, expected[: len(seen)])
    else:
        check_tokens(asking.result().tokens, expected)


BOUNDS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # every example differs by its timing, so there is nothing to shrink
    suppress_health_check=list(HealthCheck),
)


@settings(BOUNDS, max_examples=10)
@given(requests=st.lists(REQUESTS, min_size=2, max_size=8), faults=FAULTS)
def test_a_random_mix(
    tiny_model: str, oracle: Oracle, requests: list[Request], faults: list[tuple[int, Fault]]
) -> None:
    asyncio.run(run(tiny_model, oracle, requests, faults))


@pytest.mark.soak
@pytest.mark.timeout(900)
@settings(BOUNDS, max_examples=300, derandomize=False)
@given(requests=st.lists(REQUESTS, min_size=2, max_size=12), faults=FAULTS)
def test_many_random_mixes(
    tiny_model: str, oracle: Oracle, requests: list[Request], faults: list[tuple[int, Fault]]
) -> None:
    asyncio.run(run(tiny_model, oracle, requests, faults))
