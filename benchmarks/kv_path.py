"""KV of a prompt over a network: handed off to a decode worker, and pulled from the pool. Needs root.

    python benchmarks/kv_path.py [--json] [--tokens 1500] [--compute-ms 0 50 250] [--rate-mbit 1000] [--delay-ms 1]

Three machines (network namespaces): a prefill worker; a decode worker and a pool behind a link of 1 Gbit/s and 1 ms
each way; another pool behind 50 Mbit/s. The worker's own classes move the KV of SmolLM2-135M; instead of a model,
layers become ready one after the other, each after `--compute-ms`.

The claims: a hand-off is exposed (from the last layer computed until the decode worker has verified all of it) for
little more than its last layer takes on the wire; pulls reach 0.8 of a plain read_many() of the same bytes; a slow pool
does not delay a hand-off.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from _delayed_link import LinkLab, missing

from moonpool.base.checksum import crc32c
from moonpool.base.cluster import WORKER_SERVICE
from moonpool.base.errors import Corrupt, MoonpoolError
from moonpool.base.rpc import RpcServer
from moonpool.bench.report import BenchReport, bench_parser
from moonpool.engine.blocks import PageManager
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.sequence import AdmittedSequence
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.transfer import TransferConfig, TransferEngine
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.tcp.transport import TcpRemote
from moonpool.worker.kv_link.decode_peers import DecodePeers
from moonpool.worker.kv_link.pieces import HostPieces
from moonpool.worker.kv_link.pool import PoolWriter
from moonpool.worker.kv_link.pull import Puller
from moonpool.worker.kv_link.push import Push
from moonpool.worker.kv_link.reservations import Reservations
from moonpool.worker.kv_link.send_queue import SendQueue
from moonpool.worker.messages import AbortHandoff, CommitHandoff, OpenHandoff, Ticket, TokenOut

BLOCK_TOKENS = 64
NUM_PAGES = 96
IDENTITY = bytes(range(32))
PREFILL, FAST, SLOW = range(3)  # machines
TIMEOUT_S = 120.0


def layout_of(num_pages: int) -> KvLayout:
    """The KV memory of SmolLM2-135M with the default dtype."""
    return KvLayout(
        num_pages=num_pages, num_layers=30, num_kv_heads=3, block_tokens=BLOCK_TOKENS, head_dim=64, dtype="float32"
    )


# -- the decode worker -------------------------------------------------------------------------------------------------


class DecodeSide:
    """Reservations in served KV memory, and the calls of a hand-off. There is no engine: all runs on one event loop."""

    def __init__(self, engine: TransferEngine, host: str) -> None:
        self._layout = layout_of(NUM_PAGES)
        self._segment = Segment.allocate(
            "d/kv", self._layout.total_nbytes, granule_nbytes=self._layout.page_nbytes, incarnation=1
        )
        self._memory = HostPieces(self._segment.memory, self._layout)
        self._descriptor = engine.serve(self._segment)
        self._pages = PageManager(NUM_PAGES, BLOCK_TOKENS)
        self._reservations = Reservations(self._pages, self._stamp)
        handlers: dict[Any, Any] = {
            OpenHandoff: self._open,
            CommitHandoff: self._commit,
            AbortHandoff: self._abort,
        }
        self._server = RpcServer(WORKER_SERVICE, handlers, name="d", incarnation=1)
        self._host, self._address = host, ""
        self._numbers = iter(range(1_000_000))

    async def start(self) -> None:
        self._address = await self._server.listen(f"tcp:{self._host}:0")

    def reserve(self, num_blocks: int) -> Ticket:
        made = self._reservations.reserve(f"r{next(self._numbers)}", 1, num_blocks, [])
        return Ticket(
            request_id=made.request_id,
            epoch=made.epoch,
            address=self._address,
            segment=self._descriptor,
            pages=made.pages,
            num_present_blocks=made.num_present,
            generation=made.generation,
        )

    def _stamp(self, pages: Any, generation: int) -> None:
        assert self._segment.fence is not None
        for page in pages:
            self._segment.fence.stamp(*self._layout.page(page), generation)
        self._segment.fence.limit = generation

    def _open(self, call: OpenHandoff, peer: object) -> None:
        self._reservations.open(call.request_id, call.epoch, call.generation, id(peer))

    def _abort(self, call: AbortHandoff, peer: object) -> None:
        for each in self._reservations.abort(call.request_id, call.epoch, call.generation, id(peer)):
            self._reservations.free(each)

    async def _commit(self, call: CommitHandoff, peer: object) -> None:
        incoming = self._reservations.begin_commit(call.request_id, call.epoch, call.generation)
        if not await asyncio.to_thread(self._verify, incoming.pages, call.checksums):
            self._reservations.free(incoming)
            raise Corrupt("KV was damaged on its way")
        pages = self._reservations.adopt(incoming)
        assert pages is not None
        self._pages.free(pages)

    def _verify(self, pages: list[int], expected: bytes) -> bool:
        found = [[crc32c(self._memory.piece(page, layer)) for layer in range(30)] for page in pages]
        return np.array(found, dtype="<u4").tobytes() == expected


def decode_main(run_dir: str, host: str) -> None:
    """Answers every line (a number of blocks) with a ticket."""

    async def serve() -> None:
        with TransferEngine(TransferConfig(run_dir=run_dir, shm=False, tcp_host=host)) as engine:
            side = DecodeSide(engine, host)
            await side.start()
            print("ready", flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                print(msgspec.json.encode(side.reserve(int(line))).decode(), flush=True)

    asyncio.run(serve())


class TransferCounter:
    """Counts the calls that move bytes over tcp, by the name of the segment. Each takes a round trip at least."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        for name in (
            "read_into",
            "read_many",
            "read_in_turn",
            "read_expecting",
            "write_from",
            "write_many",
            "write_each",
        ):
            self._count(name, getattr(TcpRemote, name))

    def _count(self, name: str, function: Callable[..., Any]) -> None:
        def counted(remote: TcpRemote, *args: Any, **options: Any) -> Any:
            self.counts[remote._descriptor.name] += 1
            return function(remote, *args, **options)

        setattr(TcpRemote, name, counted)


