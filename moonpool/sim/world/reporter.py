"""Reports of a simulated worker to the conductor: load, cached blocks and measured times, as a real worker sends."""

from __future__ import annotations

from moonpool.base.cluster import DecodeSample, PrefillSample, PullSample, ReportWorker
from moonpool.conductor.state import ConductorState
from moonpool.engine.jumping import JumpingScheduler
from moonpool.master.state.changes import Changes
from moonpool.sim.world.pool import BlockRuns
from moonpool.sim.world.sequence import block_keys

INCARNATION = 1


class SimReporter:
    """Sends at most one report per `every_s` seconds: real workers do not report after each step either."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        scheduler: JumpingScheduler,
        conductor: ConductorState,
        every_s: float,
        runs: BlockRuns,
    ) -> None:
        self._incarnation, self._runs = incarnation, runs
        self._name, self._scheduler, self._conductor, self._every_s = name, scheduler, conductor, every_s
        self._sequence = 0
        self._next_s = 0.0
        self._events: dict[bytes, bool] | None = None  # changes of the node's own pool, if it has one: key -> stored
        self.prefills: list[PrefillSample] = []
        self.decodes: list[DecodeSample] = []
        self.pulls: list[PullSample] = []

    def after_step(self, now_s: float) -> None:
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        self._sequence += 1
        events = self._drain_events()
        self._conductor.report(
            ReportWorker(
                name=self._name,
                incarnation=self._incarnation,
                sequence=self._sequence,
                load=self._scheduler.queues.load(self._scheduler.pages.num_available),
                cached=tuple([key for key, added in events.items() if added]),
                dropped=tuple([key for key, added in events.items() if not added]),
                prefills=tuple(self.prefills),
                decodes=tuple(self.decodes),
                pulls=tuple(self.pulls),
            )
        )
        self.prefills, self.decodes, self.pulls = [], [], []

    def own_pool_changed(self, changes: Changes) -> None:
        """Record changes of the node's own pool. They are reported in place of the worker's pages."""
        events = {} if self._events is None else self._events
        for keys, is_there in ((changes.stored, True), (changes.removed, False)):
            events.update(dict.fromkeys(block_keys(self._runs.blocks_of_all(keys)), is_there))
        self._events = events

    def _drain_events(self) -> dict[bytes, bool]:
        events = self._scheduler.pages.drain_events()
        if self._events is not None:
            events, self._events = self._events, {}
        return events
