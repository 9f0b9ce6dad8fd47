"""Replays one seed and prints its history: python -m tests.store.simulation [--storm] SEED"""

from __future__ import annotations

import argparse
import sys
import traceback

from .sim_patches import simulated
from .sim_run import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.store.simulation")
    parser.add_argument("seed", type=int)
    parser.add_argument("--storm", action="store_true", help="the master dies again and again (sim_faults.Storm)")
    args = parser.parse_args()
    with simulated():
        outcome = run_seed(args.seed, keep_log=True, is_storm=args.storm)
    print("\n".join(outcome.log))
    print(f"seed {outcome.seed}: {outcome.num_events} events, {outcome.num_messages} messages, {outcome.digest}")
    print(f"troubles: {', '.join(outcome.kinds) or 'none'}")
    if outcome.failure is not None:
        traceback.print_exception(outcome.failure)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
