"""Chunked pipeline parallelism: how a long prompt is cut for several workers, and what each computes next. Pure.

A pipeline has stages, each with a span of the model's layers. The prompt is cut into chunks; a chunk passes all stages
in order, and while one stage computes it the stage before computes the next chunk. A chunk needs only the KV of chunks
before it, which every stage has of its own layers, so nothing but hidden states goes from stage to stage. For the same
reason a prompt may begin behind leading blocks whose KV every stage has from elsewhere.

    stage 0   c0 c1 c2 c3
    stage 1      c0 c1 c2 c3        time = (all chunks + the longest chunk once more per further stage) / stages

StageQueue is one stage: live workers drive it with calls and transfers, the simulator with its clock.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

from moonpool.base.errors import InvalidInput

MIN_CHUNKS = 8  # of a prompt: with fewer, the first and the last stage wait for each other too long
MAX_CHUNKS = 64
WINDOW = 3  # outputs that a stage may have computed and the next one has not: one computed, one sent, one in use

K = TypeVar("K", bound=Hashable)


def layer_spans(num_layers: int, num_stages: int) -> list[range]:
    """Return the layers of each stage, as equal as possible; the last stage also samples, so it has none more than
    others. InvalidInput if there are fewer layers than stages."""
    if not 1 <= num_stages <= num_layers:
        raise InvalidInput(f"{num_layers} layers cannot be divided among {num_stages} stages")
    ends = [-(-num_layers * stage // num_stages) for stage in range(num_stages + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def chunk_bounds(num_tokens: int, chunk_tokens: int, first_token: int = 0) -> list[tuple[int, int]]:
    """Return start and end of each chunk of a prompt, from `first_token` on. InvalidInput if there is none."""
    if chunk_tokens < 1:
        raise InvalidInput(f"a chunk has at least one token, not {chunk_tokens}")
    if not 0 <= first_token < num_tokens:
        raise InvalidInput(f"a prompt of {num_tokens} tokens cannot be computed from token {first_token} on")
    return [(start, min(start + chunk_tokens, num_tokens)) for start in range(first_token, num_tokens, chunk_tokens)]


def common_prefix_blocks(stage_blocks: Iterable[int], num_tokens: int, block_tokens: int) -> int:
    """Return the number of leading blocks that a pipeline does not compute. `stage_blocks` is how many each stage has:
    the pipeline skips those that all have, but always computes the last token."""
    return min(min(stage_blocks), (num_tokens - 1) // block_tokens)


class PipelineShape(NamedTuple):
    """What the size of chunks depends on."""

    num_stages: int
    step_tokens: int  # that a worker computes at once; 0: any number


def best_chunk_tokens(shape: PipelineShape, num_tokens: int, work_s: float, fixed_s: float) -> int:
    """Return the chunk size with which a prompt of `work_s` passes the stages soonest, if each chunk costs `fixed_s`
    more. Many chunks keep all stages busy, few chunks cost less.

    With m chunks the time is (work + m fixed) / stages * (1 + (stages - 1) / m), which is smallest at the square root
    below. Chunks need not end where blocks end: 1,500 tokens in chunks of one block of 128 would be twelve, not eight.
    """
    best = math.sqrt((shape.num_stages - 1) * work_s / fixed_s) if fixed_s > 0 else MAX_CHUNKS
    number = round(min(max(best, MIN_CHUNKS), MAX_CHUNKS))
    # Rounded up there is no short last chunk; of a short prompt that would make too few.
    tokens = -(-num_tokens // number) if num_tokens >= number * number else num_tokens // number
    return min(max(1, tokens), shape.step_tokens or num_tokens)


def widened_chunk_tokens(chunk_tokens: int, num_tokens: int, step_tokens: int) -> int:
    """Return the chunk size for `num_tokens` where `chunk_tokens` was chosen for fewer, because more of the prefix was
    expected from the pool: as large as MAX_CHUNKS chunks need, but at most `step_tokens`, what a worker computes at
    once. Never less than `chunk_tokens`."""
    return max(chunk_tokens, min(-(-num_tokens // MAX_CHUNKS), step_tokens))


def pipeline_s(chunk_s: Sequence[float], num_stages: int, boundary_s: float = 0.0) -> float:
    """Return the time of chunks over stages with equal shares of the layers; `chunk_s` are their times on one worker.

    All chunks pass one stage, and the longest once each other stage. A stage sends a chunk to the next in `boundary_s`
    while it computes the next chunk.
    """
    if num_stages < 1:
        raise InvalidInput(f"a pipeline has at least one stage, not {num_stages}")
    return (sum(chunk_s) + (num_stages - 1) * max(chunk_s)) / num_stages + (num_stages - 1) * boundary_s


@dataclass(slots=True)
class _Passing:
    """A prompt on its way through a stage. Each number counts leading chunks."""

    num_chunks: int
    num_arrived: int  # whose hidden states are here
    window: float  # chunks that may be computed before the next stage has taken them
    num_begun: int = 0
    num_computed: int = 0
    num_taken: int = 0  # by the next stage

    @property
    def is_ready(self) -> bool:
        return self.num_begun < self.num_arrived and self.num_begun - self.num_taken < self.window


class StageQueue(Generic[K]):
    """The prompts of one stage, in order of arrival: which chunk comes next. At most one chunk is open at a time.

    Chunks of a prompt are computed in order, once each, and no more than `window` of them before the next stage has
    taken the first. Of several prompts the one that came first goes first, and another fills its gaps.
    """

    def __init__(self) -> None:
        self._prompts: dict[K, _Passing] = {}
        self._open: K | None = None

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, name: object) -> bool:
        return name in self._prompts

    def add(self, name: K, num_chunks: int, *, is_first: bool, is_last: bool, window: int = WINDOW) -> None:
        """Add a prompt. The first stage has all of its input, the last one sends none on."""
        assert name not in self._prompts, "a prompt passes a stage once"
        arrived = num_chunks if is_first else 0
        self._prompts[name] = _Passing(num_chunks, arrived, math.inf if is_last else window)

    def arrived(self, name: K) -> None:
        """The next chunk of this prompt is here. InvalidInput for one too many; ignored if the prompt is gone."""
        passing = self._prompts.get(name)
        if passing is None:
            return
        if passing.num_arrived == passing.num_chunks:
            raise InvalidInput(f"the prompt has {passing.num_chunks} chunks, and another one came")
        passing.num_arrived += 1

    def taken(self, name: K) -> None:
        """The next stage has computed with one more chunk, so its room is free. Ignored if the prompt is gone."""
        passing = self._prompts.get(name)
        if passing is None:
            return
        if passing.num_taken == passing.num_computed:
            raise InvalidInput("a chunk was taken that is not computed")
        passing.num_taken += 1

    def num_left(self, name: K) -> int | None:
        """Return how many chunks of the prompt are not computed yet; None if it is not here."""
        passing = self._prompts.get(name)
        return None if passing is None else passing.num_chunks - passing.num_computed

    @property
    def has_ready(self) -> bool:
        """Whether begin() would return a chunk."""
        return self._open is None and any(passing.is_ready for passing in self._prompts.values())

    def begin(self) -> tuple[K, int] | None:
        """Open the chunk to compute now: return its prompt and number; None if there is none, or one is open."""
        if self._open is not None:
            return None
        for name, passing in self._prompts.items():
            if passing.is_ready:
                self._open = name
                passing.num_begun += 1
                return name, passing.num_begun - 1
        return None

    def end(self) -> bool:
        """Close the open chunk. Return whether its prompt has passed this stage; False if it was dropped meanwhile."""
        assert self._open is not None, "no chunk is open"
        passing, self._open = self._prompts.get(self._open), None
        if passing is None:
            return False
        passing.num_computed += 1
        return passing.num_computed == passing.num_chunks

    def drop(self, name: K) -> None:
        """Forget a prompt, done or not. A chunk of it that is open stays open. Idempotent."""
        self._prompts.pop(name, None)
