"""The calls of a client process of `moonpool bench store` to the master alone: no bytes move.

The segments have no memory behind them, so that one master can be filled with a petabyte.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import MoonpoolError, Unavailable, from_wire
from moonpool.base.rpc import BlockingClient, Call
from moonpool.store import messages as m
from moonpool.store.messages import GRANULE_NBYTES

BATCH = 1000
CHAIN = 100  # blocks of one conversation; each continues the one before
_KEY_NBYTES = 36
_SPREAD = 0x9E3779B97F4A7C15F39CC0605CEDC8341082276BF3A27251F86C6A11D0C18E95  # odd, so that keys are unique
_MASK = (1 << 8 * _KEY_NBYTES) - 1
_TIMEOUT_S = 60.0
_PING_EVERY_S = 0.001
_LONG_S = 0.002  # longer waits are kept one by one
_PREPARED = 200_000  # puts whose calls are made before the measurement; more would take too much memory


def block_key(number: int) -> bytes:
    """Return a key that looks like a hash, made from its number."""
    return (((number + 1) * _SPREAD << 32) & _MASK).to_bytes(_KEY_NBYTES, "big")


class CallWork:
    """One connection to the master. Segments stay mounted as long as it is open."""

    def __init__(self, address: str, stack: ExitStack) -> None:
        self._client = BlockingClient(address, m.SERVICE, name="bench")
        stack.callback(self._client.close)

    def work(self) -> dict[str, Callable[..., Any]]:
        return {
            "mount": self.mount,
            "store": self.store,
            "exist": self.exist,
            "exist_many": self.exist_many,
            "lookup_many": self.lookup_many,
        }

    def mount(self, count: int, nbytes: int) -> None:
        """Mount segments that cannot be reached."""
        for number in range(count):
            descriptor = SegmentDescriptor(
                name=f"paper{number}.dram",
                nbytes=nbytes,
                incarnation=time.time_ns(),
                host="nowhere",
                endpoints=(),
                granule_nbytes=GRANULE_NBYTES,
            )
            self._ask(m.MountSegment(node=f"paper{number}", descriptor=descriptor))
            self._ask(m.Heartbeat(segment=descriptor.name, incarnation=descriptor.incarnation))

    def store(self, first: int, count: int, nbytes: int, chained: bool) -> float:
        """Begin and end puts in batches; return objects/s. For many objects this includes making the keys."""
        wanted: Iterable[m.PutStart] = _puts(first, count, nbytes, chained)
        if count <= _PREPARED:
            wanted = list(wanted)
        started_s = time.perf_counter()
        for call in wanted:
            reply = self._ask(call)
            _check(reply.refusals)
            _check(self._ask(m.PutEnd(keys=call.keys, generations=reply.generations)))
        return count / (time.perf_counter() - started_s)

    def exist(self, first: int, count: int, seconds: float) -> float:
        """Return calls/s, with one key each."""
        calls = [m.Exist(keys=[block_key(number)]) for number in range(first, first + min(count, BATCH))]
        return self._rate(calls, seconds, lambda found: found == [True])

    def exist_many(self, first: int, count: int, seconds: float) -> float:
        """Return keys/s, in batches."""
        calls = [m.Exist(keys=keys) for keys in _batches(first, count)]
        return self._rate(calls, seconds, lambda found: all(found)) * BATCH

    def lookup_many(self, first: int, count: int, seconds: float) -> float:
        """Return keys/s, in batches, with the objects' locations."""
        calls = [m.Lookup(keys=keys) for keys in _batches(first, count)]
        return self._rate(calls, seconds, lambda found: None not in found) * BATCH

    def _rate(self, calls: list[Any], seconds: float, is_right: Callable[[Any], bool]) -> float:
        """Return calls/s over `calls`, again and again."""
        _require(is_right(self._ask(calls[0])))
        num_done = 0
        started_s = now_s = time.perf_counter()
        while now_s < started_s + seconds:
            answer = self._ask(calls[num_done % len(calls)])
            num_done += 1
            now_s = time.perf_counter()
        _require(is_right(answer))
        return num_done / (now_s - started_s)

    def _ask(self, call: Call[Any]) -> Any:
        return self._client.call(call, timeout_s=_TIMEOUT_S)


