"""A process that serves GPU memory until its standard input ends (so it never outlives the test).

usage: cuda_owner.py KIND NBYTES GRANULE_NBYTES      (0: no fence)

KIND is plain, torch, or pool (torch's expandable segments).

Prints the descriptor as JSON, then answers every line it reads: "sum" with the checksum of its memory, "leave" and
"return" by withdrawing and serving again, "other" by serving other memory (all ones) under the same name.
"""

from __future__ import annotations

import os
import sys

import msgspec
import numpy as np

from moonpool.base.checksum import crc32c
from moonpool.transfer import SegmentDescriptor, host_id
from moonpool.transfer.control import ControlHandler
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.register import make_segment
from moonpool.transfer.transports.cuda.segment import DeviceSegment
from moonpool.transfer.transports.cuda.transport import CudaTransport
from moonpool.transfer.transports.tcp.transport import TcpTransport


def make(kind: str, nbytes: int, granule_nbytes: int | None) -> DeviceSegment:
    if kind == "plain":
        made: Segment = make_segment(
            "pool", nbytes=nbytes, location="cuda:0", granule_nbytes=granule_nbytes, incarnation=1
        )
    else:
        if kind == "pool":
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        import torch

        # Part of a larger tensor, so neither the start of an allocation nor its end.
        whole = torch.zeros(nbytes + 4096, dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()
        made = make_segment("pool", whole[1024 : 1024 + nbytes], granule_nbytes=granule_nbytes, incarnation=1)
    assert isinstance(made, DeviceSegment)
    return made


def contents(segment: DeviceSegment) -> np.ndarray:
    found = np.zeros(segment.nbytes, dtype=np.uint8)
    segment.read_into(0, [found], timeout_s=30)
    return found


def main(kind: str, nbytes: int, granule_nbytes: int) -> None:
    segment = make(kind, nbytes, granule_nbytes or None)
    segment.write_from(0, [np.random.default_rng(1).bytes(nbytes)], generation=0, timeout_s=30)
    control = ControlHandler()
    tcp = TcpTransport(control=control)
    cuda = CudaTransport(control, tcp.serve(segment), tcp.line)
    endpoint = cuda.serve(segment)
    descriptor = SegmentDescriptor(
        name="pool", nbytes=nbytes, incarnation=1, host=host_id(), endpoints=(endpoint,), location=segment.location
    )
    print(msgspec.json.encode(descriptor).decode(), flush=True)
    for line in sys.stdin:
        match line.strip():
            case "leave":
                cuda.unserve("pool")
            case "return":
                cuda.serve(segment)
            case "other":
                cuda.unserve("pool")
                segment = make("plain", nbytes, granule_nbytes or None)
                segment.write_from(0, [b"\1" * nbytes], generation=0, timeout_s=30)
                cuda.serve(segment)
        print(crc32c(contents(segment).data), flush=True)
    tcp.close()
    cuda.close()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]))
