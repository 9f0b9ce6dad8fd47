"""An asyncio event loop in virtual time, one per simulated process, and threading's tools for simulated threads."""

from __future__ import annotations

import asyncio
from asyncio.events import _get_running_loop, _set_running_loop
from collections import deque
from collections.abc import Callable
from itertools import count
from queue import Empty
from typing import Any, cast

from .sim_scheduler import Process, Scheduler, SimThread


class SimTask(asyncio.Task):  # type: ignore[type-arg]
    """Sets of tasks are walked in the order of this number, not of addresses."""

    _numbers = count(1)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number = next(self._numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self.number

    def abandon(self) -> None:
        """It ends without having said anything more, and asyncio does not complain."""
        self._log_destroy_pending = False
        _close(self.get_coro())


class SimLoop:
    """What the store's asyncio code asks of a loop, and nothing else. Connections are the network's."""

    def __init__(self, scheduler: Scheduler, process: Process, network: Any) -> None:
        self._scheduler, self._process, self._network = scheduler, process, network
        self._tasks: dict[int, SimTask] = {}
        self._listening: list[str] = []  # addresses; a listening socket's number is the place of its address
        process.loop = self

    # callbacks

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, cast(Any, self), context)
        self._scheduler.call_at(self._scheduler.now_s, self._process, self._run, handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self._scheduler.now_s + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = _Timer(when, callback, args, cast(Any, self), context)
        handle.item = self._scheduler.call_at(when, self._process, self._run, handle)
        return handle

    def _timer_handle_cancelled(self, handle: Any) -> None:
        handle.item.cancelled = True

    @staticmethod
    def _run(handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            handle._run()

    def time(self) -> float:
        return self._scheduler.now_s

    # tasks

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> SimTask:
        task = SimTask(coro, loop=self, name=name or "task", context=context)
        if not self._process.is_alive:  # begun while the others were being closed
            task.abandon()
            return task
        self._tasks[task.number] = task
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: Any) -> None:
        self._tasks.pop(task.number, None)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast(Any, self))

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """On a thread of its own where the executor is a pool; inline, after a moment, where it is the default one."""
        future = self.create_future()
        delay_s = self._scheduler.rng.random() * 0.002
        if executor is None:
            self._scheduler.call_later(delay_s, self._process, _finish, future, func, args)
            return future

        def on_end(result: Any, error: BaseException | None) -> None:
            self.call_soon(_settle, future, result, error)

        def work() -> Any:
            self._scheduler.sleep(delay_s)
            return func(*args)

        self._scheduler.start_thread(self._process, work, "orders").on_end = on_end
        return future

    # connections

    async def create_server(self, factory: Any, host: str, port: int, **_: Any) -> _Listening:
        return self._listen(f"tcp:{host}:{port}", factory, (host, port))

    async def create_unix_server(self, factory: Any, sock: str, **_: Any) -> _Listening:
        """`sock` is the path: sim_patches.py binds no socket."""
        return self._listen(f"unix:{sock}", factory, (sock, 0))

    def _listen(self, address: str, factory: Any, name: tuple[str, int]) -> _Listening:
        self._network.listen(address, self._process, factory)
        listening = _Listening(len(self._listening), name)
        self._listening.append(address)
        return listening

    def remove_reader(self, fileno: int) -> None:
        """Only listening sockets have a number here: no connection is accepted any more."""
        self._network.stop_listening(self._listening[fileno], self._process)

    async def create_connection(self, factory: Any, host: str, port: int) -> None:
        await self._network.connect_async(self._process, f"tcp:{host}:{port}", factory)

    async def create_unix_connection(self, factory: Any, sock: str) -> None:
        """`sock` is the path: sim_patches.py connects no socket."""
        await self._network.connect_async(self._process, f"unix:{sock}", factory)

    # the rest

    def abandon(self) -> None:
        """The process was killed: its coroutines end without having said anything more."""
        running = _get_running_loop()
        _set_running_loop(cast(Any, self))
        for task in list(self._tasks.values()):
            task.abandon()
        self._tasks.clear()
        _set_running_loop(running)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return not self._process.is_alive

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._process.is_alive and not self._scheduler.is_over:
            error = context.get("exception")
            text = context.get("message", "")
            self._scheduler.fail(error if error is not None else AssertionError(f"{self._process}: {text}"))

    default_exception_handler = call_exception_handler

    async def shutdown_asyncgens(self) -> None:
        """Nothing to do."""


