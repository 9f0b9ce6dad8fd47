"""A whole cluster in this process: master, node, conductor and real workers with a tiny model, over Unix sockets.
KV moves by shared memory or, with `shm=False`, by tcp, as between machines.

Everything is real but the size, and a broken engine: instead of ending the process it ends the test. Since all
workers' memory is here, a test can look at pages, hook any step and cut any connection.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from tiny_models import BLOCK_TOKENS, load_runner
from tiny_worker import TinyWorker
from waiting import HANG_S, until

from moonpool.base.keys import chain_keys, object_key
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.retries import RetryPolicy
from moonpool.conductor.service import Conductor, ConductorConfig
from moonpool.engine.blocks import PageManager
from moonpool.engine.engine import Engine
from moonpool.engine.scheduler import Scheduler, SchedulerConfig
from moonpool.engine.sequence import SamplingParams
from moonpool.frontend.choice import ChoiceRequest, ChoiceRunner
from moonpool.frontend.workers import Connections
from moonpool.master.service import Master, MasterConfig
from moonpool.node.config import NodeConfig
from moonpool.node.service import Node
from moonpool.worker.config import WorkerConfig
from moonpool.worker.messages import PrefillReply, TokenOut, WorkerStats

T = TypeVar("T")
ROOT = bytes(range(32))  # of a tenant that only tests have
VOCAB = 211
PAGE_NBYTES = 3 * 2 * 2 * BLOCK_TOKENS * 8 * 4  # of the tiny llama
RETRY = RetryPolicy(max_attempts=6, backoff_s=0.01, max_backoff_s=0.05, worker_wait_s=60.0)
# What a worker takes for a pool that is away or too slow, or for an engine that hangs. All of it is in one process that
# may stall, and gates stop engines, so that only the tests of these limits have short ones.
PATIENT: dict[str, Any] = {
    "pool_silence_s": 60.0,
    "pool_timeout_s": 60.0,
    "pull_timeout_s": 60.0,
    "pull_grace_s": 60.0,
    "step_limit_s": 600.0,
    "prepare_limit_s": 600.0,
}
_NAMES = itertools.count()


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """Random tokens, none of them special."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(num_tokens)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


