"""The real conductor, and workers that answer at once: everything a front end talks to, in one process.

The workers register with the conductor and speak the real worker protocol over their own sockets, but hold no model: a
prompt's first token, and then all others in one message, come as soon as they are asked for. `pause_s` makes a stream
slow: its tokens come one by one. The process ends when its standard input does.

    python benchmarks/_instant_workers.py FOLDER '{"num_tokens": 8, "pause_s": 0}'
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from moonpool.base.cluster import CONDUCTOR_SERVICE, REQUEST_LIMITS, WORKER_SERVICE, RegisterWorker, WorkerRole
from moonpool.base.cluster import WorkerInfo as Info
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import NotFound
from moonpool.base.metrics import GetMetrics, MetricFamily, process_metrics, snapshot
from moonpool.base.rpc import AsyncClient, Call, RpcServer
from moonpool.conductor.service import Conductor, ConductorConfig
from moonpool.worker.messages import (
    Decode,
    DecodeItem,
    GetStats,
    Prefill,
    PrefillItem,
    PrefillReply,
    RequestSpec,
    Ticket,
    TokenOut,
    WorkerStats,
)
from moonpool.worker.metrics import WorkerCollector, WorkerTimes

_BLOCK_TOKENS = 16
_FIRST_TOKEN = 1000  # a word of every tokenizer of a real model
_SEGMENT = SegmentDescriptor(name="none", nbytes=0, incarnation=1, host="", endpoints=())


class InstantWorkers:
    """One prefill and one decode worker. The hand-off between them is a future in this process."""

    def __init__(self, folder: Path, num_tokens: int, pause_s: float) -> None:
        self._folder = folder
        self._num_tokens = num_tokens
        self._pause_s = pause_s
        self._handed_over: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._kept: list[RpcServer | AsyncClient] = []

    async def start(self, conductor_address: str) -> None:
        for role in WorkerRole:
            handlers: dict[Any, Any] = {Decode: self._decode, Prefill: self._prefill, **_figures(role)}
            server = RpcServer(WORKER_SERVICE, handlers, name=role.value, incarnation=1)
            address = await server.listen(f"unix:{self._folder / role.value}")
            client = await AsyncClient.connect(
                conductor_address, CONDUCTOR_SERVICE, name=role.value, silence_limits=REQUEST_LIMITS
            )
            info = Info(
                name=role.value,
                role=role,
                address=address,
                incarnation=1,
                identity=bytes(32),
                model="smollm2",
                block_tokens=_BLOCK_TOKENS,
                num_pages=1_000_000,
                max_num_seqs=100_000,
                page_nbytes=1024,
            )
            await client.call(RegisterWorker(info=info))
            self._kept += [server, client]

    async def _decode(self, call: Decode, _peer: object) -> AsyncIterator[DecodeItem]:
        spec = call.spec
        key = spec.request_id, spec.epoch
        handed_over = self._handed_over[key] = asyncio.get_running_loop().create_future()
        try:
            yield DecodeItem(ticket=self._ticket(spec))
            await handed_over
            rest = tuple(map(TokenOut, range(_FIRST_TOKEN + 1, _FIRST_TOKEN + self._wanted(spec))))
            if not self._pause_s:
                yield DecodeItem(tokens=rest, finish_reason="length")
                return
            for out in rest[:-1]:
                await asyncio.sleep(self._pause_s)
                yield DecodeItem(tokens=(out,))
            yield DecodeItem(tokens=rest[-1:], finish_reason="length")
        finally:
            del self._handed_over[key]

    async def _prefill(self, call: Prefill, _peer: object) -> AsyncIterator[PrefillItem]:
        handed_over = self._handed_over.get((call.spec.request_id, call.spec.epoch))
        if handed_over is None:
            raise NotFound("the client has left, and with it the stream of this request")
        is_over = self._wanted(call.spec) == 1
        reply = PrefillReply(
            first=TokenOut(_FIRST_TOKEN),
            finish_reason="length" if is_over else None,
            local_tokens=0,
            pool_tokens=0,
            pool_nbytes=0,
            queue_s=0.0,
            compute_s=0.0,
        )
        yield PrefillItem(reply=reply)
        if is_over:
            return
        if not handed_over.done():
            handed_over.set_result(None)
        yield PrefillItem(handoff_s=0.0)

    def _wanted(self, spec: RequestSpec) -> int:
        return min(self._num_tokens, spec.params.max_tokens)

    def _ticket(self, spec: RequestSpec) -> Ticket:
        pages = list(range(-(-len(spec.tokens) // _BLOCK_TOKENS)))
        return Ticket(
            request_id=spec.request_id,
            epoch=spec.epoch,
            address=f"unix:{self._folder / WorkerRole.DECODE.value}",
            segment=_SEGMENT,
            pages=pages,
            num_present_blocks=0,
            generation=1,
        )


def _figures(role: WorkerRole) -> dict[type[Call[Any]], Callable[[Any, object], Any]]:
    """Return the handlers for what front ends ask of every worker; the answers have a real worker's size."""
    counts = dict.fromkeys(
        ("num_pages", "free_pages", "cached_pages", "reserved_pages", "num_waiting", "num_running", "pool_read_nbytes",
         "pool_written_nbytes", "handoff_nbytes"), 0
    )  # fmt: skip
    stats = WorkerStats(name=role.value, role=role.value, incarnation=1, pid=os.getpid(), pull_failures={}, **counts)
    registry = CollectorRegistry()
    registry.register(WorkerCollector(lambda: stats))
    WorkerTimes().register(registry)

    def metrics(_call: object, _peer: object) -> list[MetricFamily]:
        return [*snapshot(registry), *process_metrics()]

    return {GetMetrics: metrics, GetStats: lambda _call, _peer: stats}


class InstantCluster:
    """The process, as a context: `conductor_address` is where a front end finds it."""

    def __init__(self, folder: Path, *, num_tokens: int = 8, pause_s: float = 0.0, prefix: Sequence[str] = ()) -> None:
        self._arguments = (str(folder), json.dumps({"num_tokens": num_tokens, "pause_s": pause_s}))
        self._prefix = prefix
        self.conductor_address = ""

    def __enter__(self) -> InstantCluster:
        command = [*self._prefix, sys.executable, __file__, *self._arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.conductor_address = self._process.stdout.readline().strip()
        if not self.conductor_address:
            self.__exit__(None, None, None)
            raise SystemExit("the conductor and the workers did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=20)


async def _main(folder: Path, num_tokens: int, pause_s: float) -> None:
    conductor = Conductor(ConductorConfig(address=f"unix:{folder / 'conductor'}"))
    address = await conductor.start()
    workers = InstantWorkers(folder, num_tokens, pause_s)
    await workers.start(address)
    print(address, flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_main(Path(sys.argv[1]), **json.loads(sys.argv[2])))
