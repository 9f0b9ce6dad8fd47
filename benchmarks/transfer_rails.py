"""Two rails between two machines (namespaces on this one, shaped by tc; needs root), used together and cut.

    python benchmarks/transfer_rails.py [--json] [--mib 512]

The claims: two equal rails move at least 1.85 times what one does, two of 1:4 at least 0.9 of their sum; a rail that
is unplugged or falls silent in the middle costs no stall over 1 s and no byte, and is used again within 5 s, also where
a rail stands in for the one that serves the memory; a transfer that begins while a rail is silent takes under 10 s.

The noise: a host that takes processor time away lowers a rate, and each of its stalls is added to the longest stall.
With other work on both cores, ratios of 1.9 to 2.0 and of 1.0 were seen, and stalls up to 0.6 s.
"""

from __future__ import annotations

import time

from _rails_lab import RailsLab, missing

from moonpool.bench.report import BenchReport, bench_parser


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of each transfer")
    options = parser.parse_args()
    reason = missing()
    if reason is not None:
        raise SystemExit(reason)
    report = BenchReport.from_options("transfer_rails", options)
    nbytes = options.mib << 20
    for op in ("read", "write"):
        compare_rates(report, op, nbytes)
        for fault in ("unplugged", "silent"):
            cut_and_return(report, op, fault)
            cut_and_return(report, op, fault, preferred=1)
        begin_in_silence(report, op)


def compare_rates(report: BenchReport, op: str, nbytes: int) -> None:
    with RailsLab([1000, 1000]) as lab:
        one = lab.transfer(op=op, nbytes=nbytes // 2, only=0)
        both = lab.transfer(op=op, nbytes=nbytes)
        report.add(f"{op}: two rails against one", both.rate / 1e6, "MB/s", one.rate / 1e6)
    with RailsLab([1000, 250]) as lab:
        fast = lab.transfer(op=op, nbytes=nbytes // 2, only=0)
        slow = lab.transfer(op=op, nbytes=nbytes // 8, only=1)
        both = lab.transfer(op=op, nbytes=nbytes)
        total = (fast.rate + slow.rate) / 1e6
        report.add(f"{op}: rails of 4:1 against their sum", both.rate / 1e6, "MB/s", total)


def cut_and_return(report: BenchReport, op: str, fault: str, *, preferred: int | None = None) -> None:
    """The limits, 1 s and 5 s, are the baselines. With `preferred`, that rail is cut, and the other stands in."""
    with RailsLab([1000, 1000], preferred=preferred) as lab:
        lab.start(op=op, seconds=8.0)
        time.sleep(1.0)
        with lab.fault(fault, 1):
            time.sleep(3.0)
        returned_s = time.monotonic()
        result = lab.finish()
    if not result.correct:
        raise SystemExit(f"{op}, {fault}: wrong bytes")
    used_s = result.first_use_s(1 if preferred is None else 0, returned_s)  # the preferred one is sampled first
    which = "one rail" if preferred is None else "the memory's rail"
    report.add(f"{op}: longest stall, {which} {fault}", result.longest_stall_s, "s", 1.0)
    report.add(f"{op}: {which} used again, was {fault}", (used_s or float("inf")) - returned_s, "s", 5.0)


def begin_in_silence(report: BenchReport, op: str) -> None:
    """The limit, 10 s, is the baseline."""
    with RailsLab([400, 400]) as lab:
        with lab.silent(0):
            started_s = time.monotonic()
            result = lab.transfer(op=op, nbytes=64 << 20)
            took_s = time.monotonic() - started_s
        if not result.correct:
            raise SystemExit(f"{op}, silent from the start: wrong bytes")
        report.add(f"{op}: 64 MiB, one rail silent from the start", took_s, "s", 10.0)


if __name__ == "__main__":
    main()
