"""A pool of your own in one process: a master, a node with 64 MiB, and a client that puts and gets.

    python examples/01_pool_by_hand.py

The roles are the same ones that `moonpool master` and `moonpool node` start; here they share an event loop.
"""

from __future__ import annotations

import asyncio
import tempfile

from moonpool.base.units import format_nbytes
from moonpool.master.service import Master, MasterConfig
from moonpool.node.config import NodeConfig
from moonpool.node.service import Node
from moonpool.store.client import StoreClient
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="moonpool-") as folder:
        master = Master(MasterConfig(listen=f"unix:{folder}/master.sock", data_dir=f"{folder}/master"))
        address = await master.start()
        node = Node(NodeConfig(name="here", master_address=address, dram_nbytes=64 << 20, run_dir=f"{folder}/run"))
        try:
            await node.start()
            # The client blocks, so it gets a thread beside the loop that serves it.
            await asyncio.to_thread(use_the_pool, address, f"{folder}/run")
        finally:
            await node.close()
            await master.close()


def use_the_pool(address: str, run_dir: str) -> None:
    config = TransferConfig(run_dir=run_dir, tcp_host=None)  # it only reaches out; it serves nothing
    with TransferEngine(config) as engine, StoreClient(address, engine) as client:
        print("put poem:      ", client.put(b"poem", b"The moon is a pool of light."))
        print("put it again:  ", client.put(b"poem", b"another text"), "(a key keeps its first value)")
        print("get poem:      ", client.get(b"poem"))

        block = bytes(range(256)) * 4096 * 3  # 3 MiB, about a block of KV
        keys = [b"block-%d" % number for number in range(8)]
        for key in keys:
            client.put(key, block)
        print("8 blocks there:", client.exist(keys))
        page = bytearray(len(block))
        client.get_into(keys[3], page)
        print("bytes equal:   ", page == block)

        for number in range(8, 40):  # more than fits: the least recently used that nobody has a lease on go
            client.put(b"block-%d" % number, block)
        print("block-0 there: ", client.exist(keys[:1])[0], "(asking for it leased it)")
        print("block-8 there: ", client.exist([b"block-8"])[0], "- why?", client.why(b"block-8"))

        stats = client.stats()
        print(f"the pool:       {stats.num_objects} objects, {format_nbytes(stats.used_nbytes)} of", end=" ")
        print(f"{format_nbytes(stats.capacity_nbytes)}, counters {stats.counters}")
        print("this client:   ", client.counters())


if __name__ == "__main__":
    asyncio.run(main())
