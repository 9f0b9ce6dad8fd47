"""A model small enough to check by hand: KV is a number that depends on all tokens before it, as real KV does.

It reads and writes KV through block tables only, so a page that is shared, stale or poisoned where it should
not be changes the tokens that come out.
"""

from collections.abc import Sequence as Seq
from typing import Any

from moonpool.engine.blocks import PageManager
from moonpool.engine.pulls_ahead import PullAhead
from moonpool.engine.scheduler import Scheduler, SchedulerConfig
from moonpool.engine.sequence import Chunk, SamplingParams, Sequence

ROOT = b"r" * 32
BLOCK_TOKENS = 4
VOCAB = 50
CONFIG = SchedulerConfig(max_batch_tokens=64, max_num_seqs=8, max_seq_tokens=200, eos_token_ids=frozenset({VOCAB + 1}))


def scheduler(num_pages: int = 32, **changes: Any) -> Scheduler:
    fields = {name: getattr(CONFIG, name) for name in CONFIG.__slots__} | changes
    return Scheduler(SchedulerConfig(**fields), PageManager(num_pages, BLOCK_TOKENS))


def sequence(request_id: str, prompt: int | Seq[int], *, start: int = 0, **more: Any) -> Sequence:
    """A sequence of a given prompt, or of a given length; other keywords go to params where they belong."""
    tokens = list(range(start, start + prompt)) if isinstance(prompt, int) else list(prompt)
    params = {k: more.pop(k) for k in list(more) if k in SamplingParams.__struct_fields__}
    fields: dict[str, Any] = {"root": ROOT, "block_tokens": BLOCK_TOKENS, **more}
    return Sequence(request_id, tokens, SamplingParams(**{"max_tokens": 20, **params}), **fields)


def pulled(sched: Scheduler, it: Sequence, end: int, max_pages: int = 100) -> PullAhead:
    """Begins a pull of the sequence's blocks up to `end`; it may join a step before the pull is over."""
    pull = sched.ahead.begin(it, end, max_pages)
    assert pull is not None
    pull.may_join = True
    return pull


def fold(previous: int, token: int) -> int:
    return (previous * 1_000_003 + token + 1) % (2**61 - 1)


def kv_of(tokens: Seq[int]) -> list[int]:
    values, last = [], 0
    for token in tokens:
        last = fold(last, token)
        values.append(last)
    return values


def next_token(tokens: Seq[int]) -> int:
    return kv_of(tokens)[-1] % VOCAB


class FakeModel:
    """Pages of a worker, and the model that fills them."""

    def __init__(self, num_pages: int) -> None:
        self.pages = [[0] * BLOCK_TOKENS for _ in range(num_pages)]

    def read(self, table: Seq[int], position: int) -> int:
        return self.pages[table[position // BLOCK_TOKENS]][position % BLOCK_TOKENS]

    def execute(self, chunks: Seq[Chunk]) -> dict[str, int]:
        """Writes the KV of all chunks; the next token of those that want one."""
        for chunk in chunks:
            previous = self.read(chunk.pages, chunk.start - 1) if chunk.start else 0
            for position, token in enumerate(chunk.tokens, chunk.start):
                previous = fold(previous, token)
                self.pages[chunk.pages[position // BLOCK_TOKENS]][position % BLOCK_TOKENS] = previous
        return {c.request_id: self.read(c.pages, c.end - 1) % VOCAB for c in chunks if c.wants_logits}

    def fill(self, pages: Seq[int], blocks: Seq[int], tokens: Seq[int], *, poison: int = 0) -> None:
        """What a pull does: puts right (or wrong) KV of these blocks into pages."""
        values = kv_of(tokens)
        for page, block in zip(pages, blocks, strict=True):
            right = values[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
            self.pages[page][: len(right)] = [value + poison for value in right]


def drive(sched: Scheduler) -> dict[str, tuple[str | None, int]]:
    """Runs until nothing is left; per request the reason of its end and the length of its output."""
    outcome: dict[str, tuple[str | None, int]] = {}
    counts: dict[str, int] = {}
    for _ in range(1000):
        if not sched.has_work():
            return outcome
        chunks = sched.schedule()
        assert chunks, "stuck"
        tokens = {}
        for chunk in chunks:
            known = sched.get(chunk.request_id)
            assert known is not None
            if chunk.wants_logits:
                tokens[chunk.request_id] = next_token(known.tokens)
        for accepted in sched.complete(tokens).accepted:
            counts[accepted.request_id] = counts.get(accepted.request_id, 0) + 1
            outcome[accepted.request_id] = (accepted.finish_reason, counts[accepted.request_id])
        sched.check_integrity()
    raise AssertionError("no end")
