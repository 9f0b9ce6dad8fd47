"""What a prefill worker reports that its prompts took: their own share of the steps, pulls left out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scheduler_model import BLOCK_TOKENS, ROOT, scheduler

from moonpool.base.clock import VirtualClock
from moonpool.base.cluster import PrefillSample
from moonpool.engine.engine import StepOutput
from moonpool.engine.sampler import SampledToken
from moonpool.engine.sequence import Chunk, SamplingParams
from moonpool.engine.step_times import ClockMarks, StepTime, StepTimes
from moonpool.worker.messages import RequestSpec
from moonpool.worker.metrics import Samples
from moonpool.worker.prefill import PrefillRole, Prompt, engine_name


class NoPush:
    """Hand-offs are none of this test's business."""

    sent_nbytes = 0

    def begin(self, *_: Any) -> None: ...

    def commit(self, *_: Any) -> None: ...

    def abort(self) -> None: ...

    def finish_puts(self, **_: Any) -> None: ...


class Bench:
    def __init__(self, max_batch_tokens: int) -> None:
        self.clock, self.samples = VirtualClock(), Samples()
        self.times = StepTimes(ClockMarks(self.clock))
        self.scheduler = scheduler(max_batch_tokens=max_batch_tokens)
        self.role = PrefillRole(
            scheduler=self.scheduler,
            puller=cast(Any, SimpleNamespace(page_nbytes=64)),
            make_push=cast(Any, None),
            samples=self.samples,
            pull_timeout_s=1.0,
            pull_grace_s=0.0,
            clock=self.clock,
            times=self.times,
        )

        self.role.loop = cast(Any, SimpleNamespace(run_inside=lambda: False))

    def add(self, name: str, start: int, num_tokens: int) -> None:
        spec = RequestSpec(
            request_id=name,
            epoch=0,
            tokens=list(range(start, start + num_tokens)),
            num_prompt_tokens=num_tokens,
            root=ROOT,
            params=SamplingParams(max_tokens=5),
        )
        prompt = Prompt(spec, cast(Any, NoPush()), lambda _: None, self.clock.now_s())
        self.role._add(engine_name(spec), self.role.sequence(spec), prompt)

    def pull(self, *jobs: object) -> None:
        """The step waits for these."""
        self.role._jobs = cast(Any, list(jobs))

    def stall(self, seconds: float) -> Callable[..., bool]:
        def wait_layer(*_: object) -> bool:
            self.clock.advance(seconds)
            return True

        return wait_layer

    def step(self, computing_s: float, stalled_s: float = 0.0) -> None:
        chunks = self.scheduler.schedule()
        self.times.begin(chunks)
        hooks = self.role.begin_step(chunks, self.scheduler.drain_admitted())
        if stalled_s:
            self.pull(SimpleNamespace(admitted=SimpleNamespace(request_id="another"), wait_layer=self.stall(stalled_s)))
            hooks.before_layer(0)
            self.pull()
        self.clock.advance(computing_s)
        self.times.end()
        for time in self.times.drain():
            self.role.computed(time)
        result = self.scheduler.complete({chunk.request_id: 7 for chunk in chunks if chunk.wants_logits})
        self.role.on_step(
            [StepOutput(each.request_id, SampledToken(7), each.finish_reason, 0) for each in result.accepted]
        )


def test_prompts_of_one_step_share_its_time() -> None:
    bench = Bench(max_batch_tokens=64)
    bench.add("a", 0, 30)
    bench.add("b", 100, 10)
    bench.step(4.0)
    assert [(each.num_tokens, each.seconds) for each in bench.samples.prefills] == [(30, 3.0), (10, 1.0)]


def test_what_a_step_waited_for_a_pull_is_not_what_computing_takes() -> None:
    bench = Bench(max_batch_tokens=8)
    bench.add("a", 0, 2 * BLOCK_TOKENS + 2)
    bench.step(2.0, stalled_s=5.0)
    bench.add("b", 100, 3)
    bench.step(1.0)
    (first, second) = bench.samples.prefills
    assert first.seconds == pytest.approx(2.0 + 1.0 * 2 / 5)
    assert second.seconds == pytest.approx(1.0 * 3 / 5)


def test_a_pull_may_take_as_long_as_the_calibrated_time_allows_until_a_step_without_one_shows_it() -> None:
    bench = Bench(max_batch_tokens=64)
    assert bench.role.pull_limit_s(BLOCK_TOKENS) == 1.0  # the timeout: nothing is known
    bench.role.calibrate(PrefillSample(100, 20, 80 * 0.01))
    calibrated_s = bench.role.pull_limit_s(BLOCK_TOKENS)
    assert calibrated_s == pytest.approx(2 * 0.01 * BLOCK_TOKENS)
    bench.add("a", 0, 10)
    bench.role.computed(StepTime([Chunk("a/0", 0, tuple(range(10)), (0,), False)], 5.0, 5.0, has_waited=True))
    assert bench.role.pull_limit_s(BLOCK_TOKENS) == calibrated_s, "other threads took the interpreter from that step"
    bench.step(0.1)
    assert bench.role.pull_limit_s(BLOCK_TOKENS) == pytest.approx(2 * 0.01 * BLOCK_TOKENS)
    bench.add("b", 100, 10)
    bench.step(0.05)
    assert bench.role.pull_limit_s(BLOCK_TOKENS) == pytest.approx(2 * 0.005 * BLOCK_TOKENS)
