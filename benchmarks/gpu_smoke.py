"""The engine on a GPU: bf16, random weights of an 8B shape; KV through the pool to another process and back.

Prints prefill and decode rates, the pool's rates from and to the device, and whether the bytes that came back are the
bytes that were computed. Exits non-zero when they are not. Needs a CUDA device; torch, no model file.

    python benchmarks/gpu_smoke.py --json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import torch

from moonpool.base.keys import CacheIdentity, chain_keys
from moonpool.engine.config import EngineConfig, ModelConfig
from moonpool.engine.engine import Engine
from moonpool.engine.kv_memory import PIECE_LAYOUT, KvLayout
from moonpool.engine.kv_tensor import KvMemory
from moonpool.engine.llama import LlamaModel
from moonpool.engine.load import make_scheduler
from moonpool.engine.runner import Runner
from moonpool.engine.sequence import AdmittedSequence, FullBlock, SamplingParams
from moonpool.engine.weights import random_weights
from moonpool.master.service import Master, MasterConfig
from moonpool.node.config import NodeConfig
from moonpool.node.service import Node
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine
from moonpool.worker.kv_link.device_pieces import DevicePieces
from moonpool.worker.kv_link.pool import PoolWriter
from moonpool.worker.kv_link.pull import Puller

MODEL = ModelConfig(
    architecture="llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32,
    num_heads=32, num_kv_heads=8, head_dim=128, max_position=131_072, rms_norm_eps=1e-5, rope_theta=500_000.0,
)  # fmt: skip
BLOCK_TOKENS = 64
NUM_BLOCKS = 32
NUM_PAGES = 160
TOKENS = [(i * 7919) % 100_000 + 100 for i in range(NUM_BLOCKS * BLOCK_TOKENS)]
SENT, RETURNED = bytes(32), bytes(range(32))  # chain roots of the two directions
LAYOUT = KvLayout.of(MODEL, num_pages=NUM_PAGES, block_tokens=BLOCK_TOKENS, dtype="bfloat16")
IDENTITY = CacheIdentity(
    model_name="random-8b", weights_digest="none", dtype="bfloat16", num_layers=MODEL.num_layers,
    num_kv_heads=MODEL.num_kv_heads, head_dim=MODEL.head_dim, block_tokens=BLOCK_TOKENS,
    piece_layout=PIECE_LAYOUT, rope=MODEL.rope_text,
).digest()  # fmt: skip


def say(case: str, value: float, unit: str, baseline: float | None = None) -> None:
    ratio = value / baseline if baseline else None
    line = {"bench": "gpu_smoke", "case": case, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio}
    print(json.dumps(line) if ARGS.json else f"{case:<34} {value:12.2f} {unit}", flush=True)


class Side:
    """One process's end: KV on the device, and a client of the pool."""

    def __init__(self, run_dir: str, master: str, stack: contextlib.ExitStack) -> None:
        self.kv = KvMemory(LAYOUT, device="cuda")
        self.pieces = DevicePieces(self.kv)
        transfer = stack.enter_context(TransferEngine(TransferConfig(run_dir=run_dir)))
        transfer.use_gpu(self.pieces.device)
        store = Store(master, engine=transfer, config=ClientConfig(uses_gpu=True))
        stack.callback(store.close)
        self.writer = PoolWriter(store, self.pieces, IDENTITY)
        self.puller = Puller(store, self.pieces, IDENTITY)
        stack.callback(self.puller.close)

    def put(self, root: bytes, pages: list[int]) -> float:
        """Puts the pages under the keys of `root`'s chain; bytes per second."""
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        keys = chain_keys(root, TOKENS, BLOCK_TOKENS)
        self.writer.put_pages({page: FullBlock("smoke", n, page, keys[n]) for n, page in enumerate(pages)})
        assert not self.writer.failures, self.writer.failures
        return len(pages) * LAYOUT.page_nbytes / (time.perf_counter() - started_s)

    def pull(self, root: bytes, pages: list[int]) -> float:
        """Pulls that chain's blocks into the pages; bytes per second. Every piece is verified on the way."""
        keys = chain_keys(root, TOKENS, BLOCK_TOKENS)
        wanted = AdmittedSequence("smoke", 0, tuple(range(len(keys))), tuple(pages), tuple(keys))
        result = self.puller.start(wanted, lambda *_: None, lambda: None).wait_end(60)
        assert result.failure is None, result.failure
        assert result.num_good == len(pages)
        return result.nbytes / result.seconds


