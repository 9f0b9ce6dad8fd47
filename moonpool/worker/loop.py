"""The thread that owns the engine. Everything that touches the scheduler or the pages runs here, between steps.

Other threads post functions; they run in order before the next step. When there is nothing to compute the thread
sleeps until somebody posts.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from moonpool.base.errors import Cancelled, MoonpoolError
from moonpool.engine.engine import Engine, StepFailure, StepOutput

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
# Nothing can be computed although requests wait (all pages are in others' hands): look again this often.
_STALLED_WAIT_S = 0.02


class _Call(Generic[T]):
    """A posted function whose outcome somebody waits for."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._function = function

    def __call__(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._function())
        except Exception as error:  # noqa: BLE001 - it belongs to the caller, whose request fails; others go on
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

    `on_fatal` is called when the thread cannot go on: the engine computes nothing any more, or the books about pages
    and sequences can no longer be trusted. Whatever concerns one request alone is told to that request instead.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_step: Callable[[list[StepOutput | StepFailure]], None],
        at_boundary: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._on_step, self._at_boundary, self._on_fatal = on_step, at_boundary, on_fatal
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._ended = False  # nothing posted from now on will run
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, function: Callable[[], None]) -> None:
        """Runs `function` before the next step. It must not raise."""
        self._inbox.put(function)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """As post, with the outcome in a future, whatever it raises; Cancelled when the loop ends before."""
        call = _Call(function)
        if self._closed:
            call.refuse()
        else:
            self._inbox.put(call)
        if self._ended:  # perhaps it ended just before that
            self._refuse_rest()
        return call.future

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends the thread after the running step; idempotent."""
        self._closed = True
        self._inbox.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        if self._thread.ident is None:  # never started
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Nobody will run what is still posted; those who wait for it must know."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, _Call):
                    item.refuse()

    def _run(self) -> None:
        try:
            stalled = False
            while self._drain(stalled):
                self._at_boundary()
                stalled = self._engine.has_work() and not self._step()
        except BaseException as error:  # noqa: BLE001 - told to the owner, who ends the process
            _LOG.exception("the engine failed")
            self._on_fatal(error)
        finally:
            self._end()

    def _step(self) -> bool:
        """Whether anything was computed."""
        before = self._engine.num_steps
        self._on_step(self._engine.step())
        return self._engine.num_steps > before

    def _drain(self, stalled: bool) -> bool:
        """Runs what was posted, waiting for it when there is nothing else to do. False: closed."""
        try:
            if stalled:
                item = self._inbox.get(timeout=_STALLED_WAIT_S)
            else:
                item = self._inbox.get(block=not self._engine.has_work())
            while True:
                if item is None:
                    return False
                item()
                item = self._inbox.get_nowait()
        except queue.Empty:
            return True
