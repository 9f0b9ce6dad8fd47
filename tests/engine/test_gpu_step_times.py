"""On a GPU, `pytest -m gpu`: times of steps are those of the device, though the host does not wait for it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from random_model import small_model, token_prompt

from moonpool.engine.config import EngineConfig
from moonpool.engine.engine import Engine
from moonpool.engine.load import load_runner, make_scheduler
from moonpool.engine.model_files import read_config, resolve
from moonpool.engine.sequence import AdmittedSequence, Chunk, FullBlock, SamplingParams
from moonpool.engine.step_times import EventMarks, StepTime

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CYCLES = 200_000_000  # about a tenth of a second


class SlowSteps:
    """A link that keeps the device busy after the first layer of each prompt's step, while the host goes on."""

    def __init__(self) -> None:
        self.cycles = 0
        self.times: list[StepTime] = []

    def begin_step(self, chunks: Sequence[Chunk], admitted: Sequence[AdmittedSequence]) -> SlowSteps | None:
        return self if any(len(chunk.tokens) > 1 for chunk in chunks) else None

    def before_layer(self, layer: int) -> None:
        pass

    def after_layer(self, layer: int) -> None:
        if layer == 0 and self.cycles:
            torch.cuda._sleep(self.cycles)  # type: ignore[no-untyped-call]

    def end_step(self) -> Mapping[str, int]:
        return {}

    def completed(self, full_blocks: Sequence[FullBlock]) -> None:
        pass

    def computed(self, time: StepTime) -> None:
        self.times.append(time)


@pytest.fixture
def engine(tmp_path: Path) -> tuple[Engine, SlowSteps]:
    config = EngineConfig(num_pages=256, block_tokens=64, max_batch_tokens=128, max_model_len=2048, device="cuda")
    files, link = resolve(str(small_model(tmp_path / "small")), random_weights=True), SlowSteps()
    runner = load_runner(files, read_config(files), config)
    runner.warm_up()
    engine = Engine(make_scheduler(read_config(files), config), runner, link)
    engine.generate([token_prompt(300, 1)], SamplingParams(max_tokens=4, temperature=0.0))  # compiles kernels
    link.times.clear()
    return engine, link


def test_chunks_that_are_not_waited_for_count_what_the_gpu_computes(engine: tuple[Engine, SlowSteps]) -> None:
    own, link = engine
    marks = EventMarks(torch.cuda.current_stream())
    began = marks.mark()
    torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
    ended = marks.mark()
    torch.cuda.synchronize()
    sleep_s = marks.seconds(began, ended)
    assert sleep_s is not None
    link.cycles = CYCLES
    own.generate([token_prompt(384, 2)], SamplingParams(max_tokens=1, temperature=0.0))
    assert [len(each.chunks[0].tokens) for each in link.times] == [128, 128, 128]
    for each in link.times:
        assert 0.8 * sleep_s < each.seconds < 2 * sleep_s


def test_periods_of_decode_steps_add_up_to_the_time_that_passes(engine: tuple[Engine, SlowSteps]) -> None:
    own, link = engine
    for number in range(4):
        prompt = token_prompt(50, 10 + number)
        own.add_request(f"r{number}", prompt, SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True))
    for _ in range(10):
        own.step()
    link.times.clear()
    began_s, num_steps = time.perf_counter(), 300
    for _ in range(num_steps):
        own.step()
    passed_s = time.perf_counter() - began_s
    assert len(link.times) == num_steps
    assert sum(each.period_s for each in link.times) == pytest.approx(passed_s, rel=0.1)
