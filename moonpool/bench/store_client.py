"""A client process of `moonpool bench store`: does what its standard input says, one line of JSON at a time.

python -m moonpool.bench.store_client MASTER RUN_DIR       [what, {arguments}] -> {"result": ...} or {"error": ...}
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec

from moonpool.base.process import watch_inherited
from moonpool.bench.store_calls import CallWork
from moonpool.bench.store_objects import ObjectWork
from moonpool.bench.store_ping import PingWork
from moonpool.bench.store_pool import BenchReply
from moonpool.bench.store_redis import RedisWork


def main(address: str, run_dir: str) -> None:
    watch_inherited()
    with ExitStack() as stack:
        kinds = (ObjectWork(address, run_dir, stack), CallWork(address, stack), PingWork(address, stack), RedisWork())
        work: dict[str, Callable[..., Any]] = {}
        for kind in kinds:
            work |= kind.work()
        for line in sys.stdin.buffer:
            what, arguments = msgspec.json.decode(line)
            sys.stdout.buffer.write(msgspec.json.encode(_attempt(work[what], arguments)) + b"\n")
            sys.stdout.buffer.flush()


def _attempt(work: Callable[..., Any], arguments: dict[str, Any]) -> BenchReply:
    try:
        return BenchReply(result=work(**arguments))
    except Exception as error:  # noqa: BLE001 - whatever it is, the benchmark that waits for us must hear of it
        return BenchReply(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
