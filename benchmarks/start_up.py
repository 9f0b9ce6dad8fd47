"""What commands compute before a user sees something: processor seconds, not seconds of the clock.

    python benchmarks/start_up.py [--json]

The least of five runs each, so that files are in the page cache. Other work on the machine still adds to it. The
claims are the baselines: 1 s for `moonpool --help`, 3 s for `moonpool doctor`.
"""

from __future__ import annotations

import resource
import subprocess
import sys

from moonpool.bench.report import BenchReport, bench_parser

CLAIMED_S = {"--help": 1.0, "doctor": 3.0}
NUM_RUNS = 5


def children_cpu_s() -> float:
    """What the processes that this one has waited for have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_cpu_s(argument: str) -> float:
    before_s = children_cpu_s()
    # `doctor` ends with 1 on a machine that cannot serve.
    subprocess.run([sys.executable, "-m", "moonpool", argument], capture_output=True, timeout=600, check=False)
    return children_cpu_s() - before_s


def main() -> None:
    report = BenchReport.from_options("start_up", bench_parser(__doc__).parse_args())
    for argument, claimed_s in CLAIMED_S.items():
        value = min(run_cpu_s(argument) for _ in range(NUM_RUNS))
        report.add(f"moonpool {argument}", value, "s of a core", claimed_s)


if __name__ == "__main__":
    main()
