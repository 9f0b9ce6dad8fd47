"""Computes chunks of prompts that pass a pipeline, one between two steps of the engine. All on the engine's thread.

Its pages hold the KV of this stage's layers alone, so they are never published: no other request may reuse them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from moonpool.base.cluster import ReportedRequest
from moonpool.base.errors import Cancelled, Internal, MoonpoolError
from moonpool.engine.blocks import PageManager
from moonpool.engine.request_report import reported_stage
from moonpool.engine.runner import Runner
from moonpool.engine.sequence import Chunk, pages_for
from moonpool.engine.stages import StageQueue
from moonpool.worker.kv_link.push import Push
from moonpool.worker.loop import EngineLoop
from moonpool.worker.prefill import completed_blocks
from moonpool.worker.watchdog import EngineProgress, work_of

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class StagedPrompt:
    """A prompt at one stage. `read_hidden` returns the hidden states of a chunk, None at the first stage.

    `on_computed` gets the number of a chunk and what this stage made of it, `on_failure` why it could not.
    """

    name: str
    tokens: list[int]
    layers: range
    is_last: bool
    push: Push
    read_hidden: Callable[[int], torch.Tensor] | None
    on_computed: Callable[[int, torch.Tensor], None]
    on_failure: Callable[[MoonpoolError], None]
    pages: tuple[int, ...] = ()
    bounds: list[tuple[int, int]] = field(default_factory=list)  # of its chunks; none before it starts

    @property
    def owner(self) -> str:
        """Return the owner name of its references in the page manager."""
        return f"stage:{self.name}"

    def chunk(self, number: int) -> Chunk:
        start, end = self.bounds[number]
        wants_logits = self.is_last and number == len(self.bounds) - 1
        return Chunk(self.name, start, tuple(self.tokens[start:end]), self.pages, wants_logits)


class _LayerSink:
    """The hooks of one chunk: what a layer completed goes out."""

    def __init__(self, push: Push, blocks: range, progress: EngineProgress) -> None:
        self._push, self._blocks, self._progress = push, blocks, progress

    def before_layer(self, layer: int) -> None:
        """The stage's pages have all KV that it reads: it was pulled before, or computed here."""

    def after_layer(self, layer: int) -> None:
        self._progress.went_on()
        self._push.layer_ready(layer, self._blocks)


