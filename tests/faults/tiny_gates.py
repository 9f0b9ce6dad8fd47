"""Stops in the middle of something until the test has done what should happen meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tiny_worker import TinyWorker
from waiting import HANG_S

from moonpool.base.keys import object_key
from moonpool.engine.engine import Engine, StepFailure, StepOutput

T = TypeVar("T")


class Gate:
    """Stops the n-th call of a function, on whatever thread, until the test lets it go on."""

    def __init__(self, at: int = 1) -> None:
        self.at = at
        self._num_calls = 0
        self._lock = threading.Lock()
        self._reached = threading.Event()
        self._open = threading.Event()

    def around(self, function: Callable[..., T]) -> Callable[..., T]:
        def gated(*args: Any, **kwargs: Any) -> T:
            self.stop_here()
            return function(*args, **kwargs)

        return gated

    def stop_here(self) -> bool:
        """Whether this was the call to stop."""
        with self._lock:
            self._num_calls += 1
            is_mine = self._num_calls == self.at
        if is_mine:
            self.mark_reached()
            assert self._open.wait(HANG_S), "a gate was never opened"
        return is_mine

    def mark_reached(self) -> None:
        """For places that stop by themselves."""
        self._reached.set()

    def follow(self, is_due: bool = False) -> None:
        """Stops too, if the call to stop has come; for what could run away meanwhile. If that call `is_due`, waits for
        it first.
        """
        assert not is_due or self._reached.wait(HANG_S), "the gate was never reached"
        assert not self._reached.is_set() or self._open.wait(HANG_S), "a gate was never opened"

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, HANG_S), "the gate was never reached"

    def open(self) -> None:
        self._open.set()


class Hold:
    """Lets the answers at decode workers stand still until release(), so that what the test does meanwhile finds all of
    them under way: a worker computes until each answer there has `num_tokens` tokens from it.
    """

    def __init__(self, workers: Iterable[TinyWorker], num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._released = threading.Event()
        for worker in workers:
            self._hold(worker.engine)

    def release(self) -> None:
        self._released.set()

    def _hold(self, engine: Engine) -> None:
        compute, num_tokens, queues = engine.step, Counter[str](), engine.scheduler.queues

        def step() -> list[StepOutput | StepFailure]:
            have_enough = all(num_tokens[each.request_id] >= self._num_tokens for each in queues.running)
            if have_enough and not queues.num_waiting and not self._released.is_set():
                return []  # as when nothing can be computed: the engine's loop looks again soon
            outputs = compute()
            num_tokens.update(each.request_id for each in outputs if isinstance(each, StepOutput))
            return outputs

        engine.step = step  # type: ignore[method-assign]


def steps_wait_for_puts(worker: TinyWorker) -> None:
    """The worker computes only while the pool has every block that has been computed of its answers."""
    engine, store = worker.engine, worker.store
    compute, queues = engine.step, engine.scheduler.queues

    def step() -> list[StepOutput | StepFailure]:
        computed = [each.keys[: each.num_computed_tokens // each.block_tokens] for each in queues.running]
        if None in store.lookup([object_key(key) for keys in computed for key in keys]):
            return []
        return compute()

    engine.step = step  # type: ignore[method-assign]
