"""A pipeline of stages: how prompts are cut, what a stage computes next, and layers computed span by span."""

from __future__ import annotations

import random
from collections import Counter, deque
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import BLOCK_TOKENS, load_runner, save_tiny

from moonpool.base.errors import InvalidInput
from moonpool.engine.sequence import Chunk, pages_for
from moonpool.engine.stages import (
    MAX_CHUNKS,
    MIN_CHUNKS,
    WINDOW,
    PipelineShape,
    StageQueue,
    best_chunk_tokens,
    chunk_bounds,
    common_prefix_blocks,
    layer_spans,
    pipeline_s,
    widened_chunk_tokens,
)


@given(num_layers=st.integers(1, 130), num_stages=st.integers(1, 16))
def test_spans_cover_all_layers_evenly(num_layers: int, num_stages: int) -> None:
    if num_stages > num_layers:
        with pytest.raises(InvalidInput):
            layer_spans(num_layers, num_stages)
        return
    spans = layer_spans(num_layers, num_stages)
    assert [layer for span in spans for layer in span] == list(range(num_layers))
    sizes = [len(span) for span in spans]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes), "the last stage also samples"


@given(
    num_tokens=st.integers(MIN_CHUNKS, 200_000),
    num_stages=st.integers(2, 8),
    step_tokens=st.integers(0, 8192),
    work_s=st.floats(1e-4, 1e3),
    fixed_s=st.floats(0, 10),
)
def test_a_prompt_is_cut_into_at_least_eight_chunks(
    num_tokens: int, num_stages: int, step_tokens: int, work_s: float, fixed_s: float
) -> None:
    shape = PipelineShape(num_stages, step_tokens)
    tokens = best_chunk_tokens(shape, num_tokens, work_s, fixed_s)
    bounds = chunk_bounds(num_tokens, tokens)
    assert len(bounds) >= MIN_CHUNKS
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_tokens
    assert all(end == start for (_, end), (start, _) in pairwise(bounds))
    assert not step_tokens or tokens <= step_tokens


@given(
    chunk_tokens=st.integers(1, 8192),
    num_tokens=st.integers(1, 2_000_000),
    step_tokens=st.integers(1, 8192),
    data=st.data(),
)
def test_chunks_are_larger_where_less_came_from_the_pool(
    chunk_tokens: int, num_tokens: int, step_tokens: int, data: st.DataObject
) -> None:
    widened = widened_chunk_tokens(chunk_tokens, num_tokens, step_tokens)
    assert chunk_tokens <= widened <= max(chunk_tokens, step_tokens)
    assert len(chunk_bounds(num_tokens, widened)) <= MAX_CHUNKS or widened >= step_tokens
    if len(chunk_bounds(num_tokens, chunk_tokens)) <= MAX_CHUNKS:
        assert widened == chunk_tokens, "what was chosen stays"
    fewer = data.draw(st.integers(1, num_tokens))
    assert widened_chunk_tokens(chunk_tokens, fewer, step_tokens) <= widened, "a stage has room for the largest"


def test_the_chunk_size_is_near_the_best_one() -> None:
    """No other number of chunks is more than a tenth faster by the formula that the size is derived from."""
    shape, work_s, fixed_s = PipelineShape(2, 0), 6.0, 0.03

    def time_s(number: int) -> float:
        return pipeline_s([work_s / number + fixed_s] * number, 2)

    number = len(chunk_bounds(4096, best_chunk_tokens(shape, 4096, work_s, fixed_s)))
    assert time_s(number) < 1.1 * min(time_s(each) for each in range(MIN_CHUNKS, MAX_CHUNKS + 1))


def test_no_chunk_is_cut_off_at_the_end_of_a_long_prompt() -> None:
    assert best_chunk_tokens(PipelineShape(2, 0), 1500, work_s=3.5, fixed_s=0.12) == 188
    assert len(chunk_bounds(1500, 188)) == MIN_CHUNKS


@given(num_tokens=st.integers(1, 500), chunk_tokens=st.integers(1, 200), data=st.data())
def test_chunks_begin_behind_a_prefix(num_tokens: int, chunk_tokens: int, data: st.DataObject) -> None:
    first_token = data.draw(st.integers(0, num_tokens - 1))
    bounds = chunk_bounds(num_tokens, chunk_tokens, first_token)
    assert [token for start, end in bounds for token in range(start, end)] == list(range(first_token, num_tokens))
    assert all(end - start == chunk_tokens for start, end in bounds[:-1])


@pytest.mark.parametrize("first_token", [-1, 10, 11])
def test_a_prompt_has_a_token_to_compute(first_token: int) -> None:
    with pytest.raises(InvalidInput):
        chunk_bounds(10, 4, first_token)


def test_a_prompt_begins_behind_what_all_stages_have() -> None:
    assert common_prefix_blocks([5, 3, 4], num_tokens=100, block_tokens=16) == 3
    assert common_prefix_blocks([5, 0], num_tokens=100, block_tokens=16) == 0
    assert common_prefix_blocks([6, 6], num_tokens=97, block_tokens=16) == 6
    assert common_prefix_blocks([6, 6], num_tokens=96, block_tokens=16) == 5, "the last token is computed"
    assert common_prefix_blocks([9], num_tokens=1, block_tokens=16) == 0


def test_the_time_of_a_pipeline() -> None:
    assert pipeline_s([1.0] * 8, 1) == 8.0
    assert pipeline_s([1.0] * 8, 2) == pytest.approx(8 / 2 + 1 / 2)
    assert pipeline_s([1.0, 2.0], 4, boundary_s=0.1) == pytest.approx((3 + 3 * 2) / 4 + 0.3)


