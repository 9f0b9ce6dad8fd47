"""Requests that fail inside an engine: each ends with an error of its own, and the rest of its batch goes on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from moonpool.base.errors import Internal, InvalidInput
from moonpool.engine import engine as engine_module
from moonpool.engine.blocks import PageManager
from moonpool.engine.engine import Engine, StepFailure
from moonpool.engine.runner import LayerHooks
from moonpool.engine.sampler import LogitsAdjuster, SampleRow, sample
from moonpool.engine.scheduler import Scheduler, SchedulerConfig
from moonpool.engine.sequence import Chunk, SamplingParams
from moonpool.engine.step_times import StepTimes

VOCAB = 7
GREEDY = SamplingParams(max_tokens=3, temperature=0)


class CountingRunner:
    """Its next token is the last one plus 1. Raises, or computes NaN, when one of the named requests is in the step."""

    launcher = None

    def __init__(self) -> None:
        self.times = StepTimes()
        self.raises: set[str] = set()
        self.spoils: set[str] = set()
        self.is_broken = False
        self.steps: list[list[str]] = []

    def execute(self, chunks: Sequence[Chunk], hooks: LayerHooks | None) -> torch.Tensor:
        names = [chunk.request_id for chunk in chunks]
        if names != ["probe"]:
            self.steps.append(names)
        if self.is_broken or self.raises & set(names):
            raise IndexError("index out of range in self")
        rows = torch.zeros(len(chunks), VOCAB)
        for i, chunk in enumerate(chunks):
            rows[i, (chunk.tokens[-1] + 1) % VOCAB] = 1.0
            if chunk.request_id in self.spoils:
                rows[i] = torch.nan
        return rows[[i for i, chunk in enumerate(chunks) if chunk.wants_logits]]


class Bench:
    def __init__(self, *names: str, params: SamplingParams = GREEDY) -> None:
        self.runner = CountingRunner()
        limits = SchedulerConfig(max_batch_tokens=64, max_num_seqs=8, max_seq_tokens=64)
        self.engine = Engine(Scheduler(limits, PageManager(16, 4)), self.runner)
        self.tokens: dict[str, list[int]] = {}
        self.errors: dict[str, Exception] = {}
        for name in names:
            self.add(name, params)

    def add(self, name: str, params: SamplingParams = GREEDY) -> None:
        self.engine.add_request(name, [1, 2], params)
        self.tokens[name] = []

    def step(self) -> None:
        for out in self.engine.step():
            if isinstance(out, StepFailure):
                self.errors[out.request_id] = out.error
            else:
                self.tokens[out.request_id].append(out.token)
        self.engine.scheduler.check_integrity()

    def run(self) -> None:
        while self.engine.has_work():
            self.step()
        assert self.engine.scheduler.pages.num_used == 0


def test_nan_in_one_row_ends_that_request_alone() -> None:
    bench = Bench("a", "bad", "b")
    bench.step()
    bench.runner.spoils = {"bad"}
    bench.run()
    assert bench.tokens == {"a": [3, 4, 5], "bad": [3], "b": [3, 4, 5]}
    assert isinstance(bench.errors["bad"], Internal)
    assert "no usable probabilities for token 3" in str(bench.errors["bad"])


def test_a_row_that_raises_while_sampling_ends_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def sampling(logits: torch.Tensor, rows: Sequence[SampleRow], adjuster: LogitsAdjuster) -> list[object]:
        if any(row.params.seed == 666 for row in rows):
            raise ZeroDivisionError("never seen before")
        return list(sample(logits, rows, adjuster))

    monkeypatch.setattr(engine_module, "sample", sampling)
    bench = Bench("a", "b")
    bench.add("bad", SamplingParams(max_tokens=3, seed=666))
    bench.run()
    assert bench.tokens == {"a": [3, 4, 5], "b": [3, 4, 5], "bad": []}
    assert str(bench.errors["bad"]) == "sampling its next token raised ZeroDivisionError"
    assert len(bench.runner.steps) == 3, "nothing was computed twice"


def test_a_pass_that_fails_is_computed_again_one_by_one_until_the_culprit_is_known() -> None:
    bench = Bench("a", "bad", "b")
    bench.step()
    bench.runner.raises = {"bad"}
    bench.run()
    assert bench.runner.steps[1:] == [["a", "bad", "b"], ["a"], ["bad"], ["b"], ["a", "b"]]
    assert bench.tokens == {"a": [3, 4, 5], "bad": [3], "b": [3, 4, 5]}
    assert str(bench.errors["bad"]) == "computing it raised IndexError"


def test_a_pass_that_fails_once_costs_nobody_anything() -> None:
    bench = Bench("a", "b")
    bench.runner.raises = {"b"}
    bench.step()
    bench.runner.raises = set()
    bench.run()
    assert bench.tokens == {"a": [3, 4, 5], "b": [3, 4, 5]}
    assert bench.errors == {}


def test_an_engine_that_computes_nothing_any_more_says_so_and_blames_no_request() -> None:
    bench = Bench("a")
    bench.runner.is_broken = True
    with pytest.raises(IndexError):
        bench.step()
    assert bench.engine.scheduler.get("a") is not None
    bench.engine.scheduler.check_integrity()


def test_a_request_whose_every_token_is_barred_is_told_so() -> None:
    bench = Bench("a")
    bench.add("barred", SamplingParams(max_tokens=3, min_tokens=1, stop_token_ids=tuple(range(VOCAB))))
    bench.run()
    assert isinstance(bench.errors["barred"], InvalidInput)
    assert bench.tokens["a"] == [3, 4, 5]
