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
from moonpool.store import Store


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
    with Store(address, run_dir=run_dir) as store:
        print("put poem:      ", store.put("poem", b"The moon is a pool of light."))
        print("put it again:  ", store.put("poem", b"another text"), "(a key keeps its first value)")
        print("get poem:      ", store.get("poem"))

        block = bytes(range(256)) * 4096 * 3  # 3 MiB, about a block of KV
        keys = [b"block-%d" % number for number in range(8)]
        for key in keys:
            store.put(key, block)
        print("8 blocks there:", store.exist_many(keys))
        page = bytearray(len(block))
        store.get_into(keys[3], page)
        print("bytes equal:   ", page == block)

        for number in range(8, 40):  # more than fits: the least recently used that nobody has a lease on go
            store.put(b"block-%d" % number, block)
        print("block-0 there: ", store.exist(keys[0]), "(asking for it leased it)")
        print("block-8 there: ", store.exist("block-8"), "- why?", store.why("block-8"))

        stats = store.stats()
        print(f"the pool:       {stats.num_objects} objects, {format_nbytes(stats.used_nbytes)} of", end=" ")
        print(f"{format_nbytes(stats.capacity_nbytes)}, counters {stats.counters}")
        print("this store:    ", store.counters())


if __name__ == "__main__":
    asyncio.run(main())
