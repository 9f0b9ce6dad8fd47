"""Small components of the simulated cluster, each compared with a plain implementation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from world_cases import BLOCK, chat, cluster, trace_of

from moonpool.base.keys import object_key
from moonpool.engine.sequence import SamplingParams, Sequence
from moonpool.sim.physics.links import Network
from moonpool.sim.world.clock import SimClock
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.job import DONE
from moonpool.sim.world.pool import BlockRuns
from moonpool.sim.world.results import Results
from moonpool.sim.world.sequence import TOKEN, SimSequence, block_key, block_keys, block_number
from moonpool.sim.world.stepper import StepLog

# runs


@given(seed=st.integers(0, 10_000), max_blocks=st.sampled_from([1, 2, 5, 1000]))
def test_runs_are_blocks_that_always_come_together(seed: int, max_blocks: int) -> None:
    trace = chat(30, seed)
    runs = BlockRuns(trace, max_blocks)
    prompts = [each.block_ids[: each.num_input // BLOCK].tolist() for each in trace]
    members: dict[int, list[int]] = {}
    for numbers in prompts:
        split = runs.split(numbers)
        assert [begin for _, begin, _ in split] == [0, *(end for _, _, end in split[:-1])][: len(split)]
        assert sum(end - begin for _, begin, end in split) == len(numbers)
        for head, begin, end in split:
            assert numbers[begin] == head
            assert end - begin <= max_blocks
            assert members.setdefault(head, numbers[begin:end]) == numbers[begin:end], "whole, whoever uses it"
    for head, numbers in members.items():
        assert runs.blocks(object_key(block_key(head))) == numbers
    together = {number: head for head, numbers in members.items() for number in numbers}
    assert len(together) == sum(map(len, members.values())), "a block is in one run"


def test_runs_lead_to_the_same_answers_as_blocks() -> None:
    trace = chat(300, seed=2)
    exact, by_runs = (Results.of(SimCluster(cluster(max_run_blocks=size), trace).run()).summary() for size in (1, 16))
    assert by_runs["hit_share"] == pytest.approx(exact["hit_share"], abs=0.005)
    assert by_runs["ttft_s_mean"] == pytest.approx(exact["ttft_s_mean"], rel=0.02)


def test_prompts_without_a_full_block_have_no_run() -> None:
    runs = BlockRuns(trace_of((0.0, 100, 1, [0]), (1.0, 600, 1, [1, 2])), 16)
    assert runs.split([]) == []
    assert runs.split([1]) == [(1, 0, 1)]


# gaps between tokens


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0.001, 5.0)), min_size=1, max_size=20), st.floats(0.001, 5.0))
def test_the_longest_tenth_of_the_gaps(entries: list[tuple[int, float]], first_gap_s: float) -> None:
    log = StepLog()
    log.add(3, 100.0)  # of others, before
    for num_steps, seconds in entries:
        log.add(num_steps, seconds)
    gaps = sorted([first_gap_s, *(seconds / count for count, seconds in entries for _ in range(count))], reverse=True)
    longest = gaps[: max(1, len(gaps) // 10)]
    assert log.long_gaps_s(1, first_gap_s) == pytest.approx(sum(longest) / len(longest))


# sequences on paper


@given(st.integers(1, 40), st.lists(st.integers(1, 9), max_size=6))
def test_a_sequence_on_paper_counts_as_a_real_one(num_prompt: int, extensions: list[int]) -> None:
    real = Sequence("a", [TOKEN] * num_prompt, SamplingParams(max_tokens=500), root=b"r" * 32, block_tokens=4)
    paper = SimSequence("a", 7, num_prompt, 500, block_keys(range(num_prompt // 4)), 4)
    for count in extensions:
        real.extend(TOKEN, count)
        paper.extend(TOKEN, count)
        for name in ("num_output_tokens", "num_uncomputed_tokens", "num_reusable_blocks"):
            assert getattr(paper, name) == getattr(real, name)
        assert paper.num_tokens == real.num_tokens == len(real.tokens)
        assert len(paper.keys) == len(real.keys) == len(set(paper.keys))
        chunk, other = paper.chunk(1), real.chunk(1)
        assert (chunk.start, chunk.end, chunk.wants_logits) == (other.start, other.end, other.wants_logits)


@given(st.integers(0, 2**56))
def test_a_block_is_known_by_its_key(number: int) -> None:
    assert block_number(block_key(number)) == number
    assert block_number(object_key(block_key(number))) == number


# pages


@pytest.mark.parametrize("seed", [3, 4, 17])
def test_places_are_not_given_from_pages_that_decodes_under_way_will_need(seed: int) -> None:
    node = cluster().node
    small = replace(node, gpu=replace(node.gpu, hbm_nbytes=26e9))
    jobs = SimCluster(cluster(num_prefill=4, num_decode=1, node=small), chat(60, seed, rate=4.0)).run()
    assert {job.outcome for job in jobs} == {DONE}


# the clockwork


def test_flows_end_before_events_of_the_same_moment_happen() -> None:
    clock = SimClock(Network({"link": 10.0}))
    told: list[tuple[str, float]] = []
    clock.call_at(2.0, lambda: told.append(("event", clock.now_s)))
    clock.send(("link",), 20.0, lambda: told.append(("flow", clock.now_s)))
    clock.call_at(1.0, lambda: clock.cancel(late))
    late = clock.call_at(3.0, lambda: told.append(("late", clock.now_s)))
    clock.run()
    assert told == [("flow", 2.0), ("event", 2.0)]


def test_progress_is_told_now_and_then() -> None:
    clock = SimClock(Network())
    for number in range(10_000):
        clock.call_at(float(number), lambda: None)
    told: list[float] = []
    clock.run(told.append)
    assert told == sorted(told)
    assert 1 <= len(told) <= 10
