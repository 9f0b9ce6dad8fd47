"""The simulated machine room's only clock and only hand: it decides who runs, and exactly one does.

Everything that happens is an item in one queue, in the order of virtual time. Items belong to processes; a stopped
process's items wait until it goes on, a dead one's are dropped. Event-loop callbacks run inline. Blocking code (store
clients, threads of nodes) runs on real threads that pass a baton: whoever blocks takes the next items itself, until one
of them wakes a thread. So the same seed gives the same history, and a switch costs a few microseconds.
"""

from __future__ import annotations

import heapq
import random
import threading
from asyncio.events import _set_running_loop
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, ClassVar


class SimKilledError(BaseException):
    """Unwinds a thread whose process was killed. No production code may catch it."""


class Process:
    """One simulated process on one simulated host. `loop` is set for those that run asyncio."""

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host
        self.is_alive = True
        self.is_stopped = False
        self.deferred: list[_Item] = []
        self.threads: list[SimThread] = []
        self.loop: Any = None
        self.on_death: list[Callable[[], None]] = []
        self.stopped_s = 0.0  # all time it was stopped, for judging deadlines
        self.busy_until_s = 0.0  # its event loop runs one handler until then; 0: it has time
        self.found: deque[_Item] = deque()  # what it found when it looked last, and has not come to
        self.waiting: list[_Item] = []  # what came since; a busy event loop looks again when it has handled `found`

    def __repr__(self) -> str:
        return self.name


class _Item:
    """Something to run for a process. `cancelled` ones are skipped."""

    __slots__ = ("action", "args", "cancelled", "found_s", "process")

    def __init__(self, process: Process | None, action: Any, args: tuple[Any, ...]) -> None:
        self.process, self.action, self.args = process, action, args
        self.cancelled = False
        self.found_s: float | None = None  # when its busy process found it waiting


class _Carrier:
    """A real thread that carries simulated ones, one after the other; kept for the next seed."""

    _idle: ClassVar[list[_Carrier]] = []
    _ids: ClassVar[Iterator[int]] = count()

    def __init__(self) -> None:
        self.baton = threading.Lock()
        self.baton.acquire()
        self.sim: SimThread | None = None
        threading.Thread(target=self._run, name=f"sim-{next(self._ids)}", daemon=True).start()

    @classmethod
    def take(cls) -> _Carrier:
        return cls._idle.pop() if cls._idle else cls()

    def _run(self) -> None:
        while True:
            self.baton.acquire()
            sim = self.sim
            assert sim is not None
            sim.body()
            self.sim = None
            self._idle.append(self)  # before the baton goes on: from then on another thread runs
            sim.scheduler.pass_on()


class SimThread:
    """A thread of a simulated process. `on_end` gets its result or its error."""

    def __init__(self, scheduler: Scheduler, process: Process, target: Callable[[], Any], name: str = "") -> None:
        self.scheduler, self.process, self.name = scheduler, process, name
        self._target = target
        self.carrier: _Carrier | None = None
        self.wake_item: _Item | None = None
        self.is_over = False
        self.on_end: Callable[[Any, BaseException | None], None] | None = None
        process.threads.append(self)
        self.wake_item = scheduler.call_at(scheduler.now_s, process, self)

    def wake(self, delay_s: float = 0.0) -> None:
        """It goes on at that moment, unless something wakes it before."""
        if self.wake_item is not None:
            self.wake_item.cancelled = True
        self.wake_item = self.scheduler.call_at(self.scheduler.now_s + delay_s, self.process, self)

    def resume(self) -> None:
        """Hands the baton to it. The caller lets go of everything."""
        self.wake_item = None
        if self.carrier is None:
            self.carrier = _Carrier.take()
            self.carrier.sim = self
        self.carrier.baton.release()

    def body(self) -> None:
        scheduler = self.scheduler
        scheduler.current_thread = self
        scheduler.current = self.process
        result, error = None, None
        try:
            if self.process.is_alive:
                result = self._target()
        except SimKilledError:
            pass
        except BaseException as caught:  # noqa: BLE001 - a bug in the program under test is the finding
            error = caught
        self.is_over = True
        if self in self.process.threads:
            self.process.threads.remove(self)
        scheduler.current_thread = None
        if self.process.is_alive and self.on_end is not None:
            self.on_end(result, error)
        elif error is not None and not scheduler.is_over:
            scheduler.fail(error)


