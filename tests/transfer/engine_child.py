"""A whole engine in a process of its own, driven by lines of JSON; it ends with its standard input.

usage: engine_child.py SETTINGS      {"config": {...}, "master": address or null, "segments": {name: nbytes}}

Says {"addresses", "incarnation"} when all is registered, then answers each command: see Child.obey().
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonpool.base.checksum import crc32c
from moonpool.master.service import Master, MasterConfig
from moonpool.store import MasterDirectory
from moonpool.transfer import TransferConfig, TransferEngine, TransferOp, TransferRequest

if TYPE_CHECKING:  # the child does without
    from forked_script import ForkServer


@contextlib.contextmanager
def running_master(folder: Path) -> Iterator[str]:
    """The address of a real one, on a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    made = Master(MasterConfig(data_dir=str(folder / "master"), listen=f"unix:{folder}/m.sock"))
    try:
        yield asyncio.run_coroutine_threadsafe(made.start(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(made.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class EngineProcess:
    """The other end, for tests."""

    def __init__(
        self,
        server: ForkServer,
        run_dir: Path,
        segments: dict[str, int] | None = None,
        *,
        master: str | None = None,
        **config: Any,
    ) -> None:
        """`server` forks this file."""
        settings = {"config": {"run_dir": str(run_dir), **config}, "master": master, "segments": segments or {}}
        self.process = server.start(json.dumps(settings))
        hello = self._receive()
        self.address: str = hello["addresses"][0]
        self.incarnation: int = hello["incarnation"]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._receive()

    def kill(self) -> None:
        """-9, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


class Child:
    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine

    def obey(self, do: str, **arguments: Any) -> object:
        return getattr(self, do)(**arguments)

    def crc(self, name: str) -> int:
        return crc32c(self.engine.segment(name).memory)

    def fill(self, name: str, byte: int) -> None:
        segment = self.engine.segment(name)
        segment.memory[:] = bytes([byte]) * segment.nbytes

    def take(self, timeout_s: float) -> list[tuple[str, str]]:
        return [(each.segment, each.message.decode()) for each in self.engine.notifications(timeout_s)]

    def crc_when_told(self, name: str) -> int | None:
        """The segment's checksum the moment a message is there."""
        return self.crc(name) if self.engine.notifications(5.0) else None

    def write(self, target: str, byte: int, nbytes: int, notify: str | None = None) -> None:
        request = TransferRequest(TransferOp.WRITE, self.engine.open(target), 0, [bytes([byte]) * nbytes])
        self.engine.submit([request], notify=None if notify is None else notify.encode()).wait()


def main(config: dict[str, Any], master: str | None, segments: dict[str, int]) -> None:
    directory = None if master is None else MasterDirectory(master, ttl_s=1.0)
    with TransferEngine(TransferConfig(**config), directory=directory) as engine:
        for name, nbytes in segments.items():
            engine.register(name, nbytes=nbytes)
        print(json.dumps({"addresses": engine.addresses, "incarnation": engine.incarnation}), flush=True)
        child = Child(engine)
        for line in sys.stdin:
            print(json.dumps(child.obey(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
