"""An engine that launches decode steps ahead gives the tokens of one that does not, whatever ends or arrives meanwhile.

The launcher here keeps "device" tokens per row and counts per slot as decode_graphs.py does, computes a step only when
it is read or when the one behind it is read, and fails the test if a step uses a page that another sequence owns, or
counts that are not those of its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.errors import MoonpoolError
from moonpool.engine.blocks import PageManager
from moonpool.engine.engine import Engine, Executor, StepFailure
from moonpool.engine.llama import LayerHooks
from moonpool.engine.penalties import Counts, CountSlots, count_tokens
from moonpool.engine.sampler import ALL_BARRED, HostAdjuster, SampledToken, SampleRow, sample
from moonpool.engine.scheduler import Scheduler, SchedulerConfig
from moonpool.engine.sequence import UNKNOWN_TOKEN, Chunk, SamplingParams
from moonpool.engine.step_times import StepTimes

VOCAB, BLOCK_TOKENS, EOS = 50, 4, 7


def next_tokens(token: int, position: int) -> list[int]:
    """The two equally likely tokens after this one, in vocabulary order; the greedy choice is the first."""
    first = (token * 3 + position * 5 + 1) % VOCAB
    return sorted([first, (first + 11) % VOCAB])


def logits_of(pairs: Sequence[list[int]]) -> torch.Tensor:
    logits = torch.full((len(pairs), VOCAB), -torch.inf)
    for row, pair in zip(logits, pairs, strict=True):
        row[pair] = 1.0
    return logits


@dataclass
class Memory:
    """One cell per (page, slot): the token whose KV is there."""

    cells: dict[tuple[int, int], int] = field(default_factory=dict)

    def write(self, chunk: Chunk, tokens: Sequence[int]) -> None:
        for position, token in enumerate(tokens, chunk.start):
            self.cells[chunk.pages[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = token

    def check(self, chunk: Chunk, history: Sequence[int]) -> None:
        """The KV of all earlier positions is that of this sequence."""
        found = [self.cells.get((chunk.pages[p // BLOCK_TOKENS], p % BLOCK_TOKENS)) for p in range(len(history))]
        assert found == list(history), (chunk, found)


class FakeLaunched:
    def __init__(
        self, launcher: FakeLauncher, chunks: Sequence[Chunk], rows: Sequence[SampleRow], after: FakeLaunched | None
    ) -> None:
        self.chunks, self.rows = chunks, {chunk.request_id: row for row, chunk in enumerate(chunks)}
        self._launcher, self._after = launcher, after
        self._outcomes: list[SampledToken] | None = None
        self.began = self.ended = 0.0
        self._asked = [replace(row, tokens=[*row.tokens], num_ahead=0) for row in rows]  # sequences grow meanwhile
        penalized = [number for number, row in enumerate(rows) if row.params.penalizes]
        sequences = [(rows[number].tokens, rows[number].num_prompt_tokens) for number in penalized]
        places = launcher.slots.place(sequences, rows[0].num_ahead)
        self._places = dict(zip(penalized, places, strict=True))

    def outcomes(self) -> list[SampledToken]:
        if self._outcomes is None:
            self._outcomes = [self._compute(number, chunk) for number, chunk in enumerate(self.chunks)]
            self._after = None
            self._launcher.num_pending -= 1
        return self._outcomes

    def _compute(self, number: int, chunk: Chunk) -> SampledToken:
        (token,), row = chunk.tokens, self._asked[number]
        known = [*row.tokens]
        if token == UNKNOWN_TOKEN:
            assert self._after is not None
            token = self._after.outcomes()[self._after.rows[chunk.request_id]].token
            row = replace(row, tokens=[*known, token])
        if token < 0:  # the sequence ends with an error
            return SampledToken(token)
        self._launcher.memory.write(chunk, [token])
        self._check_counts(number, known, row, token)
        (outcome,) = sample(logits_of([next_tokens(token, chunk.start)]), [row])
        return outcome if isinstance(outcome, SampledToken) else SampledToken(ALL_BARRED)

    def _check_counts(self, number: int, known: Sequence[int], row: SampleRow, token: int) -> None:
        """Count as the GPU does; the counts are then those of all tokens."""
        place, counts = self._places.get(number), self._launcher.counts
        if place is not None:
            if place.is_new:
                counts[place.slot] = count_tokens(known, row.num_prompt_tokens, VOCAB, wide=False)
            if place.is_due:
                counts[place.slot][token] += -1 if counts[place.slot][token] < 0 else 1
            wanted = count_tokens(row.tokens, row.num_prompt_tokens, VOCAB, wide=False)
            assert counts[place.slot].tolist() == wanted.tolist()


class FakeLauncher:
    def __init__(self, memory: Memory) -> None:
        self.memory, self.num_pending, self.num_ahead = memory, 0, 0
        self.slots, self.counts = CountSlots(4), dict[int, Counts]()
        self.adjuster = HostAdjuster(4, 40)

    def fits(self, chunks: Sequence[Chunk], rows: Sequence[SampleRow]) -> bool:
        return all(len(chunk.tokens) == 1 and chunk.wants_logits for chunk in chunks)

    def launch(
        self, chunks: Sequence[Chunk], rows: Sequence[SampleRow], after: FakeLaunched | None = None
    ) -> FakeLaunched:
        self.num_pending += 1
        self.num_ahead += after is not None
        assert self.num_pending <= 2, "at most two steps are under way"
        return FakeLaunched(self, chunks, rows, after)

    def warm_up(self, *, decodes: bool) -> None:
        pass


class Bench:
    def __init__(self, *, ahead: bool, num_pages: int = 24) -> None:
        self.memory = Memory()
        self.launcher = FakeLauncher(self.memory) if ahead else None
        self.times = StepTimes()
        limits = SchedulerConfig(max_batch_tokens=16, max_num_seqs=4, max_seq_tokens=40, eos_token_ids=frozenset({EOS}))
        self.engine = Engine(Scheduler(limits, PageManager(num_pages, BLOCK_TOKENS)), cast(Executor, self))
        self.tokens: dict[str, list[int]] = {}
        self.errors: dict[str, MoonpoolError] = {}

    def execute(self, chunks: Sequence[Chunk], hooks: LayerHooks | None) -> torch.Tensor:
        pairs = []
        for chunk in chunks:
            self.memory.write(chunk, chunk.tokens)
            if chunk.wants_logits:
                sequence = self.engine.scheduler.get(chunk.request_id)
                assert sequence is not None
                self.memory.check(chunk, sequence.tokens[: chunk.end])
                pairs.append(next_tokens(chunk.tokens[-1], chunk.end - 1))
        return logits_of(pairs)

    def add(self, name: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self.tokens[name] = []
        self.engine.add_request(name, prompt, params)

    def step(self) -> None:
        for out in self.engine.step():
            if isinstance(out, StepFailure):
                self.errors[out.request_id] = out.error
            else:
                self.tokens[out.request_id].append(out.token)
        self.engine.scheduler.check_integrity()

    def finish(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work():
                break
            self.step()
        assert not self.engine.has_work()
        assert self.engine.scheduler.pages.num_available == self.engine.scheduler.pages.num_pages


def greedy(
    max_tokens: int, *, logprobs: bool = False, min_tokens: int = 0, seed: int | None = None, **penalties: float
) -> SamplingParams:
    """Greedy, or drawn with a seed."""
    return SamplingParams(
        **cast(dict[str, Any], penalties),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=0 if seed is None else 1,
        seed=seed or 0,
        logprobs=1 if logprobs else None,
    )


def answer(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    bench = Bench(ahead=False)
    bench.add("alone", prompt, params)
    bench.finish()
    return bench.tokens["alone"]


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"logprobs": True},
        {"min_tokens": 18},
    ],
    ids=str,
)
def test_most_steps_are_launched_ahead(own: dict[str, Any]) -> None:
    """Whatever one of the requests wants beside a token."""
    bench = Bench(ahead=True)
    each = [greedy(20, **(own if n == 1 else {})) for n in range(3)]
    for n in range(3):
        bench.add(f"r{n}", [n + 1, n + 2], each[n])
    bench.finish()
    assert bench.launcher is not None
    assert bench.launcher.num_ahead >= 15
    assert bench.launcher.num_pending == 0
    for n in range(3):
        assert bench.tokens[f"r{n}"] == answer([n + 1, n + 2], each[n])


def test_pages_of_a_cancelled_request_stay_until_the_launched_step_is_over() -> None:
    bench = Bench(ahead=True)
    bench.add("r", [3, 4], greedy(20))
    for _ in range(4):
        bench.step()
    pages = bench.engine.scheduler.pages
    bench.engine.cancel("r")
    assert pages.num_available < pages.num_pages
    assert bench.engine.has_work()
    bench.step()
    assert pages.num_available == pages.num_pages
    assert not bench.engine.has_work()


request = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
    st.integers(1, 18),
    st.booleans(),
    st.integers(0, 3),
    st.none() | st.integers(0, 1000),
    st.sampled_from([{}, {}, {"repetition_penalty": 1.3}, {"presence_penalty": 0.4, "frequency_penalty": -0.3}]),
)
events = st.lists(st.one_of(request, st.integers(0, 9), st.just("step"), st.just("step")), max_size=40)


@settings(deadline=None, max_examples=200)
@given(events, st.integers(11, 30))
def test_tokens_are_those_without_launching_ahead(script: list[object], num_pages: int) -> None:
    bench = Bench(ahead=True, num_pages=num_pages)
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    cancelled: set[str] = set()
    for event in script:
        if isinstance(event, tuple):
            prompt, max_tokens, logprobs, min_tokens, seed, own = event
            name = f"r{len(asked)}"
            params = greedy(max_tokens, logprobs=logprobs, min_tokens=min(min_tokens, max_tokens), seed=seed, **own)
            asked[name] = (prompt, params)
            bench.add(name, prompt, params)
        elif isinstance(event, int):
            name = f"r{event}"
            if bench.engine.cancel(name):
                cancelled.add(name)
        else:
            bench.step()
    bench.finish()
    assert not bench.errors
    for name, (prompt, params) in asked.items():
        whole = answer(prompt, params)
        got = bench.tokens[name]
        assert got == whole[: len(got)]
        assert name in cancelled or len(got) == len(whole)