class Oracle:
    """What an engine alone, undisturbed and with an empty cache answers. It computes on a thread of its own: the loop
    serves the master and all workers' connections. Each answer is computed once.
    """

    def __init__(self, model: str) -> None:
        self._runner = load_runner(model, num_pages=64)
        self._one_at_a_time = threading.Lock()
        self._computed = lru_cache(maxsize=None)(self._compute)

    async def __call__(self, prompt: list[int], params: SamplingParams) -> list[int]:
        return list(await asyncio.to_thread(self._tokens, tuple(prompt), params))

    def _tokens(self, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
        with self._one_at_a_time:
            return self._computed(prompt, params)

    def _compute(self, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
        torch.set_num_threads(1)  # the number belongs to the thread
        limits = SchedulerConfig(max_batch_tokens=512, max_num_seqs=1, max_seq_tokens=1024)
        engine = Engine(Scheduler(limits, PageManager(64, BLOCK_TOKENS)), self._runner)
        return engine.generate([prompt], params)[0].tokens


# So small a model computes as fast as it pulls; what is tested is what happens to pulls.
ALWAYS_PULLS = PolicyConfig(name="paper")


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    prefills: list[PrefillReply] = field(default_factory=list)
    num_attempts: int = 0
    num_moves: int = 0
    outs: list[TokenOut] = field(default_factory=list)


class TinyMaster(Master):
    async def close(self) -> None:
        await super().close()
        await asyncio.sleep(0)
        assert self._server is not None
        for peer in list(self._server.peers):  # a connection that was accepted just when the server closed
            peer.abort()


class TinyCluster:
    """Use `async with tiny_cluster(...)`."""

    def __init__(
        self,
        model: str,
        run_dir: Path,
        node_settings: dict[str, Any],
        shm: bool,
        policy: PolicyConfig,
        settings: dict[str, Any],
    ) -> None:
        self._model, self._dir, self._node_settings, self.settings = model, run_dir, node_settings, settings
        self._policy = policy
        self._wires: dict[str, Any] = {"shm": shm, "tcp_host": None if shm else "127.0.0.1"}
        self.workers: dict[str, TinyWorker] = {}
        self.conductors: list[Conductor] = []  # the first of them is `conductor`
        self.conductor_address = self.address_of("c.sock")  # of all of them
        self.dead: set[str] = set()
        self.hung: set[str] = set()  # whose processes their watchdogs would have ended
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._bugs: list[dict[str, Any]] = []
        self._loop.set_exception_handler(lambda _, context: self._bugs.append(context))

    def __getattr__(self, name: str) -> TinyWorker:
        """prefill0, decode0, ..."""
        try:
            return self.workers[name]
        except KeyError:
            raise AttributeError(name) from None

    # -- its roles ---------------------------------------------------------------------------------------------

    def address_of(self, name: str) -> str:
        return f"unix:{self._dir / name}"

    async def start_pool(self, dram_nbytes: int | None = None) -> None:
        """A master and a node, new ones if there were others before, at the same addresses."""
        self.master = TinyMaster(
            MasterConfig(data_dir=str(self._dir / "m"), listen=self.address_of("m.sock"), heartbeat_s=0.05, tick_s=0.01)
        )
        await self.master.start()
        self.node = Node(
            NodeConfig(
                name="n",
                master_address=self.address_of("m.sock"),
                run_dir=str(self._dir / "r"),
                retry_s=0.02,
                **self._wires,
                **self._node_settings | ({"dram_nbytes": dram_nbytes} if dram_nbytes else {}),
            )
        )
        await self.node.start()

    async def stop_pool(self) -> None:
        await self.node.close()
        await self.master.close()

    async def start_conductor(self) -> None:
        self.conductor = Conductor(self._conductor_config("c.sock"))
        await self.conductor.start()
        self.connections = Connections(self.conductor_address)
        self.conductors[:1] = [self.conductor]

    async def start_second_conductor(self) -> None:
        """Before the workers: they report to both."""
        self.conductors.append(Conductor(self._conductor_config("c1.sock")))
        await self.conductors[1].start()
        self.conductor_address += "," + self.address_of("c1.sock")
        await self.connections.close()
        self.connections = Connections(self.conductor_address)

    def _conductor_config(self, name: str) -> ConductorConfig:
        master = self.address_of("m.sock")
        return ConductorConfig(address=self.address_of(name), store_address=master, policy=self._policy)

    async def start_worker(self, role: str, number: int, num_pages: int) -> TinyWorker:
        name = f"{role}{number}"
        config = WorkerConfig(
            name=name,
            role=role,  # type: ignore[arg-type]
            model=self._model,
            address=self.address_of(f"{role[0]}{number}.sock"),
            conductor_address=self.conductor_address,
            master_address=self.address_of("m.sock"),
            run_dir=str(self._dir / "r"),
            kv_nbytes=num_pages * PAGE_NBYTES,
            block_tokens=BLOCK_TOKENS,
            report_interval_s=0.02,
            threads=1,
            **self._wires,
            **PATIENT | self.settings,
        )
        worker = self.workers[name] = TinyWorker(config, self._on_fatal, lambda: self.hung.add(name))
        await worker.start()
        return worker

    @property
    def living(self) -> dict[str, TinyWorker]:
        return {name: worker for name, worker in self.workers.items() if name not in self.dead}

    async def kill(self, name: str) -> None:
        self.dead.add(name)
        await self.workers[name].die()

    def _on_fatal(self, error: BaseException) -> None:
        """On an engine's thread."""

        def fail() -> None:
            if not self._fatal.done():
                self._fatal.set_exception(AssertionError(f"an engine died: {error!r}"))

        self._loop.call_soon_threadsafe(fail)

    def check_engines(self) -> None:
        """Raises when an engine has died or an error of a task went nowhere."""
        if self._fatal.done():
            self._fatal.result()
        assert not self._bugs, self._bugs

    async def close(self) -> None:
        await self.connections.close()
        for worker in self.workers.values():
            await worker.close()
        for conductor in self.conductors:
            await conductor.close()
        await self.stop_pool()

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        on_tokens: Callable[[Answer], None] | None = None,
        timeout_s: float = HANG_S,
    ) -> Answer:
        """Fails at once when an engine dies meanwhile."""
        work = asyncio.create_task(self._generate(prompt, params, on_tokens, timeout_s))
        try:
            await asyncio.wait((work, self._fatal), return_when=asyncio.FIRST_COMPLETED)
            self.check_engines()
            return await work
        finally:
            work.cancel()
            await asyncio.wait((work,))

    async def _generate(
        self, prompt: list[int], params: SamplingParams, on_tokens: Callable[[Answer], None] | None, timeout_s: float
    ) -> Answer:
        request = ChoiceRequest(f"r{next(_NAMES)}", prompt, ROOT, BLOCK_TOKENS, params, timeout_s)
        generation, answer = ChoiceRunner(request, self.connections, RETRY), Answer()
        async with aclosing(generation.batches()) as batches:
            async for batch in batches:
                answer.num_attempts = generation.num_attempts
                answer.tokens += [out.token for out in batch.tokens]
                answer.outs += batch.tokens
                answer.finish_reason = batch.finish_reason
                if batch.prefill is not None:
                    answer.prefills.append(batch.prefill)
                if on_tokens is not None:
                    on_tokens(answer)
        answer.num_attempts, answer.num_moves = generation.num_attempts, generation.num_moves
        return answer

    # -- what must hold ------------------------------------------------------------------------------------------

    def stats(self, name: str) -> WorkerStats:
        return self.workers[name].stats()

    @property
    def puts_in_progress(self) -> int:
        return self.master.state.stats().counters["puts_in_progress"]

    async def until(self, holds: Callable[[], object], what: str) -> None:
        """For what threads bring about in their own time."""

        def holds_in_health() -> object:
            self.check_engines()
            return holds()

        await until(holds_in_health, what)

    async def check_idle(self) -> None:
        """Every page is free, nobody waits or runs, no put is open, and all the books balance."""
        for name, worker in self.living.items():
            await self.until(worker.is_idle, f"{name} holds nothing: {worker.stats()}, {worker.pages.owned}")
        # A put whose end did not reach a busy master is discarded after half a minute.
        await self.until(lambda: self.puts_in_progress == 0, "no put is open")
        for worker in self.living.values():
            await worker.on_engine(worker.scheduler.check_integrity)
            assert worker.pages.owned == {}
        self.master.state.check_integrity()
        self.check_engines()

    # -- making the pool the only place where KV is --------------------------------------------------------------

    def object_keys(self, tokens: list[int]) -> list[bytes]:
        return [object_key(key) for key in chain_keys(ROOT, tokens, BLOCK_TOKENS)]

    async def forget_pages(self, *names: str) -> None:
        """These workers lose their cached pages; what was put into the pool stays there."""
        await self.check_idle()
        for name in names or tuple(self.workers):
            worker = self.workers[name]
            await worker.on_engine(worker.pages.drop_cached)

    def object_memory(self, key: bytes) -> memoryview:
        """The bytes of an object's replica, header first, in the node's memory."""
        [info] = self.master.state.lookup([key], time.monotonic(), lease=False)
        assert info is not None, "the object is stored"
        offset = info.replicas[0].offset
        return self.node.segment.memory[offset : offset + info.nbytes]


@asynccontextmanager
async def tiny_cluster(
    model: str,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    num_conductors: int = 1,
    prefill_pages: int = 48,
    decode_pages: int = 48,
    dram_nbytes: int = 8 << 20,
    shm: bool = True,
    node_secret: str | None = None,
    policy: PolicyConfig = ALWAYS_PULLS,
    **settings: Any,
) -> AsyncIterator[TinyCluster]:
    """Checks at the end that nothing is held anywhere. `settings` go to every WorkerConfig, over those of PATIENT;
    `node_secret` is the node's secret_file.
    """
    async with AsyncExitStack() as stack:
        # Not tmp_path: a Unix socket's path has at most 107 bytes.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mp"))
        node_settings = {"dram_nbytes": dram_nbytes, "secret_file": node_secret}
        cluster = TinyCluster(model, Path(folder), node_settings, shm, policy, settings)
        await cluster.start_pool()
        await cluster.start_conductor()
        if num_conductors == 2:
            await cluster.start_second_conductor()
        stack.push_async_callback(cluster.close)
        for number in range(num_prefill):
            await cluster.start_worker("prefill", number, prefill_pages)
        for number in range(num_decode):
            await cluster.start_worker("decode", number, decode_pages)
        yield cluster
        await cluster.check_idle()
