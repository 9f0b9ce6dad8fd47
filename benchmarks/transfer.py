"""tcp and shm between two processes: beside iperf3, beside memcpy, and in small pieces.

    python benchmarks/transfer.py [--json] [--rounds 3]

The same as `moonpool bench transfer`. The claims: tcp READ and WRITE of 1 MiB at 0.9 of iperf3 or more, shm at 0.9 of a
single-thread memcpy, a view in under 50 us, 100,000 (shm) and 50,000 (tcp) transfers/s of 4 KiB.
"""

from __future__ import annotations

import argparse

from moonpool.bench import transfer as bench_transfer

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    bench_transfer.run(as_json=options.json, rounds=options.rounds, seconds=bench_transfer.SECONDS)