class _Timer(asyncio.TimerHandle):
    __slots__ = ("item",)

    item: Any


def _close(coroutine: Any) -> None:
    """Its `finally` blocks may wait for others that are gone too: then once more, from there."""
    for _ in range(20):
        try:
            coroutine.close()
        except BaseException:  # noqa: BLE001 - nobody is left to be told
            continue
        return


class _Listening:
    """Of asyncio.Server what RpcServer asks for."""

    def __init__(self, fileno: int, name: tuple[str, int]) -> None:
        self.sockets = [self]
        self._fileno, self._name = fileno, name

    def fileno(self) -> int:
        return self._fileno

    def getsockname(self) -> tuple[str, int]:
        return self._name

    def close(self) -> None:
        """RpcServer has removed its reader: the network knows it no more."""


def _finish(future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        result, error = func(*args), None
    except Exception as caught:  # noqa: BLE001 - it is the waiting task's
        result, error = None, caught
    _settle(future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


# what blocking code uses instead of threading and queue


class SimEvent:
    """threading.Event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False
        self._waiting: list[SimThread] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            thread.wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        until_s = None if timeout is None else scheduler.now_s + timeout
        while not self._is_set and (until_s is None or scheduler.now_s < until_s):
            thread = scheduler.current_thread
            assert thread is not None, "only a simulated thread can wait"
            self._waiting.append(thread)
            scheduler.block(None if until_s is None else until_s - scheduler.now_s)
            if thread in self._waiting:
                self._waiting.remove(thread)
        return self._is_set


class SimLock:
    """threading.Lock; first come, first served."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_held = False
        self._freed = SimEvent(scheduler)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        until_s = self._scheduler.now_s + timeout
        while self._is_held:
            if not blocking or (timeout >= 0 and self._scheduler.now_s >= until_s):
                return False
            self._freed.clear()
            self._freed.wait(None if timeout < 0 else until_s - self._scheduler.now_s)
        self._is_held = True
        return True

    def release(self) -> None:
        self._is_held = False
        self._freed.set()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimQueue:
    """queue.SimpleQueue."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._items: deque[Any] = deque()
        self._filled = SimEvent(scheduler)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._filled.set()

    def get(self, timeout: float | None = None) -> Any:
        while not self._items:
            self._filled.clear()
            if not self._filled.wait(timeout):
                raise Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        if not self._items:
            raise Empty
        return self._items.popleft()


class SimPool:
    """ThreadPoolExecutor: the loop and submit() give each job a thread; what is mapped runs where it is asked for."""

    scheduler: Callable[[], Scheduler]  # of the seed that runs

    def __init__(self, *_: Any, **__: Any) -> None:
        self.map = map
        self._jobs: list[SimFuture] = []

    def submit(self, job: Callable[..., Any], *args: Any) -> SimFuture:
        made = SimFuture(type(self).scheduler(), job, args)
        self._jobs = [each for each in self._jobs if not each.done()] + [made]
        return made

    def shutdown(self, wait: bool = True) -> None:
        for job in self._jobs if wait else ():
            job.wait()


class SimFuture:
    """A job on a simulated thread of the process that gave it."""

    def __init__(self, scheduler: Scheduler, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._ended = SimEvent(scheduler)
        self._result: Any = None
        self._error: BaseException | None = None
        assert scheduler.current is not None
        scheduler.start_thread(scheduler.current, lambda: job(*args), "job").on_end = self._on_end

    def _on_end(self, result: Any, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()

    def cancel(self) -> bool:
        """It is always too late: a simulated thread is there at once."""
        return False

    def result(self) -> Any:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result
