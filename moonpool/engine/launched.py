"""Decode steps that are launched on a GPU and read later: the interface between engine and GPU.

While the host reads the tokens of one step, the GPU computes the next one (decode_graphs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from moonpool.engine.sequence import Chunk

if TYPE_CHECKING:
    import torch

    from moonpool.engine.sampler import Draw


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
    def logits(self) -> torch.Tensor:
        """[rows, vocab]; the next launch overwrites them."""

    def tokens(self) -> list[int]:
        """Wait for the step; return each row's token, or -1 where the logits have no finite maximum."""


class StepLauncher(Protocol):
    """Launches decode steps without waiting for them (decode_graphs.py). `on_prepare` is called before it prepares
    something during a launch, which may take seconds."""

    on_prepare: Callable[[str], None]

    def fits(self, chunks: Sequence[Chunk]) -> bool:
        """Return whether this is a decode step that can be launched."""

    def launch(self, chunks: Sequence[Chunk], draws: Sequence[Draw], after: LaunchedStep | None = None) -> LaunchedStep:
        """Enqueue the step, which draws a token for each chunk. A chunk whose token is UNKNOWN_TOKEN takes it from its
        row of `after`, the step that was launched last. At most two steps may be under way.
        """

    def warm_up(self, *, decodes: bool) -> None:
        """Prepare the kernels of long prompts and, with `decodes`, all batch sizes."""
