"""The other process of `moonpool bench transfer`: serves one segment until its standard input ends.

python -m moonpool.cli.bench_owner RUN_DIR NBYTES      prints the segment's descriptor as JSON
"""

from __future__ import annotations

import sys

import msgspec

from moonpool.transfer import Segment, TransferConfig, TransferEngine


def main(run_dir: str, nbytes: int) -> None:
    with (
        Segment.allocate("bench", nbytes, incarnation=1) as segment,
        TransferEngine(TransferConfig(run_dir=run_dir)) as engine,
    ):
        print(msgspec.json.encode(engine.serve(segment)).decode(), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
