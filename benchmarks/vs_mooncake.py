"""The same client program on Mooncake's own store and on ours, in one run and in turns.

    python benchmarks/vs_mooncake.py [--json] [--rounds N] [--quick] [--only WORD ...] [--upstream-python PATH]

Upstream is its wheel (version in _mooncake_systems.py) in an environment of its own, which is made by pip under
~/.cache/moonpool unless --upstream-python names one. It needs Debian's libibverbs1, librdmacm1 and libnuma1. Without it
ours is measured alone.

A master, a process that offers memory and two clients, which offer none, run per system: upstream over tcp, ours over
tcp (the node shares no memory) and ours on the same machine. The clients are _mooncake_client.py, which uses
`mooncake.store` alone. The writer puts new values from registered memory. The reader, which did not write them, asks
`batch_is_exist` for all, as engines do, and reads each one twice into registered memory: the first pass is shown as
cold, the second as warm. What it reads is compared with what was written. One thread per client.

A figure is the best of the rounds, in which the systems take turns. `ratio` is ours to upstream's in this run and `aim`
what it should be; aims that were missed are listed at the end on standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _mooncake_systems import WHEEL, ClientFailed, PoolSystem, find_upstream, start_ours, start_upstream

from moonpool.bench.report import BenchReport, bench_parser

KIB, MIB = 1 << 10, 1 << 20
KEY_NBYTES = 64
THREADS = 1
UPSTREAM, TCP, SHM = "upstream", "ours, tcp", "ours, same machine"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moonpool" / "vs_mooncake"
_OFFERED_NBYTES = 4 << 30
_HEADER_NBYTES = 4 * KIB  # what a value takes beside its bytes


class Aim(NamedTuple):
    tcp: float
    shm: float


class PoolCase(NamedTuple):
    """Values of one size, put and read `batch` at a time."""

    name: str
    nbytes: int
    num_values: int
    batch: int
    get: Aim
    put: Aim

    @property
    def total_nbytes(self) -> int:
        return self.num_values * self.nbytes


def make_cases(quick: bool, batch: int) -> list[PoolCase]:
    part = 10 if quick else 1
    one, large_get, large_put, many = Aim(1.5, 4.0), Aim(1.5, 4.0), Aim(2.0, 4.0), Aim(3.0, 5.0)
    return [
        PoolCase("4 KiB one by one", 4 * KIB, 1000 // part, 1, one, Aim(1.5, 2.5)),
        PoolCase("64 KiB one by one", 64 * KIB, 500 // part, 1, one, Aim(1.5, 2.5)),
        PoolCase("1 MiB one by one", MIB, 60 // part, 1, large_get, large_put),
        PoolCase("16 MiB one by one", 16 * MIB, max(2, 5 // part), 1, large_get, large_put),
        PoolCase(f"4 KiB in batches of {batch}", 4 * KIB, max(batch, 4000 // part), batch, many, many),
    ]


class Figures:
    """The best figure of each system for each case, and its unit."""

    def __init__(self) -> None:
        self._best: dict[str, dict[str, float]] = {}
        self._facts: dict[str, tuple[str, int, Aim]] = {}

    def add(self, case: str, system: str, value: float, unit: str, batch: int, aim: Aim) -> None:
        of_case = self._best.setdefault(case, {})
        of_case[system] = max(of_case.get(system, 0.0), value)
        self._facts[case] = unit, batch, aim

    def add_to(self, report: BenchReport) -> list[str]:
        """Report all; return the aims that were missed."""
        missed: list[str] = []
        for case, best in self._best.items():
            unit, batch, aim = self._facts[case]
            how: dict[str, Any] = {"batch": batch, "key_nbytes": KEY_NBYTES, "threads": THREADS}
            upstream = best.get(UPSTREAM)
            if upstream is not None:
                report.add(f"{case}, {UPSTREAM}", upstream, unit, compared=False, **how)
            for system, value in ((name, value) for name, value in best.items() if name != UPSTREAM):
                wanted = aim.tcp if system == TCP else aim.shm
                report.add(f"{case}, {system}", value, unit, upstream, aim=wanted, **how)
                if upstream is not None and value / upstream < wanted:
                    missed.append(f"{case}, {system}: {value / upstream:.2f} instead of {wanted:g}")
        return missed


def measure(system: PoolSystem, case: PoolCase, label: str, figures: Figures) -> None:
    arguments = {
        "label": label,
        "count": case.num_values,
        "nbytes": case.nbytes,
        "key_nbytes": KEY_NBYTES,
        "batch": case.batch,
    }
    unit, worth = ("per s", case.num_values) if case.nbytes < MIB else ("GB/s", case.total_nbytes / 1e9)
    put_s = system.writer.do("put", **arguments)
    cold_s, warm_s = system.reader.do("get", **arguments)
    figures.add(f"put {case.name}", system.name, worth / put_s, unit, case.batch, case.put)
    figures.add(f"get {case.name}, cold", system.name, worth / cold_s, unit, case.batch, case.get)
    figures.add(f"get {case.name}, warm", system.name, worth / warm_s, unit, case.batch, case.get)


def measure_exist(system: PoolSystem, case: PoolCase, label: str, figures: Figures) -> None:
    """Ask for the values of a case that was measured."""
    for name, batch in (("exist, one key a call", 1), (f"exist, batches of {case.num_values:,}", case.num_values)):
        times_s = [
            system.reader.do("exist", label=label, count=case.num_values, key_nbytes=KEY_NBYTES, batch=batch)
            for _ in range(3)
        ]
        figures.add(name, system.name, case.num_values / min(times_s), "keys/s", batch, Aim(1.3, 1.3))


def run(options: argparse.Namespace) -> Figures:
    cases = make_cases(options.quick, options.batch)
    memory_nbytes = max(case.total_nbytes for case in cases)
    stored_nbytes = sum(case.total_nbytes + case.num_values * _HEADER_NBYTES for case in cases) * options.rounds
    offered_nbytes = max(_OFFERED_NBYTES, 2 * stored_nbytes)
    python, reason = find_upstream(options.upstream_python, _CACHE / WHEEL.rpartition("=")[2])
    if python is None:
        say(f"upstream is not measured: {reason}")
    starts: list[Callable[[], contextlib.AbstractContextManager[PoolSystem]]] = []
    if python is not None:
        starts.append(lambda: start_upstream(python, offered_nbytes, memory_nbytes))
    starts.append(lambda: start_ours(TCP, False, offered_nbytes, memory_nbytes))
    starts.append(lambda: start_ours(SHM, True, offered_nbytes, memory_nbytes))
    figures = Figures()
    with contextlib.ExitStack() as stack:
        systems = [stack.enter_context(start()) for start in starts]
        for number in range(options.rounds):
            _take_turns(systems, cases, number, options.only, figures)
    return figures


def _take_turns(
    systems: Sequence[PoolSystem], cases: Sequence[PoolCase], number: int, only: Sequence[str], figures: Figures
) -> None:
    """One round: each case on each system, beginning with another system each time."""
    first = number % len(systems)
    for case in cases:
        for system in (*systems[first:], *systems[:first]):
            label = f"r{number}-{case.nbytes}-{case.batch}"
            if not only or any(word in case.name for word in only):
                measure(system, case, label, figures)
                if case.nbytes == 4 * KIB and case.batch == 1:
                    measure_exist(system, case, label, figures)


def say(line: str) -> None:
    print(f"vs_mooncake: {line}", file=sys.stderr, flush=True)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=500, help="values per call of the cases in batches")
    parser.add_argument("--quick", action="store_true", help="shows that it works, not how fast")
    parser.add_argument("--only", action="append", default=[], help="cases whose name has this word")
    parser.add_argument("--upstream-python", default=None, help="interpreter of an environment with upstream's wheel")
    options = parser.parse_args()
    report = BenchReport.from_options("vs_mooncake", options)
    say(f"the machine's load before: {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores")
    try:
        figures = run(options)
    except ClientFailed as error:
        raise SystemExit(f"vs_mooncake: {error}") from error
    for each in figures.add_to(report):
        say(f"below its aim: {each}")


if __name__ == "__main__":
    main()