# -- the prefill worker ------------------------------------------------------------------------------------------------


class PrefillSide:
    """What a prefill worker moves KV with, its layers ready after a given time instead of computed."""

    def __init__(self, run_dir: str, host: str) -> None:
        self._engine = TransferEngine(TransferConfig(run_dir=run_dir, shm=False, tcp_host=host))
        layout = layout_of(NUM_PAGES)
        self._memory = memoryview(bytearray(np.random.default_rng(1).bytes(layout.page_nbytes)) * NUM_PAGES)
        self._pieces = HostPieces(self._memory, layout)
        events = asyncio.new_event_loop()
        threading.Thread(target=events.run_forever, name="calls", daemon=True).start()
        self._peers = DecodePeers("p", events)
        self._queue = SendQueue()
        self._transfers = TransferCounter()
        self._keys: list[bytes] = []

    def handoff(self, ticket: Ticket, master: str, compute_s: float) -> dict[str, float]:
        """Hand a prompt off while its blocks go to the pool of that master; how long each took."""
        store = self._store(master)
        pool = PoolWriter(store, self._pieces, IDENTITY)
        num_blocks = len(ticket.pages)
        self._keys = [secrets.token_bytes(32) for _ in range(num_blocks - 1)]  # the last block is not full
        push = Push(
            ticket,
            self._keys,
            queue=self._queue,
            memory=self._pieces,
            pool=pool,
            peers=self._peers,
            transfer=self._engine,
        )
        self._transfers.counts.clear()
        began_s = time.monotonic()
        push.begin(range(num_blocks), 0, 0)
        for layer in range(self._pieces.layout.num_layers):
            time.sleep(compute_s)
            push.layer_ready(layer, range(num_blocks))
        computed_s = time.monotonic()
        committed_s = _when(lambda done: push.commit(TokenOut(1), 1500, done))
        stored_s = _when(lambda done: push.finish_puts(complete=True, on_done=done))
        store.close()
        return {
            "exposed_s": committed_s - computed_s,
            "whole_s": committed_s - began_s,
            "stored_s": stored_s - began_s,
            "failed_puts": sum(pool.failures.values()),
            "transfers": self._transfers.counts.pop(ticket.segment.name),
            "pool_transfers": self._transfers.counts.total(),
        }

    def pull(self, master: str, compute_s: float) -> dict[str, float]:
        """Pull the blocks that were handed off last; how long until the last layer was in place."""
        store = self._store(master)
        puller = Puller(store, self._pieces, IDENTITY)
        blocks = range(len(self._keys))
        pages = tuple(48 + block for block in blocks)
        for page in pages:
            offset, nbytes = self._pieces.layout.page(page)
            self._memory[offset : offset + nbytes] = bytes(nbytes)
        ended = threading.Event()
        self._transfers.counts.clear()
        began_s = time.monotonic()
        job = puller.start(AdmittedSequence("r", 0, tuple(blocks), pages, tuple(self._keys)), ended.set)
        for layer in range(self._pieces.layout.num_layers):
            job.wait_layer(layer, TIMEOUT_S)
            in_place_s = time.monotonic() - began_s
            time.sleep(compute_s)
        result = job.wait_end(TIMEOUT_S)
        whole_s = time.monotonic() - began_s
        ended.wait(TIMEOUT_S)
        if result.num_good != len(blocks) or any(self._page(block) != self._page(48 + block) for block in blocks):
            raise SystemExit(f"the pull failed: {result}")
        puller.close()
        store.close()
        beyond_s = whole_s - compute_s * self._pieces.layout.num_layers
        transfers = self._transfers.counts.total()
        return {"in_place_s": in_place_s, "beyond_s": beyond_s, "nbytes": result.nbytes, "transfers": transfers}

    def read(self, ticket: Ticket) -> dict[str, float]:
        """Read as many bytes as a pull does, piece by piece, by one read_many()."""
        layout, remote = self._pieces.layout, self._engine.open(ticket.segment)
        pages = range(len(ticket.pages) - 1)
        items = [
            (layout.piece(page, layer)[0], self._pieces.piece(48 + page, layer))
            for page in pages
            for layer in range(layout.num_layers)
        ]
        began_s = time.monotonic()
        remote.read_many(items, timeout_s=TIMEOUT_S)
        return {"seconds": time.monotonic() - began_s, "nbytes": len(pages) * layout.page_nbytes}

    def _page(self, page: int) -> memoryview:
        offset, nbytes = self._pieces.layout.page(page)
        return self._memory[offset : offset + nbytes]

    def _store(self, master: str) -> Store:
        limits = ClientConfig(name="p", retry_s=0.0, transfer_timeout_s=TIMEOUT_S, rpc_timeout_s=TIMEOUT_S)
        return Store(master, engine=self._engine, config=limits)


