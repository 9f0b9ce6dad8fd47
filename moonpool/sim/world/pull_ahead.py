"""Pulls of simulated prompts that wait behind a step: the live rule and books (engine/pulls_ahead.py), over links."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.base.cluster import PullSample
from moonpool.engine.jumping import JumpingScheduler
from moonpool.engine.pulls_ahead import PullAhead, prompts_that_wait
from moonpool.sim.world.clock import SimClock
from moonpool.sim.world.pool import PoolHit, SimPool, Sources
from moonpool.sim.world.pulled import pull_sample


class SimPullsAhead:
    """The pulls ahead of one worker, which runs on `nodes`. Calls `on_end` after each. An instance belongs to one
    incarnation of the worker: after `stop` nothing is called any more."""

    def __init__(
        self,
        clock: SimClock,
        nodes: tuple[str, ...],
        scheduler: JumpingScheduler,
        pool: SimPool,
        block_nbytes: int,
        samples: Callable[[PullSample], None],
        on_end: Callable[[], None],
    ) -> None:
        self._clock, self._nodes, self._scheduler, self._pool = clock, nodes, scheduler, pool
        self._block_nbytes, self._samples, self._on_end = block_nbytes, samples, on_end
        self._is_stopped = False
        self._sources: dict[str, Sources] = {}  # of the blocks that were brought, by request

    def stop(self) -> None:
        """The worker has crashed."""
        self._is_stopped = True

    def start(self, hits: dict[str, PoolHit]) -> None:
        """Start pulls for the prompts that are not in the step that begins now, within the budget of pages."""
        scheduler = self._scheduler
        for sequence, max_pages in prompts_that_wait(scheduler.pages, scheduler.ahead, scheduler.queues):
            if not max_pages:
                return
            pull = scheduler.ahead.begin(sequence, sequence.num_pool_blocks, max_pages)
            if pull is not None:
                blocks = pull.wanted.blocks
                self._send(pull, hits[sequence.request_id].sources(blocks[0], blocks[-1] + 1))

    def take(self, request_id: str, num_blocks: int) -> Sources:
        """The prompt enters the batch with `num_blocks` that were brought for it. Return where they came from."""
        sources = self._sources.pop(request_id, {})
        return sources if num_blocks else {}

    def _send(self, pull: PullAhead, sources: Sources) -> None:
        began_s, left, lost = self._clock.now_s, len(sources) * len(self._nodes), False

        def ended() -> None:
            nonlocal left
            left -= 1
            if not left and not self._is_stopped:
                self._ended(pull, sources, began_s, lost)

        def failed() -> None:
            nonlocal lost
            lost = True
            ended()

        nbytes = self._block_nbytes / len(self._nodes)
        for (source, on_ssd), count in sources.items():
            for node in self._nodes:
                self._clock.send(self._pool.route(source, node, on_ssd), count * nbytes, ended, failed)

    def _ended(self, pull: PullAhead, sources: Sources, began_s: float, lost: bool) -> None:
        """Of a pull that lost a source nothing is used, and the prompt pulls what is left in its step."""
        num_good = 0 if lost else len(pull.wanted.blocks)
        if num_good and not pull.is_given_up:
            self._sources[pull.request_id] = sources
        self._scheduler.ahead.end(pull, num_good)
        sequence = self._scheduler.get(pull.request_id)
        if lost and sequence is not None:
            sequence.ahead_limit = pull.wanted.num_local_blocks
        if not lost:
            self._samples(pull_sample(sources, self._block_nbytes, self._clock.now_s - began_s, self._nodes))
        self._on_end()
