"""Prepares request bodies: tiny ones at once, short ones in a thread, long ones in a separate process.

TINY_NBYTES is what is prepared within two milliseconds, whatever the body contains: no stream notices that.
A thread is faster to reach than a process, but holds Python's interpreter lock: SHORT_NBYTES is what a thread prepares
within a few milliseconds, whatever the body contains. Longer bodies go to prompt_process.py, where they delay only each
other (benchmarks/long_prompts.py). If the process dies or takes too long, the present request gets a 503, and the next
long body starts a new process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import msgspec

from moonpool.base.errors import Overloaded, Unavailable, from_wire
from moonpool.frontend.prompt_process import (
    LENGTH,
    MODULE,
    LoadModel,
    PrepareBody,
    PreparedBody,
    PrepareFailure,
    unpack,
)
from moonpool.frontend.prompts import Endpoint, Prepared, ServedModel, prepare
from moonpool.frontend.schema import SamplingBody

TINY_NBYTES = 1024
SHORT_NBYTES = 64 * 1024
MAX_WAITING = 16  # long bodies that wait for the process
ANSWER_S = 60.0  # to start the process and prepare one body
_SLICE_NBYTES = 1 << 20
_LOG = logging.getLogger(__name__)
_B = TypeVar("_B", bound=SamplingBody)


class Preparer:
    """With `load`, long bodies go to a process; without it, threads prepare all bodies. Close it with `close`."""

    def __init__(self, model: ServedModel, load: LoadModel | None = None, *, num_threads: int = 2) -> None:
        self._model = model
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self._process = None if load is None else PromptProcess(load)

    def start(self) -> None:
        """Start the process in the background, so that the first long body does not wait for it."""
        if self._process is not None:
            self._process.warm_up()

    async def prepare(self, endpoint: Endpoint[_B], raw: bytes) -> Prepared[_B]:
        """Do what prompts.prepare does; also raise Overloaded or Unavailable if the process cannot do it."""
        if len(raw) <= TINY_NBYTES:
            return prepare(self._model, endpoint, raw)
        if self._process is None or len(raw) <= SHORT_NBYTES:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, prepare, self._model, endpoint, raw)
        packed = await self._process.ask(PrepareBody(endpoint.name, raw))
        loop = asyncio.get_running_loop()
        generic = cast(Endpoint[SamplingBody], endpoint)
        return cast(Prepared[_B], await loop.run_in_executor(self._threads, unpack, packed, generic))

    async def close(self) -> None:
        """Return when the process has ended. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            await self._process.close()


def load_call(load: Callable[..., ServedModel], model: str, model_name: str | None, max_len: int | None) -> LoadModel:
    """Return the call with which the process loads the same model. `load` must be a function of a module."""
    return LoadModel(f"{load.__module__}:{load.__qualname__}", model, model_name, max_len)


class PromptProcess:
    """One child process, started when needed; it prepares one body at a time."""

    def __init__(self, load: LoadModel) -> None:
        self._load = load
        self._child: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._num_waiting = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def warm_up(self) -> None:
        self._keep(asyncio.create_task(self._start_early()))

    async def ask(self, call: PrepareBody) -> PreparedBody:
        """Return the process's reply. If this is cancelled, the process still finishes the body."""
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded("too many long prompts are being tokenized; try again later", retry_after_s=1.0)
        self._num_waiting += 1
        task = asyncio.create_task(self._ask(call))
        self._keep(task)
        return await asyncio.shield(task)

    async def close(self) -> None:
        self._is_closed = True
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._end()

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the caller may be gone

    async def _start_early(self) -> None:
        async with self._lock:
            with contextlib.suppress(OSError, TimeoutError):
                await self._start()

    async def _ask(self, call: PrepareBody) -> PreparedBody:
        try:
            async with self._lock:
                reply = await self._exchange(msgspec.msgpack.encode(call))
        finally:
            self._num_waiting -= 1
        if isinstance(reply, PrepareFailure):
            raise from_wire(reply.code, reply.message, param=reply.param)
        return reply

    async def _exchange(self, frame: bytes) -> PreparedBody | PrepareFailure:
        if self._is_closed:
            raise Unavailable("the front end is stopping")
        try:
            async with asyncio.timeout(ANSWER_S):
                child = await self._start()
                await _send(child, frame)
                reply = await _receive(child)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            await self._end()
            _LOG.warning(
                "the process for long prompts failed (%s); the next long prompt starts a new one", type(error).__name__
            )
            raise Unavailable("this prompt could not be tokenized; try again") from error
        except asyncio.CancelledError:
            await self._end()
            raise
        return msgspec.msgpack.decode(reply, type=PreparedBody | PrepareFailure)

    async def _start(self) -> asyncio.subprocess.Process:
        if self._child is None or self._child.returncode is not None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # the path is given below
                "-m",
                MODULE,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            await _send(self._child, msgspec.msgpack.encode(self._load))
        return self._child

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


async def _send(child: asyncio.subprocess.Process, frame: bytes) -> None:
    assert child.stdin is not None, "it was started with a pipe"
    child.stdin.write(LENGTH.pack(len(frame)))
    view = memoryview(frame)
    for start in range(0, len(view), _SLICE_NBYTES):
        child.stdin.write(view[start : start + _SLICE_NBYTES])
        await child.stdin.drain()


async def _receive(child: asyncio.subprocess.Process) -> bytes:
    assert child.stdout is not None, "it was started with a pipe"
    (nbytes,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
    return await child.stdout.readexactly(nbytes)
