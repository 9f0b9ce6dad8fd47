"""Run as a script: appends numbered records to a journal for ever, saying after each the number it has appended.

`journal_writer.py DIRECTORY`. Takes a snapshot now and then: the lowest and the highest number so far.
"""

from __future__ import annotations

import sys
from pathlib import Path

from moonpool.master.journal import Journal, JournalConfig, SnapshotWriter


def main(directory: Path) -> None:
    journal, records = Journal.open(directory, JournalConfig(sync_s=0.005, snapshot_min_nbytes=20_000))
    number = max((int(record[:12]) for record in records), default=-1) + 1
    writer: SnapshotWriter | None = None
    print("ready", number, flush=True)
    while True:
        journal.append([b"%012d" % each + b"." * (each % 700) for each in range(number, number + 3)])
        number += 3
        print(number - 1, flush=True)
        if writer is not None and writer.finish_soon().done():
            writer.finish_soon().result()
            writer = None
        if writer is None and journal.should_snapshot:
            writer = journal.begin_snapshot()
            writer.add(b"%012d up to here" % (number - 1))
            writer.finish_soon()


main(Path(sys.argv[1]))
