"""Times of steps by marks of a device that computes behind the host: in order, never waited for, without waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from moonpool.base.clock import VirtualClock
from moonpool.engine.blocks import PageManager
from moonpool.engine.engine import Engine
from moonpool.engine.llama import LayerHooks
from moonpool.engine.scheduler import Scheduler, SchedulerConfig
from moonpool.engine.sequence import AdmittedSequence, Chunk, FullBlock, SamplingParams
from moonpool.engine.step_times import ClockMarks, StepTime, StepTimes

VOCAB = 9


class Device:
    """Does what was enqueued in order; the host goes on meanwhile, and may wait for it. Also its marks."""

    def __init__(self) -> None:
        self.clock, self.free_s = VirtualClock(), 0.0
        self.num_settled = 0

    def enqueue(self, seconds: float) -> None:
        self.free_s = max(self.free_s, self.clock.now_s()) + seconds

    def wait(self) -> None:
        self.clock.advance(max(0.0, self.free_s - self.clock.now_s()))

    def mark(self) -> float:
        self.enqueue(0.0)
        return self.free_s

    def settle(self, mark: float) -> None:
        assert mark <= self.clock.now_s(), "the device is idle"
        self.num_settled += 1

    def seconds(self, begin: float, end: float) -> float | None:
        return end - begin if end <= self.clock.now_s() else None


CHUNK = [Chunk("a", 0, (1, 2), (0,), False)]


def test_a_step_that_is_not_waited_for_has_its_own_time_once_the_device_is_through() -> None:
    device = Device()
    times = StepTimes(device)
    for seconds in (4.0, 2.0):
        times.begin(CHUNK)
        device.clock.advance(0.01)  # to launch it
        device.enqueue(seconds)
        times.end()
        assert times.drain() == []
    device.wait()
    first, second = times.drain()
    assert first.seconds == pytest.approx(4.01)
    assert second.seconds == pytest.approx(2.0), "from the end of the first"
    assert device.num_settled == 0


def test_a_wait_counts_as_long_as_the_device_had_nothing_to_do() -> None:
    device = Device()
    times = StepTimes(device)
    times.begin(CHUNK)
    device.enqueue(1.0)
    with times.waiting():  # half of it while the device computes
        device.clock.advance(2.0)
    device.enqueue(3.0)
    times.end()
    device.wait()
    (time,) = times.drain()
    assert time.seconds == pytest.approx(4.0)
    assert time.has_waited


def test_a_period_holds_what_the_host_did_between_two_steps() -> None:
    device = Device()
    times = StepTimes(device)
    for _ in range(3):
        times.begin(CHUNK)
        device.enqueue(1.0)
        device.wait()
        times.end(is_read=True)
        device.clock.advance(0.5)
    assert [(each.seconds, each.period_s) for each in times.drain()] == [(1.0, 1.0), (1.0, 1.5), (1.0, 1.5)]
    times.rest()
    device.clock.advance(60.0)
    times.begin(CHUNK)
    device.enqueue(1.0)
    device.wait()
    times.end(is_read=True)
    assert [each.period_s for each in times.drain()] == [1.0], "the engine was idle before"


def test_a_step_that_failed_has_no_time() -> None:
    times = StepTimes(ClockMarks(VirtualClock()))
    times.begin(CHUNK)
    times.rest()
    times.begin(CHUNK)
    times.end()
    assert len(times.drain()) == 1


class Lagging:
    """A runner on the device, and the link that hears of times."""

    launcher = None

    def __init__(self, device: Device) -> None:
        self.device, self.times = device, StepTimes(device)
        self.heard: list[StepTime] = []

    def execute(self, chunks: Sequence[Chunk], hooks: LayerHooks | None) -> torch.Tensor:
        self.device.enqueue(float(sum(len(chunk.tokens) for chunk in chunks)))
        wanting = [chunk for chunk in chunks if chunk.wants_logits]
        if wanting:
            self.device.wait()  # as reading the tokens will
        return torch.ones(len(wanting), VOCAB)

    def begin_step(self, chunks: Sequence[Chunk], admitted: Sequence[AdmittedSequence]) -> None:
        return None

    def end_step(self) -> Mapping[str, int]:
        return {}

    def completed(self, full_blocks: Sequence[FullBlock]) -> None:
        pass

    def computed(self, time: StepTime) -> None:
        self.heard.append(time)


def test_an_engine_knows_the_times_of_a_prompt_when_it_has_its_first_token() -> None:
    """The first chunks are not waited for: by the host's clock they would take no time."""
    device = Device()
    runner = Lagging(device)
    limits = SchedulerConfig(max_batch_tokens=8, max_num_seqs=4, max_seq_tokens=64)
    engine = Engine(Scheduler(limits, PageManager(16, 4)), runner, runner)
    engine.add_request("a", [1] * 20, SamplingParams(max_tokens=3, temperature=0))
    heard = []
    while engine.has_work():
        engine.step()
        heard.append([(len(each.chunks[0].tokens), each.seconds) for each in runner.heard])
        device.clock.advance(0.25)  # between two steps
    prompt = [(8, 8.0), (8, 8.0), (4, 4.0)]
    assert heard[:3] == [[], [], prompt]
    assert [(each.seconds, each.period_s) for each in runner.heard[3:]] == [(1.0, 1.25), (1.0, 1.25)]