class StageRunner:
    def __init__(self, runner: Runner, pages: PageManager) -> None:
        self._runner, self._pages = runner, pages
        self._queue: StageQueue[str] = StageQueue()
        self._prompts: dict[str, StagedPrompt] = {}
        self.loop: EngineLoop | None = None  # set once, before the loop starts

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    @property
    def block_tokens(self) -> int:
        return self._pages.block_tokens

    def waiting_work(self) -> list[ReportedRequest]:
        """Return what the stages here still have to compute, in tokens of whole prompts."""
        left = [(each.name, self.work_tokens(each, self._tokens_left(each))) for each in self._prompts.values()]
        return [reported_stage(name, num_tokens) for name, num_tokens in left if num_tokens]

    def work_tokens(self, prompt: StagedPrompt, num_tokens: int) -> int:
        """Return the work of `num_tokens` at this stage, which has some of the layers, in tokens of whole prompts."""
        return -(-num_tokens * len(prompt.layers) // self._runner.model.config.num_layers)

    def _tokens_left(self, prompt: StagedPrompt) -> int:
        num_left = self._queue.num_left(prompt.name)
        if num_left is None:  # it has its pages and begins soon
            return len(prompt.tokens)
        return len(prompt.tokens) - prompt.bounds[-num_left][0] if num_left else 0

    def reserve(self, prompt: StagedPrompt) -> None:
        """Reserve pages for the prompt. Raise NoSpace if there are too few now, AlreadyExists if it is here."""
        num_blocks = pages_for(len(prompt.tokens), self._pages.block_tokens)
        prompt.pages = tuple(self._pages.reserve(prompt.owner, num_blocks).pages)
        self._prompts[prompt.name] = prompt

    def replace_pages(self, prompt: StagedPrompt) -> None:
        """Give the prompt other pages. Raise NoSpace if there are too few now, so that it has none, and Cancelled if it
        was dropped."""
        self._require(prompt)
        self._pages.release(prompt.owner)
        prompt.pages = tuple(self._pages.reserve(prompt.owner, len(prompt.pages)).pages)

    def start(self, prompt: StagedPrompt, bounds: list[tuple[int, int]]) -> None:
        """Begin to hand over and to compute these chunks: the KV of the blocks before them is in the pages. Do nothing
        if the prompt was dropped."""
        if self._prompts.get(prompt.name) is prompt:
            prompt.bounds = bounds
            prompt.push.begin(prompt.pages, bounds[0][0] // self._pages.block_tokens, 0)
            is_first = prompt.read_hidden is None
            self._queue.add(prompt.name, len(bounds), is_first=is_first, is_last=prompt.is_last)

    def arrived(self, name: str) -> None:
        self._queue.arrived(name)

    def taken(self, name: str) -> None:
        self._queue.taken(name)

    def drop(self, prompt: StagedPrompt) -> None:
        """Forget the prompt and free its pages. Idempotent."""
        if self._prompts.get(prompt.name) is prompt:
            del self._prompts[prompt.name]
            self._queue.drop(prompt.name)
            self._pages.release(prompt.owner)

    def hold(self, owner: str, prompt: StagedPrompt) -> None:
        """Keep the prompt's pages for `owner` too. Raise Cancelled if the prompt was dropped."""
        self._require(prompt)
        self._pages.hold(owner, prompt.pages)

    def _require(self, prompt: StagedPrompt) -> None:
        if self._prompts.get(prompt.name) is not prompt:
            raise Cancelled("the stage has ended")

    def release(self, owner: str) -> None:
        self._pages.release(owner)

    def at_boundary(self) -> None:
        """Compute one chunk, if one is ready; the engine's step comes next, so neither waits long for the other."""
        opened = self._queue.begin()
        if opened is None:
            return
        name, number = opened
        prompt = self._prompts[name]
        assert self.loop is not None
        self.loop.progress.begin_step(*self._describe(prompt, number))
        try:
            found = self._compute(prompt, number)
        except Exception as error:  # noqa: BLE001 - it concerns this prompt alone; a broken engine shows in its steps
            _LOG.warning("a chunk of %s failed", name, exc_info=error)
            self._queue.end()
            self._queue.drop(name)
            own = error if isinstance(error, MoonpoolError) else Internal(f"computing it raised {type(error).__name__}")
            prompt.on_failure(own)
            return
        self._queue.end()
        prompt.on_computed(number, found)
        # The last stage's hidden states are not read; hidden states for another stage are copied to main memory.
        self.loop.progress.end_step(is_read=not prompt.is_last or number == len(prompt.bounds) - 1)
        if self._queue.has_ready:
            self.loop.post(_wake)

    def _describe(self, prompt: StagedPrompt, number: int) -> tuple[str, float]:
        """Return what to call a chunk's computation in the log, and its work."""
        start, end = prompt.bounds[number]
        part = len(prompt.layers) / self._runner.model.config.num_layers
        return f"tokens {start} to {end} of {prompt.name}, layers of a pipeline", work_of(end - start, start) * part

    def _compute(self, prompt: StagedPrompt, number: int) -> torch.Tensor:
        chunk = prompt.chunk(number)
        hidden = None if prompt.read_hidden is None else prompt.read_hidden(number)
        is_end = number == len(prompt.bounds) - 1  # of the prompt: its last block is complete, full or not
        blocks = completed_blocks(chunk, self._pages.block_tokens, is_end=is_end)
        assert self.loop is not None
        hooks = _LayerSink(prompt.push, blocks, self.loop.progress)
        return self._runner.execute_span(chunk, prompt.layers, hidden, hooks)


def _wake() -> None:
    """Posted to make the engine's thread look for the next chunk."""
