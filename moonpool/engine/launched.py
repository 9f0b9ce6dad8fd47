"""Decode steps that are launched on a GPU and read later: the interface between engine and GPU.

While the host reads the tokens of one step, the GPU computes the next one (decode_graphs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from moonpool.engine.sequence import Chunk
from moonpool.engine.step_times import Mark

if TYPE_CHECKING:
    from moonpool.engine.sampler import LogitsAdjuster, SampledToken, SampleRow


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The largest steps: sequences of a decode step, tokens of one sequence, tokens of all chunks."""

    max_num_seqs: int
    max_seq_tokens: int
    max_batch_tokens: int


class LaunchedStep(Protocol):
    """A decode step that was enqueued. One row per chunk."""

    @property
    def chunks(self) -> Sequence[Chunk]: ...

    @property
    def rows(self) -> dict[str, int]:
        """The row of each request."""

    @property
    def began(self) -> Mark:
        """Where the device begins with the step, for StepTimes."""

    @property
    def ended(self) -> Mark:
        """Where the device has its tokens."""

    def outcomes(self) -> list[SampledToken]:
        """Wait for the step; return what each row sampled. Its token is UNUSABLE or ALL_BARRED where there is none."""


class StepLauncher(Protocol):
    """Launches decode steps without waiting for them (decode_graphs.py). `on_prepare` is called before it prepares
    something during a launch, which may take seconds."""

    on_prepare: Callable[[str], None]

    @property
    def adjuster(self) -> LogitsAdjuster:
        """Adjusts logits of other steps; it shares the counts of tokens with the launched ones."""

    def fits(self, chunks: Sequence[Chunk], rows: Sequence[SampleRow]) -> bool:
        """Return whether this is a decode step that can be launched."""

    def launch(
        self, chunks: Sequence[Chunk], rows: Sequence[SampleRow], after: LaunchedStep | None = None
    ) -> LaunchedStep:
        """Enqueue the step, which samples a token for each chunk as its row says. A chunk whose token is UNKNOWN_TOKEN
        takes it from its row of `after`, the step that was launched last. At most two steps may be under way.
        """

    def warm_up(self, *, decodes: bool) -> None:
        """Prepare the kernels of long prompts and, with `decodes`, all batch sizes."""
