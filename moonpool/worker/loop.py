"""The thread that owns the engine. All code that uses the scheduler or the pages runs on it, between steps.

Other threads post functions; these run in order before the next step. When there is nothing to compute, the thread
sleeps until a function is posted. Few functions may also run inside a step, between two layers (`call_inside`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from moonpool.base.errors import Cancelled, MoonpoolError, Stalled
from moonpool.engine.engine import Engine, StepFailure, StepOutput
from moonpool.worker.watchdog import LOOK_S, EngineProgress

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
# Nothing can be computed although requests wait (all pages are held elsewhere): try again this often.
STALLED_WAIT_S = 0.02


def retrieve(future: asyncio.Future[T]) -> None:
    """Retrieve the error of a future that no task waits for any more, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()


class _Call(Generic[T]):
    """A posted function whose outcome goes to a future."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._function = function

    def __call__(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._function())
        except Exception as error:  # noqa: BLE001 - it goes to the caller, whose request fails; others go on
            if not isinstance(error, MoonpoolError):
                _LOG.exception("a call on the engine's thread failed")
            self.future.set_exception(error)
        except BaseException as error:
            self.future.set_exception(error)
            raise

    def refuse(self) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(Cancelled("the worker is shutting down"))


class EngineLoop:
    """`on_step` gets each step's outputs, `at_boundary` runs between steps; both on the engine's thread.

    `on_fatal` is called when the thread cannot go on: the engine no longer computes, or the state of pages and
    sequences may be inconsistent. An error of one request goes to that request instead. `progress` says what the thread
    does.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_step: Callable[[list[StepOutput | StepFailure]], None],
        at_boundary: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
        progress: EngineProgress,
    ) -> None:
        self._engine, self.progress = engine, progress
        self._on_step, self._at_boundary, self._on_fatal = on_step, at_boundary, on_fatal
        self._posted: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._inside: queue.SimpleQueue[_Call[None]] = queue.SimpleQueue()
        self._closed = False
        self._ended = False  # nothing posted from now on will run
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, function: Callable[[], None]) -> None:
        """Run `function` before the next step. It must not raise."""
        self._posted.put(function)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` as post() does, and return a future of its outcome: Cancelled when the loop ends first."""
        call = _Call(function)
        if self._closed:
            call.refuse()
        else:
            self._posted.put(call)
        if self._ended:  # perhaps just before the put
            self._refuse_rest()
        return call.future

    def call_inside(self, function: Callable[[], None]) -> Future[None]:
        """As call(), but `function` may also run inside the step under way, where run_inside() is called."""
        call = _Call(function)
        self._inside.put(call)
        self.call(self.run_inside)
        if self._closed or self._ended:
            self._refuse_rest()
        return call.future

    def run_inside(self) -> bool:
        """Run what may run inside a step, on the engine's thread. Return whether there was something."""
        if self._inside.empty():
            return False
        with contextlib.suppress(queue.Empty):
            while True:
                self._inside.get_nowait()()
        return True

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread after the current step. Idempotent."""
        self._closed = True
        self._posted.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        if self._thread.ident is None:  # never started
            self._end()

    async def ask(self, function: Callable[[], T]) -> T:
        """As call(), for the event loop: return the function's result, or raise as answered() does."""
        return await self.answered(self.call(function))

    async def answered(self, call: Future[T]) -> T:
        """Wait for a future of call(). Raise Stalled when the thread is overdue with something else; the function may
        still run later."""
        future = asyncio.wrap_future(call)
        try:
            while not (await asyncio.wait((future,), timeout=LOOK_S))[0]:
                if self.progress.is_overdue:
                    future.add_done_callback(retrieve)
                    raise Stalled("the worker's engine does not go on")
        except asyncio.CancelledError:
            future.cancel()
            raise
        return future.result()

    def _end(self) -> None:
        self._ended = True
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Cancel the calls that will not run: their callers wait for them."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._posted.get_nowait()
                if isinstance(item, _Call):
                    item.refuse()
        with contextlib.suppress(queue.Empty):
            while True:
                self._inside.get_nowait().refuse()

    def _run(self) -> None:
        self.progress.thread_id = threading.get_ident()
        try:
            stalled = False
            while self._drain(stalled):
                self.progress.begin("the work between two steps")
                self._at_boundary()
                stalled = self._engine.has_work() and not self._step()
        except BaseException as error:  # noqa: BLE001 - `on_fatal` ends the process
            _LOG.exception("the engine failed")
            self._on_fatal(error)
        finally:
            self.progress.rest()
            self._end()

    def _step(self) -> bool:
        """Run one step; return whether anything was computed."""
        before = self._engine.num_steps
        self.progress.begin("a step")
        self._on_step(self._engine.step())
        return self._engine.num_steps > before

    def _drain(self, stalled: bool) -> bool:
        """Run the posted functions, waiting for one when there is nothing to compute. Return False when closed."""
        self.progress.rest()
        try:
            if stalled:
                item = self._posted.get(timeout=STALLED_WAIT_S)
            else:
                item = self._posted.get(block=not self._engine.has_work())
            while True:
                if item is None:
                    return False
                self.progress.begin("a posted function")
                item()
                item = self._posted.get_nowait()
        except queue.Empty:
            return True
