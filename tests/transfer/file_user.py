"""A second process on one file, until its standard input ends (so it never outlives the test).

usage: file_user.py serve PATH        opens the file, serves it as "seg", prints the descriptor as JSON
       file_user.py patch DESCRIPTOR COUNT
                                      writes COUNT odd little pieces, each 0xEE, to the odd places; prints "done"
"""

from __future__ import annotations

import sys

import msgspec

from moonpool.transfer import FileSegment, SegmentDescriptor, TransferConfig, TransferEngine

PIECE_NBYTES = 100  # several writers share every block


def serve(path: str) -> None:
    config = TransferConfig(run_dir="/nonexistent", shm=False, tcp_host=None)
    with FileSegment.open(path, name="seg", incarnation=7) as segment, TransferEngine(config) as engine:
        print(msgspec.json.encode(engine.serve(segment)).decode(), flush=True)
        sys.stdin.read()


def patch(descriptor: str, count: int) -> None:
    config = TransferConfig(run_dir="/nonexistent", shm=False, tcp_host=None)
    with TransferEngine(config) as engine:
        remote = engine.open(msgspec.json.decode(descriptor, type=SegmentDescriptor))
        for number in range(count):
            at = (2 * number + 1) * PIECE_NBYTES
            remote.write_from(at, [b"\xee" * PIECE_NBYTES], generation=1, timeout_s=30)
        print("done", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        patch(sys.argv[2], int(sys.argv[3]))
