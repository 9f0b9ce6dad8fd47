"""A process that serves one segment until its standard input ends (so it never outlives the test).

usage: segment_owner.py RUN_DIR NBYTES INCARNATION TCP_PORT GRANULE_NBYTES      (0: any port, no fence)

Prints the descriptor as JSON, then answers every line it reads with the checksum of its memory.
"""

from __future__ import annotations

import sys

import msgspec
import numpy as np

from moonpool.base.checksum import crc32c
from moonpool.transfer import Segment, TransferConfig, TransferEngine


def main(run_dir: str, nbytes: int, incarnation: int, tcp_port: int, granule_nbytes: int) -> None:
    config = TransferConfig(run_dir=run_dir, tcp_port=tcp_port)
    with (
        Segment.allocate("pool", nbytes, granule_nbytes=granule_nbytes or None, incarnation=incarnation) as segment,
        TransferEngine(config) as engine,
    ):
        segment.memory[:] = np.random.default_rng(incarnation).bytes(nbytes)
        print(msgspec.json.encode(engine.serve(segment)).decode(), flush=True)
        for _ in sys.stdin:
            print(crc32c(segment.memory), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]))
