"""The other process of `moonpool bench transfer`: serves two segments, one fenced, until its standard input ends.

python -m moonpool.bench.owner RUN_DIR NBYTES SETTINGS      prints the segments' descriptors as JSON

SETTINGS are those of WireConfig that differ from their defaults, as JSON.
"""

from __future__ import annotations

import json
import sys

import msgspec

from moonpool.transfer import TransferConfig, TransferEngine

GRANULE_NBYTES = 4096


def main(run_dir: str, nbytes: int, settings_json: str) -> None:
    with TransferEngine(TransferConfig(run_dir=run_dir, **json.loads(settings_json))) as engine:
        plain = engine.register("bench", nbytes=nbytes)
        fenced = engine.register("fenced", nbytes=nbytes, granule_nbytes=GRANULE_NBYTES)
        print(msgspec.json.encode([plain, fenced]).decode(), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
