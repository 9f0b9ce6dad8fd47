"""tcp and shm between two processes: beside iperf3, beside memcpy, and in small pieces.

    python benchmarks/transfer.py [--json] [--rounds 3]

The same as `moonpool bench transfer`. The claims: tcp READ and WRITE of 1 MiB at 0.9 of iperf3 or more, shm at 0.9 of a
single-thread memcpy, a view in under 50 us, 100,000 (shm) and 50,000 (tcp) transfers/s of 4 KiB.
"""

from __future__ import annotations

from moonpool.bench import transfer as bench_transfer
from moonpool.bench.report import BenchReport, bench_parser

if __name__ == "__main__":
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    report = BenchReport.from_options("transfer", options)
    bench_transfer.run(report, rounds=options.rounds, seconds=bench_transfer.SECONDS)
