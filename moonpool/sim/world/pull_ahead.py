"""Pulls of simulated prompts that wait: the live rules and books (engine/pulls_ahead.py), over links."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.base.cluster import PullSample
from moonpool.engine.jumping import JumpingScheduler
from moonpool.engine.pulls_ahead import LayersHere, PullAhead, join_in_s
from moonpool.engine.sequence import Sequence
from moonpool.sim.world.clock import SimClock
from moonpool.sim.world.pool import PoolHit, SimPool, Sources
from moonpool.sim.world.pulled import pull_sample


class SimPullsAhead:
    """The pulls of one worker, which runs on `nodes`. `compute_s` returns how long a sequence's first step computes
    that begins behind a number of blocks; `on_change` is called when a sequence may enter the batch. An instance
    belongs to one incarnation of the worker: after `stop` nothing is called any more.

    A pull is its first layer and the rest. When the first layer is here, the rest is expected at the same pace, and the
    prompt joins a step as soon as the rest is expected in time. With one layer nothing overlaps.
    """

    def __init__(
        self,
        clock: SimClock,
        nodes: tuple[str, ...],
        scheduler: JumpingScheduler,
        pool: SimPool,
        block_nbytes: int,
        num_layers: int,
        compute_s: Callable[[Sequence, int], float],
        samples: Callable[[PullSample], None],
        on_change: Callable[[], None],
    ) -> None:
        self._clock, self._nodes, self._scheduler, self._pool = clock, nodes, scheduler, pool
        self._block_nbytes, self._num_layers, self._compute_s = block_nbytes, num_layers, compute_s
        self._samples, self._on_change = samples, on_change
        self._is_stopped = False
        self._sources: dict[str, Sources] = {}  # of the blocks that were brought, by request
        self._joined: dict[PullAhead, Callable[[PullAhead], None]] = {}  # called at the end

    def stop(self) -> None:
        """The worker has crashed."""
        self._is_stopped = True

    def begin(self, hits: dict[str, PoolHit]) -> None:
        """Begin pulls for the prompts that wait, before a step is scheduled."""

        def begun(sequence: Sequence, pull: PullAhead) -> None:
            blocks = pull.wanted.blocks
            self._send(pull, sequence, hits[sequence.request_id].sources(blocks[0], blocks[-1] + 1))

        self._scheduler.ahead.begin_waiting(self._scheduler.queues, begun)

    def take(self, request_id: str, num_blocks: int) -> Sources:
        """The prompt enters the batch with `num_blocks` that were brought for it. Return where they came from."""
        sources = self._sources.pop(request_id, {})
        return sources if num_blocks else {}

    def join(self, request_id: str, on_over: Callable[[PullAhead], None]) -> None:
        """The prompt has joined a step. Call `on_over` when its pull is over."""
        pull = self._scheduler.ahead.get(request_id)
        assert pull is not None, "it has joined"
        self._joined[pull] = on_over

    def _send(self, pull: PullAhead, sequence: Sequence, sources: Sources) -> None:
        began_s, end = self._clock.now_s, pull.end

        def first_layer_came(is_lost: bool) -> None:
            if is_lost or self._num_layers == 1:
                self._ended(pull, sequence, sources, began_s, is_lost)
                return
            now_s = self._clock.now_s
            here = LayersHere(1, began_s, now_s, now_s)
            joins_in_s = join_in_s(here, self._num_layers, now_s, self._compute_s(sequence, end))
            self._clock.call_at(now_s + joins_in_s, lambda: self._may_join(pull))
            rest = 1 - 1 / self._num_layers
            self._send_share(sources, rest, lambda lost: self._ended(pull, sequence, sources, began_s, lost))

        self._send_share(sources, 1 / self._num_layers, first_layer_came)

    def _send_share(self, sources: Sources, share: float, on_end: Callable[[bool], None]) -> None:
        """Send a share of the bytes of each source to each node; tell in the end whether a source was lost."""
        left, lost = len(sources) * len(self._nodes), False

        def ended() -> None:
            nonlocal left
            left -= 1
            if not left and not self._is_stopped:
                on_end(lost)

        def failed() -> None:
            nonlocal lost
            lost = True
            ended()

        nbytes = share * self._block_nbytes / len(self._nodes)
        for (source, on_ssd), count in sources.items():
            for node in self._nodes:
                self._clock.send(self._pool.route(source, node, on_ssd), count * nbytes, ended, failed)

    def _may_join(self, pull: PullAhead) -> None:
        if not (self._is_stopped or pull.is_over or pull.is_given_up):
            pull.may_join = True
            self._on_change()

    def _ended(self, pull: PullAhead, sequence: Sequence, sources: Sources, began_s: float, lost: bool) -> None:
        """Of a pull that lost a source nothing is used, and the prompt computes what is left."""
        num_good = 0 if lost else len(pull.wanted.blocks)
        if num_good and not pull.is_given_up:
            before = self._sources.get(pull.request_id, {})
            keys = [*before, *(each for each in sources if each not in before)]
            self._sources[pull.request_id] = {each: before.get(each, 0) + sources.get(each, 0) for each in keys}
        self._scheduler.ahead.end(pull, num_good)
        if lost:
            sequence.ahead_limit = pull.wanted.num_local_blocks
        else:
            self._samples(pull_sample(sources, self._block_nbytes, self._clock.now_s - began_s, self._nodes))
        on_over = self._joined.pop(pull, None)
        if on_over is not None:
            on_over(pull)
        self._on_change()
