"""Both roles of a worker around one engine: prompts and answers share its steps, its pages and its queue.

Which role a worker has says what the conductor sends it. A worker that changes its role ends prompts that it has begun,
and answers that cannot move (moving.py), so a step may hold prompts and answers. Chunks of prompts that pass a pipeline
are computed between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moonpool.engine.engine import StepFailure, StepOutput
from moonpool.engine.runner import LayerHooks
from moonpool.engine.sequence import AdmittedSequence, Chunk, FullBlock
from moonpool.engine.step_times import StepTime
from moonpool.worker.decode import DecodeRole
from moonpool.worker.pipeline.stage_runner import StageRunner
from moonpool.worker.prefill import PrefillRole
from moonpool.worker.watchdog import EngineProgress, work_of_step


class BothRoles:
    """The engine's StepLink: gives each role its part of a step. On the engine's thread."""

    def __init__(self, prefill: PrefillRole, decode: DecodeRole, stages: StageRunner, progress: EngineProgress) -> None:
        self._prefill, self._decode, self._stages = prefill, decode, stages
        self._progress = progress
        self._has_prompts = self._is_read = False  # the current step, and whether its results are waited for

    def at_boundary(self) -> None:
        self._prefill.ahead.at_boundary()
        self._decode.at_boundary()
        self._stages.at_boundary()

    def begin_step(self, chunks: Sequence[Chunk], admitted: Sequence[AdmittedSequence]) -> LayerHooks | None:
        """Without a prompt in the step there are no hooks, so that a GPU can launch it as a whole."""
        self._has_prompts = any(self._prefill.has(chunk.request_id) for chunk in chunks)
        prompts = [entry for entry in admitted if self._prefill.has(entry.request_id)]
        answers = [entry for entry in admitted if not self._prefill.has(entry.request_id)]
        self._decode.begin_step(answers)
        hooks = self._prefill.begin_step(chunks, prompts) if self._has_prompts else None
        self._is_read = any(chunk.wants_logits for chunk in chunks)
        waits_s = self._prefill.waits_at_most_s if hooks is not None else 0.0
        self._progress.begin_step("a step", work_of_step(chunks), waits_s, chunks)
        return hooks

    def end_step(self) -> Mapping[str, int]:
        return self._prefill.end_step() if self._has_prompts else {}

    def completed(self, full_blocks: Sequence[FullBlock]) -> None:
        """Put the blocks of answers to the pool; those of prompts are on their way already."""
        self._decode.completed([block for block in full_blocks if not self._prefill.has(block.request_id)])

    def computed(self, time: StepTime) -> None:
        """Tell the role of the step how long it took. Prompts are still known: they end in on_step()."""
        has_prompts = any(self._prefill.has(chunk.request_id) for chunk in time.chunks)
        (self._prefill if has_prompts else self._decode).computed(time)

    def on_step(self, outputs: Sequence[StepOutput | StepFailure]) -> None:
        self._progress.end_step(is_read=self._is_read)
        answers = [out for out in outputs if not self._prefill.has(out.request_id)]
        if self._has_prompts:
            self._prefill.on_step([out for out in outputs if self._prefill.has(out.request_id)])
        self._decode.on_step(answers)