class Line:
    """Stages behind each other, whose events happen in random order."""

    def __init__(self, num_stages: int, rng: random.Random) -> None:
        self._rng = rng
        self.stages: list[StageQueue[str]] = [StageQueue() for _ in range(num_stages)]
        self.computing: list[tuple[str, int] | None] = [None] * num_stages
        self.wires: list[deque[tuple[str, int]]] = [deque() for _ in range(num_stages)]  # into each stage
        self.computed: Counter[tuple[int, str, int]] = Counter()
        self.last: dict[tuple[int, str], int] = {}
        self.untaken: Counter[tuple[int, str]] = Counter()
        self.dropped: set[str] = set()

    def add(self, name: str, num_chunks: int) -> None:
        last = len(self.stages) - 1
        for at, stage in enumerate(self.stages):
            stage.add(name, num_chunks, is_first=at == 0, is_last=at == last)

    def step(self) -> bool:
        """Let one event happen; return False if there is none."""
        events = []
        for at, stage in enumerate(self.stages):
            if self.computing[at] is not None:
                events.append((self._end, at))
            elif stage.has_ready:
                events.append((self._begin, at))
            if self.wires[at]:
                events.append((self._arrive, at))
        if not events:
            return False
        act, at = self._rng.choice(events)
        act(at)
        return True

    def _begin(self, at: int) -> None:
        opened = self.stages[at].begin()
        assert opened is not None, "has_ready said so"
        assert self.stages[at].begin() is None, "one chunk at a time"
        self.computing[at] = opened

    def _end(self, at: int) -> None:
        opened = self.computing[at]
        assert opened is not None
        name, number = opened
        self.computing[at] = None
        self.stages[at].end()
        if name in self.dropped:
            return
        self.computed[at, name, number] += 1
        assert self.last.get((at, name), -1) == number - 1, "in order"
        self.last[at, name] = number
        if at:
            self.untaken[at - 1, name] -= 1
            self.stages[at - 1].taken(name)
        if at + 1 < len(self.stages):
            self.untaken[at, name] += 1
            assert self.untaken[at, name] <= WINDOW
            self.wires[at + 1].append((name, number))

    def _arrive(self, at: int) -> None:
        name, _ = self.wires[at].popleft()
        self.stages[at].arrived(name)

    def drop(self, name: str) -> None:
        self.dropped.add(name)
        for stage in self.stages:
            stage.drop(name)


@settings(max_examples=150, deadline=None)
@given(
    num_stages=st.integers(1, 4),
    chunks=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    drop=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_chunk_passes_every_stage_once_and_in_order(
    num_stages: int, chunks: list[int], drop: bool, seed: int
) -> None:
    rng = random.Random(seed)
    line = Line(num_stages, rng)
    for number, count in enumerate(chunks):
        line.add(f"p{number}", count)
    if drop:
        for _ in range(rng.randrange(20)):
            line.step()
        line.drop("p0")
    while line.step():
        pass
    expected = {
        (at, f"p{number}", chunk)
        for at in range(num_stages)
        for number, count in enumerate(chunks)
        for chunk in range(count)
        if f"p{number}" not in line.dropped
    }
    done = {key for key in line.computed if key[1] not in line.dropped}
    assert done == expected, "no stage waits for ever"
    assert set(line.computed.values()) <= {1}


def test_an_unfinished_prompt_comes_before_a_later_one_and_leaves_its_gaps_to_it() -> None:
    stage: StageQueue[str] = StageQueue()
    stage.add("first", 2, is_first=False, is_last=True)
    stage.add("second", 1, is_first=True, is_last=True)
    assert stage.begin() == ("second", 0)
    assert stage.end()
    stage.arrived("first")
    assert stage.begin() == ("first", 0)
    assert not stage.end()
    stage.arrived("first")
    with pytest.raises(InvalidInput, match="another one came"):
        stage.arrived("first")
    stage.drop("first")
    stage.arrived("first")  # late: the prompt is gone
    assert "first" not in stage


@pytest.mark.parametrize("name", ["llama", "llama_tied_biased", "qwen3"])
@pytest.mark.parametrize(("num_stages", "chunk_tokens"), [(2, 32), (3, 50), (1, 16)])
def test_spans_of_layers_compute_what_the_whole_model_computes(
    name: str, num_stages: int, chunk_tokens: int, tmp_path: Path, own_cache: Path
) -> None:
    """Bit for bit: the same chunks through stages with KV memory of their own, and through one worker."""
    save_tiny(name, tmp_path / "model")
    whole = load_runner(tmp_path / "model", num_pages=16)
    stages = [load_runner(tmp_path / "model", num_pages=16) for _ in range(num_stages)]
    prompt = random.Random(3).choices(range(3, 211), k=150)
    pages = tuple(range(pages_for(len(prompt), BLOCK_TOKENS)))
    spans = layer_spans(whole.model.config.num_layers, num_stages)
    for start, end in chunk_bounds(len(prompt), chunk_tokens):
        chunk = Chunk("r", start, tuple(prompt[start:end]), pages, end == len(prompt))
        expected = whole.execute([chunk])
        hidden: torch.Tensor | None = None
        for stage, span in zip(stages, spans, strict=True):
            hidden = stage.execute_span(chunk, span, hidden)
        assert hidden is not None
        assert torch.equal(hidden, expected)
    for stage, span in zip(stages, spans, strict=True):
        for layer in span:
            for page in pages:
                own, other = stage.kv.tensor[page], whole.kv.tensor[page]
                assert torch.equal(own[layer], other[layer])
