"""Another process with pages on the GPU, for test_gpu_link.py: `serve RUN_DIR`, or `pull RUN_DIR MASTER NUM_BLOCKS`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu_kv import KvSide, keys_of, layout_of

from moonpool.engine.kv_tensor import KvMemory
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.transports.cuda.segment import DeviceSegment
from moonpool.worker.kv_link.device_pieces import DevicePieces

NUM_PAGES = 16


def serve(run_dir: str) -> None:
    """Serve the pages; for each line of standard input, print the checksums of all pieces."""
    layout = layout_of(NUM_PAGES)
    kv = KvMemory(layout, device="cuda")
    pieces = DevicePieces(kv)
    segment = DeviceSegment.adopt("child/kv", kv.tensor, granule_nbytes=layout.page_nbytes, incarnation=1)
    with TransferEngine(TransferConfig(run_dir=run_dir)) as engine:
        print(msgspec.json.encode(engine.serve(segment)).decode(), flush=True)
        for _ in sys.stdin:
            found = pieces.checksums(range(NUM_PAGES), range(layout.num_layers))
            print(msgspec.json.encode(found.tolist()).decode(), flush=True)


def pull(run_dir: str, master: str, num_blocks: int) -> None:
    """Pull blocks and put them back under other keys, until the process is killed."""
    side = KvSide(run_dir, master, KvMemory(layout_of(num_blocks), device="cuda"))
    side.page_lock()
    keys, others = keys_of(1, num_blocks), keys_of(2, num_blocks)
    print("ready", flush=True)
    while True:
        side.pull(keys, list(range(num_blocks)))
        side.put(others, list(range(num_blocks)))
        side.remove(others)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        pull(sys.argv[2], sys.argv[3], int(sys.argv[4]))
