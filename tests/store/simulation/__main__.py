"""Replays one seed and prints its history: python -m tests.store.simulation [--storm | --late | --busy] SEED"""

from __future__ import annotations

import argparse
import sys
import traceback

from .sim_faults import KINDS
from .sim_patches import simulated
from .sim_run import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.store.simulation")
    parser.add_argument("seed", type=int)
    kinds = parser.add_mutually_exclusive_group()
    for name, kind in KINDS.items():
        if name:
            text = (kind.__doc__ or "").partition("\n")[0]
            kinds.add_argument(f"--{name}", dest="kind", action="store_const", const=name, help=text)
    parser.set_defaults(kind="")
    args = parser.parse_args()
    with simulated():
        outcome = run_seed(args.seed, keep_log=True, kind=args.kind)
    print("\n".join(outcome.log))
    print(f"seed {outcome.seed}: {outcome.num_events} events, {outcome.num_messages} messages, {outcome.digest}")
    print(f"troubles: {', '.join(outcome.kinds) or 'none'}")
    if outcome.failure is not None:
        traceback.print_exception(outcome.failure)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
