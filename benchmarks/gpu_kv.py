"""KV between a pool on this machine and a GPU's pages, verified, beside plain copies of the same bytes.

    python benchmarks/gpu_kv.py [--json] [--blocks 512] [--rounds 3]

The pool (a master and a node) runs in a process of its own, as in a service. Blocks are those of an 8B Llama shape in
bf16: 8 MiB, 32 layers. A put ends when the pool has made the blocks visible, a pull when all checksums have passed and
all generations still stand. Other benchmarks use PoolProcess, KvSide and the cases of this module.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import torch

from moonpool.base.keys import CacheIdentity, chain_keys, object_key
from moonpool.bench.report import BenchReport, bench_parser
from moonpool.engine.kv_memory import PIECE_LAYOUT, KvLayout
from moonpool.engine.kv_tensor import KvMemory
from moonpool.engine.sequence import AdmittedSequence, FullBlock
from moonpool.master.service import Master, MasterConfig
from moonpool.node.config import NodeConfig
from moonpool.node.service import Node
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.transports.cuda.copy_stream import CopyStream
from moonpool.transfer.transports.cuda.pinning import DeviceCopies, PinnedSegment
from moonpool.worker.kv_link.device_pieces import DevicePieces
from moonpool.worker.kv_link.pool import PoolWriter
from moonpool.worker.kv_link.pull import Puller
from moonpool.worker.kv_link.pull_job import PullJob

LAYERS, HEADS, HEAD_DIM, BLOCK_TOKENS = 32, 8, 128, 64
ALONE, BESIDE = 0.0, 1e9  # seconds that a step computes beside the pull: whole blocks, or layer by layer
IDENTITY = CacheIdentity(
    model_name="random-8b", weights_digest="none", dtype="bfloat16", num_layers=LAYERS, num_kv_heads=HEADS,
    head_dim=HEAD_DIM, block_tokens=BLOCK_TOKENS, piece_layout=PIECE_LAYOUT, rope="none",
).digest()  # fmt: skip


def layout_of(num_pages: int) -> KvLayout:
    return KvLayout(
        num_pages=num_pages, num_layers=LAYERS, num_kv_heads=HEADS, block_tokens=BLOCK_TOKENS, head_dim=HEAD_DIM,
        dtype="bfloat16",
    )  # fmt: skip


def keys_of(number: int, num_blocks: int) -> list[bytes]:
    """Return the keys of a prompt of its own."""
    return chain_keys(number.to_bytes(32), range(num_blocks * BLOCK_TOKENS), BLOCK_TOKENS)


class PoolProcess:
    """A master and a node in another process. A context manager; `kill()` ends it as kill -9 does."""

    def __init__(self, run_dir: str, dram_nbytes: int) -> None:
        self.address = f"unix:{run_dir}/master.sock"
        command = [sys.executable, __file__, "--pool", run_dir, str(dram_nbytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError("the pool did not start")

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> PoolProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.communicate(timeout=30)


def serve_pool(run_dir: str, dram_nbytes: int) -> None:
    """Serve until standard input ends."""

    async def serve() -> None:
        address = f"unix:{run_dir}/master.sock"
        master = Master(MasterConfig(data_dir=run_dir, listen=address))
        node = Node(NodeConfig(name="node", master_address=address, dram_nbytes=dram_nbytes, run_dir=run_dir))
        await master.start()
        await node.start()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await node.close()
        await master.close()

    asyncio.run(serve())


class KvSide:
    """One process's end: pages on the device and a client of the pool. Close it."""

    def __init__(self, run_dir: str, master: str, kv: KvMemory) -> None:
        self.kv = kv
        self.pieces = DevicePieces(kv)
        with ExitStack() as stack:
            self.transfer = stack.enter_context(TransferEngine(TransferConfig(run_dir=run_dir)))
            self.pinning = self.transfer.use_gpu(self.pieces.device)
            self.store = Store(master, engine=self.transfer, config=ClientConfig(uses_gpu=True))
            stack.callback(self.store.close)
            self.writer = PoolWriter(self.store, self.pieces, IDENTITY)
            self.puller = Puller(self.store, self.pieces, IDENTITY)
            stack.callback(self.puller.close)
            self._stack = stack.pop_all()

    def page_lock(self) -> float:
        """Page-lock the node's memory; return the seconds that it takes."""
        started_s = time.perf_counter()
        self.store.page_lock_local(timeout_s=120.0)
        return time.perf_counter() - started_s

    def pinned(self) -> list[PinnedSegment]:
        return self.pinning._now()

    def put(self, keys: list[bytes], pages: list[int]) -> float:
        """Put the pages under the keys; return the seconds. The pages are final."""
        started_s = time.perf_counter()
        self.writer.put_pages({page: FullBlock("bench", n, page, keys[n]) for n, page in enumerate(pages)})
        seconds = time.perf_counter() - started_s
        assert not self.writer.failures, self.writer.failures
        return seconds

    def start_pull(self, keys: list[bytes], pages: list[int], compute_s: float = ALONE) -> PullJob:
        wanted = AdmittedSequence("bench", 0, tuple(range(len(keys))), tuple(pages), tuple(keys))
        return self.puller.start(wanted, lambda: None, compute_s)

    def pull(self, keys: list[bytes], pages: list[int], compute_s: float = ALONE) -> float:
        """Pull the blocks into the pages; return the seconds until all are verified."""
        started_s = time.perf_counter()
        result = self.start_pull(keys, pages, compute_s).wait_end(60)
        seconds = time.perf_counter() - started_s
        assert result.failure is None, result.failure
        assert result.num_good == len(pages)
        return seconds

    def remove(self, keys: list[bytes]) -> None:
        self.store.remove_many([object_key(key) for key in keys], force=True)

    def close(self) -> None:
        self._stack.close()


