"""Makes owners of a segment by the dozen: each is a fork of this process, so it costs milliseconds.

usage: owner_nursery.py RUN_DIR NBYTES

For every line it reads it forks an owner and prints {"pid": ..., "shm": descriptor, "tcp": descriptor}. The owners
serve until they are killed; those that still live end with this process, and it ends with its standard input.
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec
from nursery import fork_owners

from moonpool.transfer import Segment, SegmentDescriptor
from moonpool.transfer.memory.location import host_id
from moonpool.transfer.transports.shm.transport import ShmTransport
from moonpool.transfer.transports.tcp.transport import TcpTransport


def own(run_dir: str, nbytes: int) -> None:
    """Never returns."""
    segment = Segment.allocate("pool", nbytes, granule_nbytes=65536, incarnation=1)
    found: dict[str, object] = {"pid": os.getpid()}
    transports = [ShmTransport(run_dir), TcpTransport("127.0.0.1")]
    for transport in transports:
        found[transport.scheme] = SegmentDescriptor(
            name="pool", nbytes=nbytes, incarnation=1, host=host_id(), endpoints=(transport.serve(segment),)
        )
    print(msgspec.json.encode(found).decode(), flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    fork_owners(lambda: own(sys.argv[1], int(sys.argv[2])))