class Scheduler:
    """Owned by the thread that makes it (the driver), which is one more that blocks and is woken."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 1000.0
        self.num_items = 0
        self.current: Process | None = None
        self.current_thread: SimThread | None = None
        self.is_over = False
        self.failure: BaseException | None = None
        self._seq = 0
        self._heap: list[tuple[float, int, _Item]] = []
        self._soon: deque[tuple[float, int, _Item]] = deque()  # due now
        self._in_item = False
        self.found_s: float | None = None  # of the item that runs
        self._driver_baton = threading.Lock()
        self._driver_baton.acquire()
        self._driver_wake: _Item | None = None

    # what is to come

    def call_at(self, when_s: float, process: Process | None, action: Any, *args: Any) -> _Item:
        item = _Item(process, action, args)
        self._queue(when_s, item)
        return item

    def _queue(self, when_s: float, item: _Item) -> None:
        self._seq += 1
        if when_s <= self.now_s:
            self._soon.append((self.now_s, self._seq, item))
        else:
            heapq.heappush(self._heap, (when_s, self._seq, item))

    def call_later(self, delay_s: float, process: Process | None, action: Any, *args: Any) -> _Item:
        return self.call_at(self.now_s + delay_s, process, action, *args)

    def start_thread(self, process: Process, target: Callable[[], Any], name: str = "") -> SimThread:
        return SimThread(self, process, target, name)

    # processes

    def kill(self, process: Process) -> None:
        """The process is no more, from this very moment. Its threads unwind, its memory is the garbage collector's."""
        if not process.is_alive:
            return
        process.is_alive = False
        process.is_stopped = False
        process.deferred.clear()
        process.found.clear()
        process.waiting.clear()
        for notify in process.on_death:
            notify()
        for thread in list(process.threads):
            thread.wake()  # to unwind
        if process.loop is not None:
            process.loop.abandon()

    def stop(self, process: Process) -> None:
        process.is_stopped = True

    def go_on(self, process: Process) -> None:
        process.is_stopped = False
        deferred, process.deferred = process.deferred, []
        for item in deferred:
            self._queue(self.now_s, item)

    # running

    def fail(self, error: BaseException) -> None:
        """Ends the simulation: the driver raises this."""
        if self.failure is None:
            self.failure = error

    def run_for(self, seconds: float) -> None:
        """For the driver: lets the world go on for so long."""
        self._driver_wake = self.call_later(seconds, None, self)
        self._pump(None)
        self.current = None
        if self.failure is not None:
            raise self.failure

    def block(self, timeout_s: float | None) -> None:
        """For the running simulated thread: until somebody wakes it, or the time is over. May return too early."""
        thread = self.current_thread
        assert thread is not None, "only a simulated thread can wait"
        assert not self._in_item, "a callback cannot wait"
        if not thread.process.is_alive:
            raise SimKilledError
        if timeout_s is not None and thread.wake_item is None:
            thread.wake(timeout_s)
        self.current_thread = None
        self._pump(thread)
        self.current_thread, self.current = thread, thread.process
        if not thread.process.is_alive:
            raise SimKilledError

    def sleep(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.block(until_s - self.now_s)

    @property
    def may_block(self) -> bool:
        return self.current_thread is not None and not self._in_item

    def _pump(self, me: SimThread | None) -> None:
        """Runs items until one wakes `me` (None: the driver)."""
        while True:
            woken = self._next_thread()
            if woken is me:
                if me is not None:
                    me.wake_item = None
                return
            self._hand_over(woken)
            baton = self._driver_baton if me is None else me.carrier.baton  # type: ignore[union-attr]
            baton.acquire()
            return

    def pass_on(self) -> None:
        """For a thread that has ended: the next one takes the baton."""
        self._hand_over(self._next_thread())

    def _hand_over(self, woken: SimThread | None) -> None:
        if woken is None:
            self._driver_baton.release()
        else:
            woken.resume()

    def _next_thread(self) -> SimThread | None:
        """Runs items inline until one of them is a thread's turn; None for the driver's."""
        while self.failure is None or self.is_over:
            item = self._next_item()
            action = item.action
            if action is self:
                return None
            if type(action) is SimThread:
                if action.is_over or item is not action.wake_item:
                    continue
                return action
            self._run_item(item)
        return None

    def _next_item(self) -> _Item:
        soon, heap = self._soon, self._heap
        while True:
            if soon and not (heap and heap[0] < soon[0]):
                when_s, _, item = soon.popleft()
            else:
                when_s, _, item = heapq.heappop(heap)
            if item.cancelled:
                continue
            process = item.process
            if process is not None and process.is_stopped:
                process.deferred.append(item)
                continue
            if process is not None and not process.is_alive and type(item.action) is not SimThread:
                continue
            if when_s > self.now_s:
                self.now_s = when_s
            if process is not None and process.busy_until_s:
                found = self._next_found(process, item)
                if found is None:
                    continue
                item = found
            self.num_items += 1
            return item

    def _next_found(self, process: Process, item: _Item) -> _Item | None:
        """Return what a busy event loop does next; None while it does something else. Then `item` waits. The item whose
        action is the process says that the loop is done with that.
        """
        if item.action is not process:
            if not process.waiting and not process.found:
                if process.busy_until_s <= self.now_s:
                    process.busy_until_s = 0.0
                    return item
                self._queue(process.busy_until_s, _Item(process, process, ()))
            process.waiting.append(item)
            return None
        if process.busy_until_s > self.now_s:
            self._queue(process.busy_until_s, item)
            return None
        if not process.found:
            self._look(process)
        found = process.found.popleft()
        if process.found or process.waiting:
            self._queue(self.now_s, item)
        return None if found.cancelled else found

    def _look(self, process: Process) -> None:
        """A busy event loop finds what waits: callbacks first, then what connections have received."""
        process.waiting.sort(key=lambda each: getattr(each.action, "__name__", "") in ("deliver", "end_here"))
        process.found.extend(process.waiting)
        process.waiting.clear()
        for each in process.found:
            each.found_s = self.now_s

    def _run_item(self, item: _Item) -> None:
        process = item.process
        self.current, self._in_item, self.found_s = process, True, item.found_s
        loop = process.loop if process is not None else None
        if loop is not None:
            _set_running_loop(loop)
        try:
            item.action(*item.args)
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver tells
            self.fail(error)
        finally:
            if loop is not None:
                _set_running_loop(None)
            self._in_item = False