def _when(start: Callable[[Callable[..., None]], None]) -> float:
    """Start something and wait until it calls back; return when it did. End the process if it calls with an error."""
    called, at_s, errors = threading.Event(), list[float](), list[MoonpoolError]()

    def done(error: MoonpoolError | None = None) -> None:
        at_s.append(time.monotonic())
        errors.extend([error] if error is not None else [])
        called.set()

    start(done)
    if not called.wait(TIMEOUT_S):
        raise SystemExit("it did not end in time")
    if errors:
        raise SystemExit(f"the hand-off failed: {errors[0]}")
    return at_s[0]


def prefill_main(run_dir: str, host: str) -> None:
    side = PrefillSide(run_dir, host)
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if "ticket" in command:
            command["ticket"] = msgspec.convert(command["ticket"], Ticket, builtin_types=(bytes,))
        print(json.dumps(getattr(side, command.pop("do"))(**command)), flush=True)


# -- the lab -----------------------------------------------------------------------------------------------------------


class Party:
    """A process of this file on a machine. It answers each line with one."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._receive() == "ready\n"

    def ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return json.loads(self._receive())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _receive(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the lab ended with {self._process.wait(10)}")
        return line


class KvLab:
    """`prefill` and `decode` answer commands; `masters` are the addresses of the fast and of the slow pool."""

    def __init__(self, rate_mbit: int, delay_ms: float, slow_mbit: int) -> None:
        self._undo = contextlib.ExitStack()
        self._rate_mbit, self._delay_ms, self._slow_mbit = rate_mbit, delay_ms, slow_mbit

    def __enter__(self) -> KvLab:
        with contextlib.ExitStack() as undo:
            self._folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="mp")))
            self._lab = lab = undo.enter_context(LinkLab(3))
            fast = lab.connect(PREFILL, FAST, rate_mbit=self._rate_mbit, delay_ms=self._delay_ms)
            slow = lab.connect(PREFILL, SLOW, rate_mbit=self._slow_mbit, delay_ms=self._delay_ms)
            self.masters = [
                self._start_pool(undo, machine, lab.address(machine, link))
                for machine, link in ((FAST, fast), (SLOW, slow))
            ]
            self.decode = self._start(undo, FAST, "decode", lab.address(FAST, fast))
            self.prefill = self._start(undo, PREFILL, "prefill", lab.address(PREFILL, fast))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def handoff(self, num_blocks: int, master: str, compute_s: float) -> Any:
        return self._do("handoff", ticket=self.decode.ask(str(num_blocks)), master=master, compute_s=compute_s)

    def pull(self, master: str, compute_s: float) -> Any:
        return self._do("pull", master=master, compute_s=compute_s)

    def read(self, num_blocks: int) -> Any:
        if not hasattr(self, "_ticket"):
            self._ticket = self.decode.ask(str(num_blocks))
        return self._do("read", ticket=self._ticket)

    def _do(self, do: str, **arguments: object) -> Any:
        return self.prefill.ask(json.dumps({"do": do, **arguments}))

    def _start(self, undo: contextlib.ExitStack, machine: int, role: str, host: str) -> Party:
        run_dir = self._folder / role
        party = Party(self._lab.inside(machine, sys.executable, __file__, f"--as={role}", str(run_dir), host))
        undo.callback(party.close)
        return party

    def _start_pool(self, undo: contextlib.ExitStack, machine: int, host: str) -> str:
        master, folder = f"tcp:{host}:7700", self._folder / str(machine)
        self._start_role(undo, machine, "master", "--listen", master, "--data-dir", str(folder / "data"))
        self._start_role(
            undo, machine, "node", "--name", f"n{machine}", "--master", master, "--dram", "600MB",
            "--run-dir", str(folder / "run"), "--no-shm", "--tcp-host", host,
        )  # fmt: skip
        return master

    def _start_role(self, undo: contextlib.ExitStack, machine: int, *arguments: str) -> None:
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-m", "moonpool", *arguments, "--ready-fd", str(write_fd)]
        with (self._folder / f"log{machine}{arguments[0]}").open("wb") as log:
            process = subprocess.Popen(
                self._lab.inside(machine, *command), stdout=log, stderr=log, pass_fds=(write_fd,)
            )
        os.close(write_fd)
        undo.callback(process.wait)
        undo.callback(process.terminate)
        with os.fdopen(read_fd) as ready:
            if "ready" not in ready.readline():
                raise SystemExit(Path(log.name).read_text())


def measure(options: argparse.Namespace) -> Iterator[tuple[str, float, str]]:
    """Medians over the rounds; the rounds of all cases are interleaved, so that other load on this machine hits all."""
    num_blocks = -(-options.tokens // BLOCK_TOKENS)
    found: dict[tuple[str, str], list[float]] = {}

    def add(case: str, unit: str, value: float) -> None:
        found.setdefault((case, unit), []).append(value)

    with KvLab(options.rate_mbit, options.delay_ms, options.slow_mbit) as lab:
        fast, slow = lab.masters
        lab.handoff(num_blocks, fast, 0.0)  # makes the connections
        lab.pull(fast, 0.0)
        for _ in range(options.rounds):
            plain = lab.read(num_blocks)
            rate = plain["nbytes"] / plain["seconds"]
            add("read_many of the same bytes", "GB/s", rate / 1e9)
            for compute_ms in options.compute_ms:
                given = f"{compute_ms:g} ms per layer"
                handed = lab.handoff(num_blocks, fast, compute_ms / 1000)
                add(f"hand-off, {given}: exposed", "ms", handed["exposed_s"] * 1000)
                add(f"hand-off, {given}: blocks stored", "ms", handed["stored_s"] * 1000)
                add(f"hand-off, {given}: failed puts", "", handed["failed_puts"])
                add(f"hand-off, {given}: transfers", "", handed["transfers"])
                add(f"hand-off, {given}: transfers to the pool", "", handed["pool_transfers"])
                pulled = lab.pull(fast, compute_ms / 1000)
                add(f"pull, {given}: last layer in place", "ms", pulled["in_place_s"] * 1000)
                add(f"pull, {given}: beyond computing", "ms", pulled["beyond_s"] * 1000)
                add(f"pull, {given}: transfers", "", pulled["transfers"])
                if not compute_ms:
                    add("pull", "GB/s", pulled["nbytes"] / pulled["in_place_s"] / 1e9)
                    add("pull against read_many", "x", pulled["nbytes"] / pulled["in_place_s"] / rate)
            compute_ms = options.compute_ms[-1]
            beside = lab.handoff(num_blocks, slow, compute_ms / 1000)
            add(f"hand-off beside a slow pool, {compute_ms:g} ms per layer: exposed", "ms", beside["exposed_s"] * 1000)
    for (case, unit), values in found.items():
        yield case, statistics.median(values), unit


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1500, help="length of the prompt")
    parser.add_argument("--compute-ms", type=float, nargs="+", default=[0.0, 50.0, 250.0], help="of one layer")
    parser.add_argument("--rate-mbit", type=int, default=1000, help="rate of the link")
    parser.add_argument("--slow-mbit", type=int, default=50, help="rate of the link to the slow pool")
    parser.add_argument("--delay-ms", type=float, default=1.0, help="delay of the links, each way")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds; the median is reported")
    options = parser.parse_args()
    reason = missing()
    if reason is not None:
        raise SystemExit(reason)
    report = BenchReport.from_options("kv_path", options)
    for case, value, unit in measure(options):
        report.add(case, value, unit)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("--as="):
        {"decode": decode_main, "prefill": prefill_main}[sys.argv[1][5:]](*sys.argv[2:])
    else:
        main()
