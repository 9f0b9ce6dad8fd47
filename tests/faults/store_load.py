"""A client under load: a process that puts, replaces, removes and reads until it is told to pause, or killed.

Each has keys of its own, which nobody else writes, and reads those of all. Before and after every change it notes in a
ledger, a file that outlives it, what it is about to do and what was acknowledged; so whoever reads the ledgers knows
what may and what must be found in the pool. Wrong bytes end it.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from severe import LostObject, WrongBytes, check_bytes
from store_values import cut, value_of, version_in
from waiting import wait_until

from moonpool.base.errors import MoonpoolError
from moonpool.store import Store
from moonpool.store.client import ClientConfig, Put, PutOptions, ahead, view_ledger
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine

REPLACE = PutOptions(replace=True)
ABSENT = 0  # as a version: the key is not there
KEYS_EACH = 1000  # client c has the numbers from 1000 c on


def key_of(number: int) -> bytes:
    return b"key-%d" % number


def run_load(
    address: str,
    run_dir: str,
    ledger: str,
    client_number: int,
    num_clients: int,
    num_keys: int,
    max_nbytes: int,
    seed: int,
    shm: bool = True,
    transfer_timeout_s: float = 10.0,
    rpc_timeout_s: float = 10.0,
) -> None:
    """Says "ready"; works between the lines "go" and "pause"; says "paused"; ends with its standard input."""
    view_ledger.SPARE_S = ahead._LOOK_S = 0.1  # what a paused client still holds it gives back soon
    config = ClientConfig(transfer_timeout_s=transfer_timeout_s, rpc_timeout_s=rpc_timeout_s, retry_s=rpc_timeout_s)
    with (
        TransferEngine(TransferConfig(run_dir=run_dir, shm=shm, tcp_host=None)) as engine,
        Store(address, engine=engine, config=config) as client,
    ):
        load = _Load(client, Path(ledger), random.Random(seed), max_nbytes)
        first = client_number * KEYS_EACH
        load.mine = range(first, first + num_keys)
        load.all = [each * KEYS_EACH + n for each in range(num_clients) for n in range(num_keys)]
        print("ready")
        load.run()


class _Load:
    mine: range
    all: list[int]

    def __init__(self, client: Store, ledger: Path, rng: random.Random, max_nbytes: int) -> None:
        self._client, self._rng, self._max_nbytes = client, rng, max_nbytes
        self._history = read_ledger(ledger)
        self._ledger = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._going = threading.Event()

    def run(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        actions: Sequence[Callable[[], None]] = [
            self._put,
            self._put,
            self._put_many,
            self._remove,
            self._get,
            self._get,
            self._get_many_into,
            self._get_range,
            self._view,
        ]
        while True:
            if not self._going.is_set():
                print("paused")
                self._going.wait()
            try:
                self._rng.choice(actions)()
            except MoonpoolError as error:
                self._note("error", 0, 0, error.code)
            except AssertionError as error:
                self._note("wrong", 0, 0, str(error).replace("\n", " "))
                raise

    def _listen(self) -> None:
        for line in sys.stdin:
            if line.strip() == "go":
                self._going.set()
            else:
                self._going.clear()
        os._exit(0)

    def _note(self, what: str, number: int, version: int, more: str = "-") -> None:
        line = f"{time.monotonic():.6f} {what} {number} {version} {more}\n"
        os.write(self._ledger, line.encode())
        self._history.add(line)

    def _next_put(self, number: int) -> Put:
        version = self._history.last_version + 1
        self._note("begin", number, version)
        data = value_of(number, version, self._rng.randrange(24, self._max_nbytes))
        return Put(key_of(number), cut(data, self._rng.randint(1, 3)), options=REPLACE)

    def _put(self) -> None:
        number = self._rng.choice(self.mine)
        put = self._next_put(number)
        version = self._history.last_version
        (error,) = self._client.put_objects([put])
        self._note("done" if error is None else "failed", number, version, "-" if error is None else error.code)

    def _put_many(self) -> None:
        numbers = self._rng.sample(self.mine, 3)
        puts, versions = [], []
        for number in numbers:
            puts.append(self._next_put(number))
            versions.append(self._history.last_version)
        for number, version, error in zip(numbers, versions, self._client.put_objects(puts), strict=True):
            self._note("done" if error is None else "failed", number, version, "-" if error is None else error.code)

    def _remove(self) -> None:
        number = self._rng.choice(self.mine)
        self._note("begin", number, ABSENT)
        if self._client.remove_many([key_of(number)], force=self._rng.random() < 0.5)[0]:
            self._note("done", number, ABSENT)
        else:
            self._note("failed", number, ABSENT, "leased")

    def _check(self, data: bytes | bytearray | memoryview, number: int) -> None:
        version = version_in(data, number)
        if number in self.mine:
            allowed = self._history.allowed(number)
            if version not in allowed:
                raise LostObject(f"version {version} of {number} came back, allowed were {sorted(allowed)}")

    def _get(self) -> None:
        number = self._rng.choice(self.all)
        data = self._client.get(key_of(number))
        if data is not None:
            self._check(data, number)

    def _get_many_into(self) -> None:
        numbers = self._rng.sample(self.all, 4)
        buffers = [bytearray(self._max_nbytes) for _ in numbers]
        got = self._client.get_many_into([key_of(number) for number in numbers], [[each] for each in buffers])
        for number, buffer, nbytes in zip(numbers, buffers, got, strict=True):
            if isinstance(nbytes, int):
                self._check(memoryview(buffer)[:nbytes], number)

    def _get_range(self) -> None:
        number = self._rng.choice(self.all)
        head = bytearray(24)
        if self._client.get_ranges(key_of(number), [(0, head)]) is not None:
            check_bytes(head[:8], number.to_bytes(8, "little"), f"the start of {number}")

    def _view(self) -> None:
        number = self._rng.choice(self.mine)  # others' may be replaced, and read right all the same
        for view in self._client.view_many([key_of(number)]):
            if not isinstance(view, MoonpoolError):
                with view:
                    self._check(b"".join(view.pieces), number)


@dataclass
class Ledger:
    """What a client's notes tell."""

    last_version: int = 0
    num_acknowledged: int = 0
    acknowledged: dict[int, tuple[int, float]] = field(default_factory=dict)  # version and when, by number
    unknown: dict[int, set[int]] = field(default_factory=dict)  # versions begun since then, by number
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        at, what, raw_number, raw_version, more = line.split(" ", 4)
        number, version = int(raw_number), int(raw_version)
        if what == "begin":
            self.last_version = max(self.last_version, version)
            self.unknown.setdefault(number, set()).add(version)
        elif what == "done":
            self.num_acknowledged += 1
            self.acknowledged[number] = (version, float(at))
            self.unknown.pop(number, None)
        elif what == "wrong":
            self.wrong.append(line)
        else:
            self.errors.append(more.strip())

    def allowed(self, number: int) -> set[int]:
        """The versions that may be found, if any is found at all."""
        acknowledged = self.acknowledged.get(number)
        return {ABSENT if acknowledged is None else acknowledged[0], *self.unknown.get(number, ())}

    def is_certain(self, number: int, before_s: float) -> bool:
        """Whether its last change was a put, acknowledged before that moment."""
        version, at_s = self.acknowledged.get(number, (ABSENT, 0.0))
        return version != ABSENT and number not in self.unknown and at_s < before_s


def check_ledgers(ledgers: Iterable[Ledger]) -> None:
    """Nobody has seen a wrong byte, or a value that had been replaced or removed."""
    if wrong := [line for ledger in ledgers for line in ledger.wrong]:
        raise WrongBytes("".join(wrong))


def wait_acknowledged(ledgers: Sequence[Path], num_more: int) -> None:
    """Return when the clients with these ledgers have had so many more changes acknowledged."""

    def num_acknowledged() -> int:
        return sum(path.read_bytes().count(b" done ") for path in ledgers if path.exists())

    enough = num_acknowledged() + num_more
    wait_until(lambda: num_acknowledged() >= enough, f"{num_more} more changes are acknowledged")


def read_ledger(path: Path) -> Ledger:
    found = Ledger()
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # else it was killed while it wrote
                found.add(line)
    return found
