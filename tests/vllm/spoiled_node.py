"""A node of the pool as a process. Each line `[offset, nbytes]` on its input overwrites that part of its memory with
zeros; it ends when its input does.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import sys

from moonpool.node.config import NodeConfig
from moonpool.node.service import Node


def say(line: str) -> None:
    print(line, flush=True)


async def main() -> None:
    node = Node(NodeConfig(**json.loads(sys.argv[1])))
    await node.start()
    say("mounted")
    while line := await asyncio.to_thread(sys.stdin.readline):
        offset, nbytes = json.loads(line)
        node.segment.memory[offset : offset + nbytes] = bytes(nbytes)
        say("zeroed")
    await node.close()


if __name__ == "__main__":
    faulthandler.enable()
    asyncio.run(main())
