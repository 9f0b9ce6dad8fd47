"""The cuda transport beside plain cuMemcpy: another process's GPU memory, read and written by CUDA IPC.

    python benchmarks/transfer_cuda.py [--json] [--size-mib 64] [--rounds 20]

Ours is a peer's handle (owner, incarnation and generations asked for on every call). The baseline copies as much
between the same kinds of memory of one process, with nobody asked. Both sides are measured in turns, medians are
compared. The claims: the copies themselves run at 0.95 of plain cuMemcpy or more (the owner's own reads and writes show
them alone), and pageable memory is no slower than by plain cuMemcpy, questions included. A question to the owner costs
about 0.1 ms, so transfers of a few MiB are bound by it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import Unavailable
from moonpool.bench.report import BenchReport, bench_parser
from moonpool.transfer.control import ControlHandler
from moonpool.transfer.memory.buffers import address_of
from moonpool.transfer.memory.location import host_id
from moonpool.transfer.transports.cuda.driver import driver
from moonpool.transfer.transports.cuda.segment import DeviceSegment
from moonpool.transfer.transports.cuda.transport import CudaRemote, CudaTransport
from moonpool.transfer.transports.tcp.transport import TcpTransport

MIB = 1 << 20
T = 30.0


def own(nbytes: int, granule_nbytes: int) -> None:
    """The owner's process; ends with its standard input."""
    segment = DeviceSegment.create("pool", nbytes, device=0, granule_nbytes=granule_nbytes or None, incarnation=1)
    control = ControlHandler()
    tcp = TcpTransport(control=control)
    cuda = CudaTransport(control, tcp.serve(segment), tcp.line)
    endpoint = cuda.serve(segment)
    descriptor = SegmentDescriptor(name="pool", nbytes=nbytes, incarnation=1, host=host_id(), endpoints=(endpoint,))
    print(msgspec.json.encode(descriptor).decode(), flush=True)
    sys.stdin.read()
    cuda.close()
    tcp.close()


@contextmanager
def opened(nbytes: int, granule_nbytes: int) -> Iterator[CudaRemote]:
    command = [sys.executable, __file__, "--own", str(nbytes), str(granule_nbytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    descriptor = msgspec.json.decode(process.stdout.readline(), type=SegmentDescriptor)
    tcp = TcpTransport(None)
    transport = CudaTransport(ControlHandler(), None, tcp.line)
    remote = transport.open(descriptor, descriptor.endpoints[0], timeout_s=T)
    try:
        yield remote
    finally:
        remote.close()
        transport.close()
        tcp.close()
        process.communicate(timeout=20)


def seconds(act: Callable[[], None]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def compare(
    report: BenchReport, case: str, rounds: int, nbytes: int, ours: Callable[[], None], plain: Callable[[], None]
) -> None:
    for act in (ours, plain, ours, plain):  # the first time pages are touched and lanes are made
        act()
    pairs = [(seconds(ours), seconds(plain)) for _ in range(rounds)]
    value, baseline = (nbytes / statistics.median(times) / 1e9 for times in zip(*pairs, strict=True))
    report.add(case, value, "GB/s", baseline)


def measure(options: argparse.Namespace) -> None:
    report = BenchReport.from_options("transfer_cuda", options)
    nbytes = options.size_mib * MIB
    device = driver().device(0)
    mine, other = device.allocate(nbytes), device.allocate(nbytes)
    own_segment = DeviceSegment.create("own", nbytes, device=0, incarnation=1)
    target = own_segment.span
    pageable = np.ones(nbytes, np.uint8)
    _, pinned = device.pinned(nbytes)
    pinned[:] = pageable.data

    def plain(target: int, source: int) -> Callable[[], None]:
        def copy() -> None:
            with device.current():
                driver().call("cuMemcpy", target, source, nbytes)
                driver().call("cuStreamSynchronize", 0)

        return copy

    hosts: dict[str, tuple[Any, int]] = {
        "pinned": (pinned, address_of(pinned)),
        "pageable": (pageable, pageable.ctypes.data),
    }
    with opened(nbytes, 0) as remote, opened(nbytes, MIB) as fenced:
        for kind, (memory, address) in hosts.items():
            compare(report, f"owner's read {options.size_mib} MiB to {kind} memory", options.rounds, nbytes,
                    partial(own_segment.read_into, 0, [memory], timeout_s=T),
                    plain(address, mine.address))  # fmt: skip
            compare(report, f"owner's write {options.size_mib} MiB from {kind} memory", options.rounds, nbytes,
                    partial(own_segment.write_from, 0, [memory], generation=1, timeout_s=T),
                    plain(mine.address, address))  # fmt: skip
            compare(report, f"read {options.size_mib} MiB to {kind} memory", options.rounds, nbytes,
                    partial(remote.read_into, 0, [memory], timeout_s=T),
                    plain(address, mine.address))  # fmt: skip
            compare(report, f"write {options.size_mib} MiB from {kind} memory", options.rounds, nbytes,
                    partial(remote.write_from, 0, [memory], generation=1, timeout_s=T),
                    plain(mine.address, address))  # fmt: skip
            compare(report, f"fenced write {options.size_mib} MiB from {kind} memory", options.rounds, nbytes,
                    partial(fenced.write_from, 0, [memory], generation=1, timeout_s=T),
                    plain(mine.address, address))  # fmt: skip
        compare(report, f"read {options.size_mib} MiB to GPU memory", options.rounds, nbytes,
                lambda: remote.read_into(0, [target], timeout_s=T),
                plain(other.address, mine.address))  # fmt: skip
        small(report, remote, mine.address, pageable)


def small(report: BenchReport, remote: CudaRemote, mine: int, pageable: np.ndarray) -> None:
    """Many small pieces, far apart, and a single one."""
    device = driver().device(0)
    items = [(at * 16384, pageable[at * 4096 : (at + 1) * 4096]) for at in range(1000)]

    def plain() -> None:
        with device.current():
            for offset, page in items:
                driver().call("cuMemcpy", page.ctypes.data, mine + offset, page.nbytes)

    rates = [(1000 / seconds(lambda: remote.read_many(items, timeout_s=T)), 1000 / seconds(plain)) for _ in range(10)]
    value, baseline = (statistics.median(column) for column in zip(*rates, strict=True))
    report.add("read 1000 x 4 KiB to pageable memory", value, "transfers/s", baseline)
    page = items[0][1]

    def plain_page() -> None:
        with device.current():
            driver().call("cuMemcpy", page.ctypes.data, mine, page.nbytes)

    times = [(seconds(lambda: remote.read_into(0, [page], timeout_s=T)), seconds(plain_page)) for _ in range(200)]
    value, baseline = (statistics.median(column) * 1e6 for column in zip(*times, strict=True))
    report.add("time of one read of 4 KiB", value, "us", baseline)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--size-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--own", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.own:
        own(*options.own)
        return
    try:
        driver()
    except Unavailable as error:
        print(f"transfer_cuda: nothing is measured: {error}", file=sys.stderr)
        return
    measure(options)


if __name__ == "__main__":
    main()
