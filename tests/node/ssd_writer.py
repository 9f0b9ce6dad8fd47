"""A process that writes an SSD log until it is killed, and says what it has done: one line each, when it is done.

    python ssd_writer.py FOLDER SEED

It goes on where the log stands, and says `opening` before. Lines: `append KEY GENERATION`, `remove KEY GENERATION`; a
`start ...` line names what is about to be done, so that whoever reads knows what may have happened last.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "helpers"))  # this runs as a script

from ssd_world import KIB, item_of

from moonpool.base.errors import NoSpace
from moonpool.node.ssd import LogLocation, SsdConfig, SsdLog

CONFIG = SsdConfig(max_nbytes=10 * 128 * KIB, file_nbytes=128 * KIB, batch_nbytes=64 * KIB)
NUM_KEYS = 20
SIZES = [(1,), (4096,), (9000, 200), (30 * KIB,)]


def sizes_of(generation: int) -> tuple[int, ...]:
    return SIZES[generation % len(SIZES)]


def say(text: str) -> None:
    os.write(1, text.encode())  # in one piece, and past any buffer


def append(log: SsdLog, present: dict[bytes, int], generation: int, rng: random.Random) -> None:
    keys = rng.sample(range(NUM_KEYS), rng.randint(1, 4))
    items = [item_of(b"%036d" % key, generation, sizes_of(generation)) for key in keys]
    say("".join(f"start append {item.key.decode()} {generation}\n" for item in items))
    for item, result in zip(items, log.append_many(items), strict=True):
        if isinstance(result, LogLocation):
            present[item.key] = generation
            say(f"append {item.key.decode()} {generation}\n")
        else:
            assert isinstance(result, NoSpace), result


def remove(log: SsdLog, present: dict[bytes, int], count: int, rng: random.Random) -> None:
    for key in rng.sample(sorted(present), min(count, len(present))):
        generation = present.pop(key)
        say(f"start remove {key.decode()} {generation}\n")
        log.remove([(key, generation)])
        if log.stats().num_pending_tombstones == 0:
            say(f"remove {key.decode()} {generation}\n")


def main(folder: str, seed: int) -> None:
    rng = random.Random(seed)
    say("opening\n")
    with SsdLog.open(folder, CONFIG) as log:
        log.refuse((stored.key, stored.generation) for stored in log.salvaged())  # as a master that knows none of them
        present = {stored.key: stored.generation for stored in log.items()}
        generation = seed * 1_000_000
        while True:
            generation += 1
            append(log, present, generation, rng)
            if rng.random() < 0.3:
                remove(log, present, 1 if log.stats().free_nbytes else 5, rng)
            if rng.random() < 0.2:
                log.sync()
            log.compact(rng.choice([1, 64 * KIB]))
            for file in log.drained():
                log.release(file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
