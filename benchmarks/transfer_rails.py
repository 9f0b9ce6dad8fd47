"""Two rails between two machines (namespaces on this one, shaped by tc; needs root), used together and cut.

    python benchmarks/transfer_rails.py [--json] [--mib 512]

The claims: two equal rails move at least 1.85 times what one does, two of 1:4 at least 0.9 of their sum; a rail that
is unplugged or falls silent in the middle costs no stall over 1 s and no byte, and is used again within 5 s, also where
a rail stands in for the one that serves the memory; a transfer that begins while a rail is silent takes under 10 s.

The noise: a host that takes processor time away lowers a rate, and each of its stalls is added to the longest stall.
With other work on both cores, ratios of 1.9 to 2.0 and of 1.0 were seen, and stalls up to 0.6 s.
"""

from __future__ import annotations

import argparse
import json
import time

from _rails_lab import RailsLab, missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--mib", type=int, default=512, help="size of each transfer")
    options = parser.parse_args()
    reason = missing()
    if reason is not None:
        raise SystemExit(reason)
    nbytes = options.mib << 20
    for op in ("read", "write"):
        compare_rates(options.json, op, nbytes)
        for fault in ("unplugged", "silent"):
            cut_and_return(options.json, op, fault)
            cut_and_return(options.json, op, fault, preferred=1)
        begin_in_silence(options.json, op)


def compare_rates(as_json: bool, op: str, nbytes: int) -> None:
    with RailsLab([1000, 1000]) as lab:
        one = lab.transfer(op=op, nbytes=nbytes // 2, only=0)
        both = lab.transfer(op=op, nbytes=nbytes)
        report(as_json, f"{op}: two rails against one", both.rate / 1e6, "MB/s", one.rate / 1e6)
    with RailsLab([1000, 250]) as lab:
        fast = lab.transfer(op=op, nbytes=nbytes // 2, only=0)
        slow = lab.transfer(op=op, nbytes=nbytes // 8, only=1)
        both = lab.transfer(op=op, nbytes=nbytes)
        total = (fast.rate + slow.rate) / 1e6
        report(as_json, f"{op}: rails of 4:1 against their sum", both.rate / 1e6, "MB/s", total)


def cut_and_return(as_json: bool, op: str, fault: str, *, preferred: int | None = None) -> None:
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
    report(as_json, f"{op}: longest stall, {which} {fault}", result.longest_stall_s, "s", 1.0)
    report(as_json, f"{op}: {which} used again, was {fault}", (used_s or float("inf")) - returned_s, "s", 5.0)


def begin_in_silence(as_json: bool, op: str) -> None:
    """The limit, 10 s, is the baseline."""
    with RailsLab([400, 400]) as lab:
        with lab.silent(0):
            started_s = time.monotonic()
            result = lab.transfer(op=op, nbytes=64 << 20)
            took_s = time.monotonic() - started_s
        if not result.correct:
            raise SystemExit(f"{op}, silent from the start: wrong bytes")
        report(as_json, f"{op}: 64 MiB, one rail silent from the start", took_s, "s", 10.0)


def report(as_json: bool, case: str, value: float, unit: str, baseline: float) -> None:
    line = {"bench": "transfer_rails", "case": case, "value": round(value, 3), "unit": unit,
            "baseline": round(baseline, 3), "ratio": round(value / baseline, 3)}  # fmt: skip
    text = f"{case:<40} {value:9.3f} {unit}  ({baseline:.3f}, ratio {value / baseline:.3f})"
    print(json.dumps(line) if as_json else text, flush=True)


if __name__ == "__main__":
    main()