def fill_pages(kv: KvMemory, pages: list[int]) -> None:
    """Fill pages with random bytes."""
    words = kv.tensor.view(torch.int16)
    for page in pages:
        words[page].random_(-(2**15), 2**15 - 1)
    torch.cuda.synchronize()


def equal_pages(kv: KvMemory, first: list[int], second: list[int]) -> bool:
    words = kv.tensor.view(torch.int16)
    return all(torch.equal(words[a], words[b]) for a, b in zip(first, second, strict=True))


def plain_copies_s(side: KvSide, pages: list[int], to_device: bool) -> float:
    """Return the seconds that the driver takes to copy the blocks between page-locked memory and the pages. Copies
    to the pool are for a pool that is empty.
    """
    copies, (segment,) = CopyStream(side.pieces.device), side.pinned()
    nbytes, number = side.pieces.layout.page_nbytes, len(pages)
    wanted = DeviceCopies(
        np.arange(number, dtype=np.int64) * nbytes, side.pieces.addresses(pages, 0), np.full(number, nbytes, np.int64)
    )
    with segment.copying():
        started_s = time.perf_counter()
        if to_device:
            copies.start_reads(segment, wanted)
            copies.drain()
        else:
            copies.wait(copies.start_writes(segment, wanted))
        return time.perf_counter() - started_s


def measure(side: KvSide, num_blocks: int, rounds: int) -> Iterator[tuple[str, float, str, float | None]]:
    """Yield (case, value, unit, baseline). Pages 0.. hold the blocks; those behind them receive them."""
    ours, theirs = list(range(num_blocks)), list(range(num_blocks, 2 * num_blocks))
    nbytes = num_blocks * side.pieces.layout.page_nbytes
    yield "page-lock the node's memory", side.page_lock() / (side.pinned()[0].pinned_nbytes / 2**30), "s/GiB", None
    fill_pages(side.kv, ours)
    from_gpu = nbytes / min(plain_copies_s(side, ours, False) for _ in range(3)) / 1e9
    to_gpu = nbytes / min(plain_copies_s(side, theirs, True) for _ in range(3)) / 1e9
    yield "plain copies from the GPU", from_gpu, "GB/s", None
    yield "plain copies to the GPU", to_gpu, "GB/s", None
    keys = keys_of(1, num_blocks)
    put_s: list[float] = []
    for number in range(rounds + 1):
        put_s.append(side.put(keys, ours))
        if number < rounds:
            side.remove(keys)
    yield "put from the GPU", nbytes / min(put_s[1:]) / 1e9, "GB/s", from_gpu
    for case, compute_s in (("pull, whole blocks", ALONE), ("pull, layer by layer", BESIDE)):
        side.kv.clear(theirs)
        torch.cuda.synchronize()
        pull_s = [side.pull(keys, theirs, compute_s) for _ in range(rounds + 1)]
        yield case, nbytes / min(pull_s[1:]) / 1e9, "GB/s", to_gpu
        yield f"{case}: bytes equal", float(equal_pages(side.kv, ours, theirs)), "1 = yes", None


def main(num_blocks: int, rounds: int, report: BenchReport) -> int:
    layout, good = layout_of(2 * num_blocks), True
    dram_nbytes = int(1.1 * num_blocks * layout.page_nbytes) + 2**28
    with tempfile.TemporaryDirectory(prefix="mp-") as run_dir, PoolProcess(run_dir, dram_nbytes) as pool:
        side = KvSide(run_dir, pool.address, KvMemory(layout, device="cuda"))
        try:
            for case, value, unit, baseline in measure(side, num_blocks, rounds):
                report.add(case, value, unit, baseline)
                good = good and (unit != "1 = yes" or value == 1.0)
        finally:
            side.close()
    return 0 if good else 1


if __name__ == "__main__":
    parser = bench_parser(__doc__)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pool", nargs=2, metavar=("RUN_DIR", "NBYTES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pool:
        serve_pool(args.pool[0], int(args.pool[1]))
        sys.exit(0)
    if not torch.cuda.is_available():
        print("gpu_kv: no CUDA device here, nothing to do", file=sys.stderr)
        sys.exit(0)
    sys.exit(main(args.blocks, args.rounds, BenchReport.from_options("gpu_kv", args)))
