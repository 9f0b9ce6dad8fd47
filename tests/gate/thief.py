"""Runs a command while taking processor time away from it, as a busy host does.

    python -m tests.gate.thief --leave 0.5 [--longest-stall 0.5] [--seed N] -- COMMAND...

On each core one process of real-time priority burns for a random time, then sleeps for a random time, so that in the
mean `--leave` of the core remains. The cores stall independently of each other, so that now and then all of them do.
The kernel leaves 5 % to others in any second (sched_rt_runtime_us). This ends with the exit status of the command.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from .child import run_to_end

LEAST_LEFT, MOST_LEFT = 0.2, 0.5
_PR_SET_PDEATHSIG = 1
_TAKEN = struct.Struct("<dd")  # by one thief: seconds of processor time, and the longest stall
_MISSING = (
    "thief: cannot run with real-time priority (SCHED_FIFO): {error}. It needs root or CAP_SYS_NICE; "
    "in a container also a runtime that grants it (docker run --cap-add sys_nice)"
)


def main(arguments: Sequence[str]) -> int:
    options, command = parse(arguments)
    try:
        become_real_time()
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except OSError as error:
        print(_MISSING.format(error=error), file=sys.stderr)
        return 2
    cores = sorted(os.sched_getaffinity(0))
    taken = mmap.mmap(-1, _TAKEN.size * len(cores))
    started_s = time.monotonic()
    thieves: list[int] = []
    try:
        for number, core in enumerate(cores):
            thieves.append(start_thief(number, core, options, taken))
        exit_status = run(command)
    except OSError as error:  # there is no such command
        print(f"thief: {error}", file=sys.stderr)
        return 127
    finally:
        for pid in thieves:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    report(taken, len(cores), time.monotonic() - started_s, options)
    return exit_status


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="tests.gate.thief", usage="%(prog)s --leave SHARE [options] -- COMMAND...")
    parser.add_argument("--leave", type=float, required=True, help="the share of each core that remains, 0.2 to 0.5")
    parser.add_argument("--longest-stall", type=float, default=0.5, help="seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths of stalls")
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    options, command = parser.parse_args(arguments[:at]), list(arguments[at + 1 :])
    if not command:
        parser.error("no command")
    if not LEAST_LEFT <= options.leave <= MOST_LEFT:
        parser.error(f"--leave is {options.leave:g}, and not {LEAST_LEFT:g} to {MOST_LEFT:g}")
    if options.longest_stall <= 0:
        parser.error("--longest-stall is not positive")
    return options, command


def become_real_time() -> None:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(os.sched_get_priority_min(os.SCHED_FIFO)))


def end_with_parent(parent: int, signum: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def run(command: Sequence[str]) -> int:
    parent = os.getpid()
    exit_status = run_to_end(command, signal.SIGTERM, lambda: end_with_parent(parent, signal.SIGTERM))
    return exit_status if exit_status >= 0 else 128 - exit_status


def start_thief(number: int, core: int, options: argparse.Namespace, taken: mmap.mmap) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            end_with_parent(parent, signal.SIGKILL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal: the command may take time to end
            os.sched_setaffinity(0, {core})
            become_real_time()
            steal(random.Random(f"{options.seed}/{core}"), options, taken, number)
        finally:
            os._exit(1)
    return pid


def steal(rng: random.Random, options: argparse.Namespace, taken: mmap.mmap, number: int) -> NoReturn:
    """The mean sleep is to the mean stall as what remains is to what is taken."""
    longest_s, left = options.longest_stall, options.leave / (1 - options.leave)
    longest_yet_s = 0.0
    time.sleep(rng.uniform(0, longest_s))
    while True:
        began_s = time.monotonic()
        end_s = began_s + rng.uniform(0, longest_s)
        while time.monotonic() < end_s:
            pass
        longest_yet_s = max(longest_yet_s, time.monotonic() - began_s)
        _TAKEN.pack_into(taken, number * _TAKEN.size, time.process_time(), longest_yet_s)
        time.sleep(rng.uniform(0, longest_s) * left)


def report(taken: mmap.mmap, num_cores: int, wall_s: float, options: argparse.Namespace) -> None:
    each = [_TAKEN.unpack_from(taken, number * _TAKEN.size) for number in range(num_cores)]
    share = sum(cpu_s for cpu_s, _ in each) / (wall_s * num_cores)
    print(
        f"thief: took {share:.1%} of {num_cores} cores in {wall_s:.1f} s (wanted {1 - options.leave:.0%}), "
        f"the longest stall {max(stall_s for _, stall_s in each):.2f} s, seed {options.seed}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
