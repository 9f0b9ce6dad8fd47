"""Replays one seed and prints its history: python -m tests.store.simulation SEED"""

from __future__ import annotations

import sys
import traceback

from .sim_patches import simulated
from .sim_run import run_seed


def main() -> int:
    with simulated():
        outcome = run_seed(int(sys.argv[1]), keep_log=True)
    print("\n".join(outcome.log))
    print(f"seed {outcome.seed}: {outcome.num_events} events, {outcome.num_messages} messages, {outcome.digest}")
    print(f"troubles: {', '.join(outcome.kinds) or 'none'}")
    if outcome.failure is not None:
        traceback.print_exception(outcome.failure)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