@contextlib.contextmanager
def pool(run_dir: str) -> Iterator[str]:
    """A master and a node of this process, on a thread of their own; yields the master's address."""
    address, ready, stop = f"unix:{run_dir}/master.sock", threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        master = Master(MasterConfig(data_dir=run_dir, listen=address))
        node = Node(NodeConfig(name="node", master_address=address, dram_nbytes=2_000_000_000, run_dir=run_dir))
        await master.start()
        await node.start()
        ready.set()
        await stop.wait()
        await node.close()
        await master.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(60), "the pool did not start"
    yield address
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def run_engine(side: Side) -> list[int]:
    """Prefill and decode; returns the pages that hold the prompt's KV."""
    weights = random_weights(MODEL, dtype="bfloat16", device="cuda")
    config = EngineConfig(num_pages=NUM_PAGES, block_tokens=BLOCK_TOKENS, max_batch_tokens=2048, max_model_len=8192)
    engine = Engine(make_scheduler(MODEL, config), Runner(LlamaModel(MODEL, weights), side.kv))
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    engine.generate([[t + 1 for t in TOKENS]], one)  # warm-up, other tokens
    started_s = time.perf_counter()
    engine.generate([TOKENS], one)
    say("prefill 2048 tokens", len(TOKENS) / (time.perf_counter() - started_s), "tokens/s")
    prompts = [[(i * 31 + n) % 100_000 for i in range(256)] for n in range(8)]
    engine.generate(prompts, one)
    started_s = time.perf_counter()
    engine.generate(prompts, SamplingParams(max_tokens=65, temperature=0.0, ignore_eos=True))
    say("decode of 8 sequences", 8 * 64 / (time.perf_counter() - started_s), "tokens/s")
    keys = chain_keys(bytes(32), TOKENS, BLOCK_TOKENS)
    found = [engine.scheduler.pages.page_of(key) for key in keys]
    assert all(page is not None for page in found), "the prompt's pages are still cached"
    return [page for page in found if page is not None]


def first_process() -> int:
    with tempfile.TemporaryDirectory(prefix="mp-") as run_dir, pool(run_dir) as master, contextlib.ExitStack() as stack:
        side = Side(run_dir, master, stack)
        computed = run_engine(side)
        say("put from the device", side.put(SENT, computed) / 1e9, "GB/s")
        subprocess.run([sys.executable, __file__, "--peer", run_dir, master, *sys.argv[1:]], check=True)
        others = [page for page in range(NUM_PAGES) if page not in computed][:NUM_BLOCKS]
        side.kv.clear(others)
        say("pull what came back", side.pull(RETURNED, others) / 1e9, "GB/s")
        same = all(
            torch.equal(side.kv.tensor[a].view(torch.uint8), side.kv.tensor[b].view(torch.uint8))
            for a, b in zip(computed, others, strict=True)
        )
        say("bytes equal after the round trip", float(same), "1 = yes")
        return 0 if same else 1


def second_process(run_dir: str, master: str) -> int:
    """Pulls to its own device memory, puts it back under other keys."""
    with contextlib.ExitStack() as stack:
        side = Side(run_dir, master, stack)
        pages = list(range(NUM_BLOCKS))
        say("pull into another process", side.pull(SENT, pages) / 1e9, "GB/s")
        say("put back", side.put(RETURNED, pages) / 1e9, "GB/s")
        return 0


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--json", action="store_true")
parser.add_argument("--peer", nargs=2, metavar=("RUN_DIR", "MASTER"), help=argparse.SUPPRESS)
if __name__ == "__main__":
    ARGS = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_smoke: no CUDA device here, nothing to do", file=sys.stderr)
        sys.exit(0)
    sys.exit(second_process(*ARGS.peer) if ARGS.peer else first_process())
