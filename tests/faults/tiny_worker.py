"""A worker within the test's process. What tests look at, hook and change in it, they reach by its properties."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from moonpool.base.cluster import AssignedRole
from moonpool.engine.blocks import PageManager
from moonpool.engine.engine import Engine
from moonpool.engine.runner import Runner
from moonpool.engine.scheduler import Scheduler
from moonpool.store import Store
from moonpool.worker.build import Built
from moonpool.worker.config import WorkerConfig
from moonpool.worker.kv_link.pieces import HostPieces, PieceMemory
from moonpool.worker.kv_link.pool import PoolHealth, PoolWriter
from moonpool.worker.kv_link.pull import Puller
from moonpool.worker.pipeline.service import StageService
from moonpool.worker.pipeline.stage import Stage
from moonpool.worker.service import Worker
from moonpool.worker.watchdog import TaskLimits

T = TypeVar("T")


class TinyWorker(Worker):
    """A worker whose engine reports its death, or that it hangs, instead of ending the process, and with a view of its
    parts."""

    def __init__(
        self, config: WorkerConfig, on_fatal: Callable[[BaseException], None], on_hang: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._tell_fatal, self._tell_hang = on_fatal, on_hang

    def _connect(self, built: Built) -> None:
        super()._connect(built)
        self._loop._on_fatal = self._tell_fatal
        self._watchdog._on_hang = self._tell_hang

    @property
    def role(self) -> Any:
        """The one that it started with."""
        return self._prefill if self.config.role == "prefill" else self._decode

    @property
    def assigned(self) -> AssignedRole:
        """The one that it has now."""
        return self._assigned

    def take_role(self, assigned: AssignedRole) -> None:
        """As if a conductor had said so."""
        self._take_role(assigned)

    @property
    def is_leaving(self) -> bool:
        return any(task.get_name() == "leave" for task in self._tasks)

    @property
    def engine(self) -> Engine:
        return self._loop._engine

    @property
    def scheduler(self) -> Scheduler:
        return self._built.scheduler

    @property
    def pages(self) -> PageManager:
        return self.scheduler.pages

    @property
    def runner(self) -> Runner:
        return self._built.runner

    @property
    def pieces(self) -> PieceMemory:
        return self._built.pieces

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.num_preemptions

    @property
    def num_reserved_pages(self) -> int:
        return self._reservations.num_pages

    @property
    def num_waiting_for_pages(self) -> int:
        """Answers that cannot be handed over yet."""
        return len(self._decode._waiting)

    @property
    def num_commits(self) -> int:
        """Hand-offs to it that are checked, or wait to be adopted."""
        return len(self._decode._commits)

    @property
    def num_coming(self) -> int:
        """Prompts that wait for the engine's thread."""
        return self._loop._inside.qsize()

    @property
    def puller(self) -> Puller:
        return self.stage_service.tools.prefix.puller

    @property
    def pool(self) -> PoolWriter:
        return self._pool

    @property
    def pool_health(self) -> PoolHealth:
        return self._pool_health

    @property
    def store(self) -> Store:
        return self._store

    @property
    def stage_service(self) -> StageService:
        return self._stages

    @property
    def stages(self) -> list[Stage]:
        """The stages of prompts that this worker computes a part of."""
        return list(self.stage_service._stages.values())

    @property
    def num_led(self) -> int:
        """How many prompts it has led through a pipeline."""
        return self._leader.num_prompts

    async def on_engine(self, function: Callable[[], T]) -> T:
        """Runs it where the pages are looked after."""
        return await asyncio.wrap_future(self._loop.call(function))

    def post(self, function: Callable[[], None]) -> None:
        self._loop.post(function)

    def before_steps(self, function: Callable[[], None]) -> None:
        """Runs it at every boundary between steps, after what the worker does there."""
        at_boundary = self._loop._at_boundary

        def both() -> None:
            at_boundary()
            function()

        self._loop._at_boundary = both

    def page_bytes(self, page: int) -> bytes:
        layout, pieces = self._built.layout, self.pieces
        assert isinstance(pieces, HostPieces)
        return b"".join(bytes(pieces.memory(page, range(layer, layer + 1))) for layer in range(layout.num_layers))

    def is_handing_off(self) -> bool:
        return self._queue._num_handoffs + self._queue._num_calls > 0

    def is_idle(self) -> bool:
        stats = self.stats()
        nothing_left = not (self._prefill.num_prompts or self._decode.streams)
        is_quiet = (stats.reserved_pages, stats.num_waiting, stats.num_running) == (0, 0, 0)
        return nothing_left and is_quiet and stats.free_pages == stats.num_pages and not len(self._queue)

    @property
    def num_posted(self) -> int:
        """Functions that wait for the engine's thread."""
        return self._loop._posted.qsize()

    def watch_with(self, limits: TaskLimits) -> None:
        """Change what its watchdog allows from now on."""
        self._watchdog._watch._limits = limits

    async def die(self) -> None:
        """As by kill -9 seen from outside: all its connections end at once; what its threads do is up to the test."""
        tasks, self._tasks = self._tasks, []
        assert tasks
        assert self._server is not None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.close()
        await asyncio.to_thread(self._peers.close)
        await asyncio.to_thread(self._loop.close)