def _puts(first: int, count: int, nbytes: int, chained: bool) -> Iterator[m.PutStart]:
    options = m.PutOptions()
    for start in range(first, first + count, BATCH):
        numbers = range(start, min(start + BATCH, first + count))
        keys = [block_key(number) for number in numbers]
        parents = [b"" if number % CHAIN == 0 else block_key(number - 1) for number in numbers] if chained else None
        yield m.PutStart(keys=keys, sizes=[nbytes] * len(keys), options=options, parents=parents)


def _check(refusals: dict[int, m.Refusal]) -> None:
    for refusal in refusals.values():
        raise from_wire(refusal.code, refusal.message)


def _require(is_right: bool) -> None:
    if not is_right:
        raise Unavailable("the master lost an object")


def _batches(first: int, count: int) -> Iterator[list[bytes]]:
    """Yield up to 100 batches, each spread over the whole range, so that no CPU cache holds the entries."""
    num_batches = max(1, min(100, count // BATCH))
    step = max(1, count // BATCH)
    for batch in range(num_batches):
        yield [block_key(first + (batch + index * step) % count) for index in range(min(BATCH, count))]


class PingWork:
    """Measures how long the master keeps a caller waiting: one small call every millisecond, beside other load.

    `ping` begins; `pings` returns what was measured since the last time. The caller asks for a real-time priority and
    disables the garbage collector, so that the master is measured and not the caller's own wait for its processor.
    """

    def __init__(self, address: str, stack: ExitStack) -> None:
        self._client = BlockingClient(address, m.SERVICE, name="bench ping")
        self._stop = threading.Event()
        self._asking = threading.Lock()  # held during a call
        self._failure: MoonpoolError | None = None
        self._worst_s, self._count = 0.0, 0
        self._long: list[tuple[float, float]] = []
        self._thread: threading.Thread | None = None
        stack.callback(self._end)

    def work(self) -> dict[str, Callable[..., Any]]:
        return {"ping": self.ping, "pings": self.pings}

    def ping(self) -> None:
        gc.disable()
        self._thread = threading.Thread(target=self._ping_forever, name="ping")
        self._thread.start()

    def pings(self) -> dict[str, Any]:
        """Return the calls since the last time: count, longest wait, and long waits as (begin, duration), in seconds.

        Waits for the reply to the present call, so that no wait is reported too short. Raises Unavailable if the calls
        have ended or none was answered: a longest wait of 0 would be wrong then.
        """
        with self._asking:
            found = {"worst_s": self._worst_s, "count": self._count, "long": self._long}
            self._worst_s, self._count, self._long = 0.0, 0, []
        if self._failure is not None or not found["count"]:
            raise Unavailable(f"the master was not asked all the time: {self._failure or 'no answer'}")
        return found

    def _ping_forever(self) -> None:
        with contextlib.suppress(PermissionError):  # then it runs without
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        call = m.Exist(keys=[block_key(0)])
        while not self._stop.is_set():
            with self._asking:
                begun_s = time.monotonic()
                try:
                    self._client.call(call, timeout_s=_TIMEOUT_S)
                except MoonpoolError as error:
                    self._failure = error
                    return
                self._record(begun_s, time.monotonic() - begun_s)
            time.sleep(_PING_EVERY_S)

    def _record(self, begun_s: float, lasted_s: float) -> None:
        self._count += 1
        self._worst_s = max(self._worst_s, lasted_s)
        if lasted_s > _LONG_S:
            self._long.append((begun_s, lasted_s))

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._client.close()
