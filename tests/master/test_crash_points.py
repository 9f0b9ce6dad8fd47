"""A master's disk refuses any one operation, or any two, and the master dies after any: the next one starts, and knows
a beginning of what was done that has all that was acknowledged.

All that journal and snapshot write goes through a disk that counts. One life is played through for each choice of the
operation that fails and of the last one before `kill -9`: every single one and every pair, none sampled.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from journal_world import BY_HAND
from ssd_world import FAST_DIR
from state_pool import RULES, Pool

from moonpool.base.errors import MoonpoolError
from moonpool.master.journal import Journal, folder, frames, snapshot
from moonpool.master.journal.folder import CLOCK_STARTS_S
from moonpool.master.rules import PoolRules
from moonpool.master.state import PoolState
from moonpool.master.state.recovery import restore
from moonpool.master.state.snapshot import snapshot_records

_COUNTED = ("write", "writev", "pwrite", "fsync", "fdatasync", "rename", "replace", "ftruncate", "unlink", "mkdir")
_NEED_SPACE = ("open", "write", "writev", "mkdir")
NEVER = 10**9


class Plan(NamedTuple):
    """The numbers of the operations that fail, of those in the time in which the disk is full, and of the last one that
    is done."""

    fail: frozenset[int] = frozenset()
    full: range = range(0)
    last: int = NEVER

    def fails(self, number: int, name: str) -> bool:
        return number in self.fail or (number in self.full and name in _NEED_SPACE)


class CountingDisk:
    """Stands for the module `os` where the journal uses it. From the death on, nothing is done any more."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.done: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name == "open":
            return self._open
        return self._counted(name) if name in _COUNTED else getattr(os, name)

    def _open(self, path: Path, flags: int, *mode: int) -> int:
        opened: int = (self._counted("open") if flags & os.O_CREAT else os.open)(path, flags, *mode)
        return opened

    @property
    def is_dead(self) -> bool:
        return len(self.done) > self._plan.last + 1 or len(self.done) - 1 == self._plan.last

    def die(self) -> None:
        self._plan = self._plan._replace(last=len(self.done) - 1)

    def _counted(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = len(self.done)
            self.done.append(name)
            if number > self._plan.last:
                raise OSError(errno.EIO, "the process is dead")
            if self._plan.fails(number, name):
                if name in ("write", "writev", "pwrite") and number % 2:
                    _write_half(*args)
                raise OSError(errno.ENOSPC, "No space left on device")
            return getattr(os, name)(*args, **kwargs)

        return call


def _write_half(fd: int, data: bytes | Sequence[bytes], *_: int) -> None:
    whole = bytes(data) if isinstance(data, bytes | memoryview) else b"".join(data)
    os.write(fd, whole[: len(whole) // 2])


class _Later:
    """Stands for the snapshot's thread: it runs when it is waited for."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self._target: Callable[[], None] | None = target

    def start(self) -> None:
        pass

    def join(self) -> None:
        target, self._target = self._target, None
        if target is not None:
            target()


class _Threading:
    Thread = _Later

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


_SECONDS = itertools.count(1_000)


class _Clock(NamedTuple):
    """Replaces folder.WallClock. Each reading is a second later, and sleep() returns at once."""

    now_s: Callable[[], float] = lambda: float(CLOCK_STARTS_S + next(_SECONDS))
    sleep: Callable[[float], None] = lambda _: None


Contents = dict[bytes, tuple[int, int, int]]


def contents(state: PoolState) -> Contents:
    """Return what is stored: by key which put, and where."""
    table = state.index.table
    return {
        table.key(slot): (table.version[slot], table.dram_segment[slot], table.dram_offset[slot])
        for slot in table.slots()
    }


class Life(Pool):
    """A master with a real journal. `known` has the contents after each change, and `num_acknowledged` says how many of
    the changes have been acknowledged, with all before."""

    def __init__(self, where: Path) -> None:
        self.file, _ = Journal.open(where, BY_HAND)
        self.known: list[Contents] = [{}]
        self.num_acknowledged = 0
        super().__init__("a", granules=12, max_objects=64)

    def check(self) -> None:
        for entry in self.state.take_records():
            self.known.append(contents(self.state))
            with contextlib.suppress(MoonpoolError):
                self.file.append(entry)
                self.num_acknowledged = len(self.known) - 1

    def snapshot_while(self, *changes: Callable[[], object]) -> None:
        """Take a snapshot, and make the changes after it was begun."""
        with contextlib.suppress(MoonpoolError):
            writer = self.file.begin_snapshot()
            parts = snapshot_records(self.state, self.now_s)
            chunks = next(parts)
            for change in changes:
                change()
            for chunk in itertools.chain(chunks, *parts):
                writer.add(chunk)
            writer.finish_soon()
            writer.join()

    def sync(self) -> None:
        with contextlib.suppress(MoonpoolError):
            self.file.sync()

    def retry(self) -> None:
        with contextlib.suppress(MoonpoolError):
            self.file.retry_unwritten()


Script = Callable[[Life], list[Callable[[], object]]]


def whole_life(life: Life) -> list[Callable[[], object]]:
    """Space that a removed object had gets another one's each time: a gap makes two of them overlap."""
    return [
        partial(life.put, b"0", 4),
        partial(life.put, b"1", 4),
        life.sync,
        partial(life.remove, b"1", force=True),
        partial(life.snapshot_while, partial(life.put, b"a", 4), partial(life.remove, b"0", force=True)),
        partial(life.put, b"b", 8),
        life.retry,
        life.sync,
        partial(life.remove, b"b", force=True),
        partial(life.snapshot_while, partial(life.put, b"c", 8)),
        partial(life.remove, b"c", force=True),
        partial(life.put, b"d", 8),
    ]


def short_life(life: Life) -> list[Callable[[], object]]:
    """The same in little: one snapshot."""
    return [
        partial(life.put, b"0", 8),
        partial(life.remove, b"0", force=True),
        partial(life.snapshot_while, partial(life.put, b"a", 8)),
        partial(life.remove, b"a", force=True),
        life.retry,
        partial(life.put, b"b", 8),
    ]


def play(where: Path, plan: Plan, script: Script) -> int:
    """Play one life and check what the next master finds. Return how many operations there were."""
    disk = CountingDisk(plan)
    with using(disk):
        try:
            life = Life(where)
        except MoonpoolError:  # it could not start
            life = None
        if life is not None:
            for change in script(life):
                if not disk.is_dead:
                    change()
            disk.die()
            life.file.close()
    check_next_master(where, life, plan)
    return len(disk.done)


def check_next_master(where: Path, life: Life | None, plan: Plan) -> None:
    journal, replay = Journal.open(where, BY_HAND)
    try:
        state = PoolState(PoolRules(**{**RULES, "max_objects": 64}), journal.epoch, journalled=True)
        restore(state, replay, 0.0)
    except MoonpoolError as error:
        raise AssertionError(f"{plan}: the next master does not start: {error}") from error
    finally:
        journal.close()
    if life is not None:
        found = contents(state)
        at = [number for number, known in enumerate(life.known) if known == found]
        assert at, f"{plan}: the next master knows what never was: {found}"
        assert at[-1] >= life.num_acknowledged, f"{plan}: it has forgotten what was acknowledged"


@contextlib.contextmanager
def using(disk: CountingDisk) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (folder, frames, snapshot):
            patch.setattr(module, "os", disk)
        patch.setattr(folder, "WallClock", _Clock)
        patch.setattr(snapshot, "threading", _Threading())
        yield


def plans(num_operations: int) -> Iterator[Plan]:
    """All that can go wrong once or twice."""
    numbers = range(num_operations)
    for number in numbers:
        yield Plan(last=number)
        yield Plan(frozenset({number}))
    for first, second in itertools.combinations(numbers, 2):
        yield Plan(frozenset({first}), last=second)
        yield Plan(frozenset({first, second}))
        yield Plan(full=range(first, second))
        yield Plan(full=range(first, second), last=second)


def check_all(script: Script) -> int:
    """Return the number of lives."""
    with tempfile.TemporaryDirectory(dir=FAST_DIR) as folder_name:
        num_operations, count = play(Path(folder_name) / "whole", Plan(), script), 0
        for count, plan in enumerate(plans(num_operations), 1):
            where = Path(folder_name) / str(count)
            play(where, plan, script)
            shutil.rmtree(where)
    return count


def test_every_crash_point_and_every_pair() -> None:
    assert check_all(short_life) >= 2000


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_every_crash_point_and_every_pair_of_a_longer_life() -> None:
    assert check_all(whole_life) >= 10_000
