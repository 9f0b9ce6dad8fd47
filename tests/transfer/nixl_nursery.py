"""Makes owners of a segment that is served by nixl: each is a fork of this process, which itself never loads UCX.

usage: nixl_nursery.py NBYTES GRANULE_NBYTES

For every line it reads it forks an owner and prints {"pid": ..., "descriptor": ...}. The owners serve until they are
killed; those that still live end with this process, and it ends with its standard input.
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec
import numpy as np
from nursery import fork_owners

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.transfer.memory.location import host_id
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.nixl.transport import NixlTransport
from moonpool.transfer.transports.tcp.transport import TcpTransport


def own(nbytes: int, granule_nbytes: int) -> None:
    """Never returns."""
    segment = Segment.allocate("pool", nbytes, granule_nbytes=granule_nbytes or None, incarnation=1)
    segment.memory[:] = np.random.default_rng(1).bytes(nbytes)
    tcp = TcpTransport("127.0.0.1")
    transport = NixlTransport(tcp.control, tcp.serve(segment), tcp.line)
    endpoints = (transport.serve(segment),)
    descriptor = SegmentDescriptor(name="pool", nbytes=nbytes, incarnation=1, host=host_id(), endpoints=endpoints)
    print(msgspec.json.encode({"pid": os.getpid(), "descriptor": descriptor}).decode(), flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    fork_owners(lambda: own(int(sys.argv[1]), int(sys.argv[2])))
