"""vLLM's MooncakeStoreConnector while a part of the pool is killed or stopped: right answers, and no step waits."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from vllm_pool import FEWEST_LOADED, NUM_BLOCKS, Pool, prompt_of
from vllm_process import Answer, NodeProcess, VllmProcess, assert_same_text
from waiting import wait_until

pytestmark = pytest.mark.vllm
StartVllm = Callable[..., VllmProcess]
Answers = dict[int, Answer]
OUTAGE_S = 12.0
MOST_HELD_UP_S = OUTAGE_S / 4  # of the engine's thread, in all its steps of one outage; it is printed


def start_and_store(start_vllm: StartVllm, pool: Pool, right: Answers, *, force_tcp: bool) -> VllmProcess:
    """An engine whose prompts are in the pool and no longer in its own cache."""
    engine = start_vllm("engine", pool.connector(force_tcp=force_tcp))
    engine.wait_ready()
    for seed, answer in right.items():
        assert_same_text(engine.generate(prompt_of(seed)), answer)
    wait_until(lambda: len(engine.records("put")) == NUM_BLOCKS * len(right), "all blocks are put")
    engine.forget()
    return engine


@contextmanager
def in_the_middle_of_a_load(engine: VllmProcess, right: Answers) -> Iterator[None]:
    """The block runs after the pool said that it has a prompt, and before the engine loads that prompt. Then the engine
    looks another one up, answers both, and is held up no longer than it may be.
    """
    engine.ask("hold_loads")
    number = engine.begin(prompt_of(1))
    wait_until(lambda: bool(engine.ask("loads_held")["count"]), "a load is held")
    engine.step_times()
    yield
    other = engine.begin(prompt_of(2))
    engine.ask("release_loads")
    assert_same_text(engine.result(number), right[1])
    assert_same_text(engine.result(other), right[2])
    times = engine.step_times()
    print(f"held up {times.sum_s:.3f} s in {times.count} steps, {times.longest_s:.3f} s at most in one")
    assert times.sum_s <= MOST_HELD_UP_S


def assert_is_used_again(engine: VllmProcess, right: Answers, seed: int) -> None:
    """The engine loads the prompt from the pool after some time."""

    def is_loaded() -> bool:
        engine.forget()
        before = engine.ask("external_hits")["count"]
        answer = engine.generate(prompt_of(seed))
        assert_same_text(answer, right[seed])
        return bool(answer.external_hits - before >= FEWEST_LOADED)

    wait_until(is_loaded, "it is loaded")


def test_node_killed(start_vllm: StartVllm, pool: Pool, node: NodeProcess, right_answers: Answers) -> None:
    engine = start_and_store(start_vllm, pool, right_answers, force_tcp=True)
    with in_the_middle_of_a_load(engine, right_answers):
        node.lines.kill()
    assert {row["code"] for row in engine.records("get")} <= {-800, -900}
    pool.add_node("n1")
    assert_is_used_again(engine, right_answers, 1)
    engine.finish()


def test_node_stopped(start_vllm: StartVllm, pool: Pool, node: NodeProcess, right_answers: Answers) -> None:
    engine = start_and_store(start_vllm, pool, right_answers, force_tcp=True)
    with in_the_middle_of_a_load(engine, right_answers):
        node.lines.signal(signal.SIGSTOP)
        began = time.monotonic()
    time.sleep(max(0.0, began + OUTAGE_S - time.monotonic()))
    node.lines.signal(signal.SIGCONT)
    assert_is_used_again(engine, right_answers, 3)
    engine.finish()


def test_master_killed(start_vllm: StartVllm, pool: Pool, right_answers: Answers) -> None:
    engine = start_and_store(start_vllm, pool, right_answers, force_tcp=False)
    with in_the_middle_of_a_load(engine, right_answers):
        pool.master.kill()
    pool.start_master()
    assert_is_used_again(engine, right_answers, 3)
    engine.finish()


def test_master_stopped(start_vllm: StartVllm, pool: Pool, right_answers: Answers) -> None:
    engine = start_and_store(start_vllm, pool, right_answers, force_tcp=False)
    with in_the_middle_of_a_load(engine, right_answers):
        pool.master.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
    time.sleep(max(0.0, began + OUTAGE_S - time.monotonic()))
    pool.master.process.send_signal(signal.SIGCONT)
    assert_is_used_again(engine, right_answers, 3)
    engine.finish()
