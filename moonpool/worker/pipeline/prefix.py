"""Pulls a stage's layers of a prompt's leading blocks from the pool, before the pipeline begins to compute.

All stages do so at the same time, and the leader begins behind the blocks that every one of them has. So nothing is
handed over before all pulls have ended, and a pull that finds less costs computing, never a wrong byte.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from moonpool.base.clock import Clock
from moonpool.engine.sequence import AdmittedSequence
from moonpool.worker.kv_link.pull import Puller
from moonpool.worker.kv_link.pull_job import PullJob, PullResult
from moonpool.worker.loop import EngineLoop
from moonpool.worker.metrics import Samples
from moonpool.worker.pipeline.stage_runner import StagedPrompt, StageRunner

_LOG = logging.getLogger(__name__)
_NOTHING = PullResult(0, 0, 0.0)


class PrefixPuller:
    """`limit_s` returns how long a pull of a number of tokens may take."""

    def __init__(
        self,
        puller: Puller,
        stages: StageRunner,
        loop: EngineLoop,
        samples: Samples,
        limit_s: Callable[[int], float],
        clock: Clock,
    ) -> None:
        self.puller = puller
        self._stages, self._loop, self._samples = stages, loop, samples
        self._limit_s, self._clock = limit_s, clock

    async def pull(self, prompt: StagedPrompt, keys: Sequence[bytes]) -> PullResult:
        """Bring the prompt's layers of these blocks, its first ones, into its pages. Return what has arrived. Raise
        Cancelled if the prompt was dropped, NoSpace if a pull that takes too long keeps its pages and there are no
        others for the prompt.
        """
        if not keys or self.puller.is_resting:
            return _NOTHING
        events, ended, began_s = asyncio.get_running_loop(), asyncio.Event(), self._clock.now_s()

        def on_end() -> None:
            events.call_soon_threadsafe(ended.set)

        job = await self._loop.ask(lambda: self._start(prompt, keys, on_end))
        num_tokens = self._stages.work_tokens(prompt, len(keys) * self._stages.block_tokens)
        try:
            async with asyncio.timeout(self._limit_s(num_tokens)):
                await ended.wait()
        except TimeoutError:
            _LOG.info("%s begins without the pool, which took too long", prompt.name)
        finally:
            result = job.wait_end(0.0)  # left behind unless it has ended
        waited_s = self._clock.now_s() - began_s
        self._loop.post(lambda: self._count(job, result, waited_s))
        if job.left_behind:
            await self._loop.ask(lambda: self._stages.replace_pages(prompt))
        return result

    # on the engine's thread

    def _start(self, prompt: StagedPrompt, keys: Sequence[bytes], on_end: Callable[[], None]) -> PullJob:
        # Even if the stage ends, these pages are not reused while the puller may write to them.
        owner, blocks = f"pull:{prompt.owner}", tuple(range(len(keys)))
        self._stages.hold(owner, prompt)

        def ended() -> None:
            self._loop.post(lambda: self._stages.release(owner))
            on_end()

        wanted = AdmittedSequence(prompt.name, 0, blocks, prompt.pages[: len(keys)], tuple(keys))
        return self.puller.start(wanted, ended, compute_s=0.0, layers=prompt.layers)

    def _count(self, job: PullJob, result: PullResult, waited_s: float) -> None:
        now_s = self._clock.now_s()
        self._samples.add_pull(result, now_s)
        if job.left_behind:
            self._samples.add_late_pull(job, self.puller.piece_nbytes, waited_s, now_s)
            self.puller.rest()
