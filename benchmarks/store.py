"""The pool: a master, a node and two clients, beside plain loops, iperf3, redis and fio; and a master that grows.

    python benchmarks/store.py [--json] [--case NAME ...] [--quick] [--rounds N] [--objects N | --large] [--folder DIR]

The same as `moonpool bench store`. The claims, checksums on: 1 MiB get into the caller's memory at 0.9 of a loop that
copies and checksums the same bytes (one by one 0.7), a view of an object that was viewed lately in under 80 us, over
tcp 0.75 of iperf3; put 0.8, 0.6 and 0.7; redis-server 4 times slower; exist with leases 15,000 calls/s and 1,500,000
keys/s; put_start + put_end 150,000 objects/s; 4 KiB objects 100,000 gets/s and 60,000 puts/s; SSD get at 0.8 of fio,
offload at 0.6; with --large ten million objects in 8 GB, at half the rates of 100,000, with no pause over 50 ms.
"""

from __future__ import annotations

from moonpool.bench import store as bench_store
from moonpool.bench.report import BenchReport, bench_parser

if __name__ == "__main__":
    parser = bench_parser(__doc__)
    parser.add_argument("--case", action="append", default=[], help=f"one of {', '.join(bench_store.CASES)}")
    parser.add_argument("--quick", action="store_true", help="shows that it works, not how fast")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--objects", type=int, default=None, help="how many the case grow grows to")
    parser.add_argument("--large", action="store_true", help="grow to ten million")
    parser.add_argument("--folder", default=None, help="on the disk that the case ssd measures")
    options = parser.parse_args()
    bench_store.run(
        BenchReport.from_options("store", options),
        cases=options.case,
        quick=options.quick,
        rounds=options.rounds,
        num_objects=options.objects,
        large=options.large,
        folder=options.folder,
    )
