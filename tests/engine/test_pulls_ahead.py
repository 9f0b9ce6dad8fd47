"""Blocks that are brought for sequences that wait: they are found at admission, given back when not wanted, and
never cost a running sequence its pages."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_model import BLOCK_TOKENS, scheduler, sequence

from moonpool.engine.pulls_ahead import LayersHere, PullAhead, join_in_s
from moonpool.engine.scheduler import Scheduler
from moonpool.engine.sequence import Sequence


def waiting(sched: Scheduler, name: str, num_tokens: int, start: int = 0, max_tokens: int = 1) -> Sequence:
    it = sequence(name, num_tokens, start=start, max_tokens=max_tokens)
    sched.add(it)
    return it


def begun(sched: Scheduler, it: Sequence, end: int, max_pages: int = 100) -> PullAhead:
    pull = sched.ahead.begin(it, end, max_pages)
    assert pull is not None
    return pull


def test_what_was_brought_is_found_at_admission() -> None:
    sched = scheduler(8)
    it = waiting(sched, "a", 14)
    pull = begun(sched, it, 3)
    assert (pull.wanted.blocks, len(pull.wanted.pages)) == ((0, 1, 2), 3)
    assert sched.schedule() == [], "it waits for what is on its way"
    sched.ahead.end(pull, 3)
    assert sched.ahead.num_pages == 3
    [chunk] = sched.schedule()
    assert (chunk.start, len(chunk.tokens)) == (12, 2)
    assert chunk.pages[:3] == pull.wanted.pages
    [admitted] = sched.drain_admitted()
    assert (admitted.num_local_blocks, admitted.num_ahead_blocks, admitted.blocks) == (3, 3, ())
    assert (len(sched.ahead), sched.pages.owned) == (0, {})
    sched.check_integrity()


def test_others_pass_a_sequence_whose_blocks_are_on_their_way() -> None:
    sched = scheduler(8)
    pull = begun(sched, waiting(sched, "a", 6), 1)
    waiting(sched, "b", 3, start=50, max_tokens=5)
    assert [chunk.request_id for chunk in sched.schedule()] == ["b"]
    sched.complete({"b": 1})
    sched.ahead.end(pull, 1)
    assert {chunk.request_id for chunk in sched.schedule()} == {"a", "b"}


def test_only_verified_blocks_are_used_and_the_pages_of_others_are_free() -> None:
    sched = scheduler(8)
    pull = begun(sched, waiting(sched, "a", 14), 3)
    sched.ahead.end(pull, 1)
    assert (sched.ahead.num_pages, sched.pages.num_free) == (1, 7)
    [chunk] = sched.schedule()
    assert chunk.start == BLOCK_TOKENS


def test_blocks_that_are_here_are_not_brought_again() -> None:
    sched = scheduler(8)
    first = waiting(sched, "a", 14)
    sched.ahead.end(begun(sched, first, 2), 2)
    sched.cancel("a")
    assert sched.pages.num_cached == 2, "they stay in the cache"
    pull = begun(sched, waiting(sched, "b", 14), 3)
    assert (pull.wanted.num_local_blocks, pull.wanted.blocks) == (2, (2,))
    sched.ahead.end(pull, 1)
    assert sched.ahead.begin(waiting(sched, "c", 14), 3, 100) is None, "all are here"


def test_no_more_pages_than_the_budget_and_than_there_are() -> None:
    sched = scheduler(8)
    assert len(begun(sched, waiting(sched, "a", 30), 7, max_pages=3).wanted.blocks) == 3
    taken = sched.pages.allocate(4)
    assert sched.ahead.begin(waiting(sched, "b", 30, start=50), 2, 100) is None, "one page is free"
    assert sched.ahead.begin(waiting(sched, "c", 30, start=100), 1, 0) is None, "the budget is spent"
    sched.pages.free(taken)
    sched.check_integrity()


def test_a_sequence_that_leaves_gives_everything_back_but_not_while_its_pages_are_written() -> None:
    sched = scheduler(8)
    pull = begun(sched, waiting(sched, "a", 14), 3)
    sched.cancel("a")
    assert (len(sched.ahead), sched.pages.num_available) == (0, 5), "the pull still writes to them"
    sched.ahead.end(pull, 2)
    assert (sched.pages.num_available, sched.pages.num_cached) == (8, 2)
    sched.check_integrity()


def test_a_running_sequence_gets_the_pages_that_are_held_for_one_that_waits() -> None:
    sched = scheduler(4, max_num_seqs=1)
    running = waiting(sched, "run", 4, max_tokens=12)
    sched.schedule()
    sched.complete({"run": 1})
    later = waiting(sched, "later", 12, start=50)
    sched.ahead.end(begun(sched, later, 2), 2)
    for _ in range(9):
        assert len(sched.schedule()) == 1
        sched.complete({"run": 1})
        sched.check_integrity()
    assert (running.num_preemptions, sched.num_preemptions) == (0, 0)
    assert sched.ahead.num_pages == 0
    assert sched.ahead.begin(later, 2, 100) is None, "no page is left for it now"


def test_a_sequence_that_goes_on_first_gets_the_pages_held_for_a_later_one() -> None:
    sched = scheduler(4)
    waiting(sched, "early", 12, max_tokens=5)
    later = waiting(sched, "later", 12, start=50)
    sched.ahead.end(begun(sched, later, 2), 2)
    chunks = sched.schedule()
    assert [chunk.request_id for chunk in chunks] == ["early"]
    assert sched.ahead.num_pages == 0
    sched.complete({"early": 1})
    sched.check_integrity()


# when a prompt joins a step


def come(number: int, layer_s: float) -> LayersHere:
    """Layers that have come every `layer_s`, the last one just now."""
    return LayersHere(number, 0.0, layer_s, number * layer_s)


def test_a_prompt_joins_when_its_first_layers_are_here_and_the_others_are_expected_in_time() -> None:
    assert join_in_s(LayersHere(0, 0.0, 0.0, 0.0), 10, 0.0, math.inf) == math.inf, "its first layer is not here"
    assert join_in_s(come(1, 0.5), 10, 0.5, 10.0) == 0.0, "layers come faster than they are computed"
    assert join_in_s(come(1, 1.0), 10, 1.0, 5.0) == pytest.approx(9 - 4.5)
    assert join_in_s(come(6, 1.0), 10, 6.0, 5.0) == 0.0, "4 s of pulling and 4.5 s of computing before the last layer"
    assert join_in_s(come(10, 9.0), 10, 100.0, 0.0) == 0.0, "all are here"
    assert join_in_s(come(1, 1.0), 1, 1.0, math.inf) == 0.0


def test_a_layer_that_is_overdue_makes_the_pull_as_slow_as_that() -> None:
    assert join_in_s(come(9, 0.1), 10, 0.9, 1.0) == 0.0
    assert join_in_s(come(9, 0.1), 10, 0.9 + 5.0, 1.0) == pytest.approx(5.0 - 0.9)


@given(
    num_layers=st.integers(1, 80), number=st.integers(1, 80), layer_s=st.floats(1e-4, 1.0), compute_s=st.floats(0, 50)
)
def test_no_layer_is_late_if_all_come_as_expected(
    num_layers: int, number: int, layer_s: float, compute_s: float
) -> None:
    """The step computes layer after layer, each as soon as it is here."""
    here = come(min(number, num_layers), layer_s)
    began_s = here.last_s + join_in_s(here, num_layers, here.last_s, compute_s)
    for layer in range(here.number, num_layers):
        assert (layer + 1) * layer_s <= began_s + layer * compute_s / num_layers + 1e-6


def test_a_sequence_that_joins_leaves_others_their_pages_and_gets_its_own() -> None:
    sched = scheduler(8)
    pull = begun(sched, waiting(sched, "a", 14), 3)
    assert sched.schedule() == []
    pull.may_join = True
    [chunk] = sched.schedule()
    assert (chunk.start, chunk.pages[:3]) == (12, pull.wanted.pages)
    assert (sched.ahead.num_pages, sched.pages.num_available) == (0, 4), "they are not held for one that waits"
    sched.ahead.end(pull, 3)
    sched.confirm_pulled("a")
    sched.complete({"a": 1})
    sched.check_integrity()
    assert (sched.pages.owned, sched.pages.num_available) == ({}, 8)


# which pulls begin


def promised(sched: Scheduler, name: str, num_tokens: int, num_blocks: int, start: int) -> Sequence:
    it = sequence(name, num_tokens, start=start, num_pool_blocks=num_blocks, prefill_only=True, max_tokens=5)
    sched.add(it)
    return it


def begin_waiting(sched: Scheduler) -> dict[str, PullAhead]:
    begun: dict[str, PullAhead] = {}
    sched.ahead.begin_waiting(sched.queues, lambda it, pull: begun.update({it.request_id: pull}))
    return begun


def test_sequences_with_room_are_pulled_whole_and_those_behind_wait_for_pages() -> None:
    sched = scheduler(16)
    for at, name in enumerate(("a", "b", "c", "d")):
        promised(sched, name, 6 * BLOCK_TOKENS + 1, 6, 50 * at)
    found = begin_waiting(sched)
    assert {name: len(pull.wanted.blocks) for name, pull in found.items()} == {"a": 6, "b": 6}
    sched.ahead.end(found["a"], 6)
    assert [chunk.request_id for chunk in sched.schedule()] == ["a"], "others wait for pages for their pulls"
    sched.complete({"a": 1})
    sched.release("a")
    sched.ahead.end(found["b"], 6)
    assert [chunk.request_id for chunk in sched.schedule()] == ["b"]
    sched.complete({"b": 1})
    assert {name: len(pull.wanted.blocks) for name, pull in begin_waiting(sched).items()} == {"c": 6, "d": 6}
    sched.check_integrity()


def test_the_rest_of_a_part_is_pulled_when_there_is_room() -> None:
    sched = scheduler(16)
    taken = sched.pages.allocate(10)
    promised(sched, "a", 8 * BLOCK_TOKENS + 1, 8, 0)
    [first] = begin_waiting(sched).values()
    assert first.wanted.blocks == tuple(range(4))
    sched.ahead.end(first, 4)
    assert begin_waiting(sched) == {}
    waiting(sched, "small", 2, start=100)
    assert sched.schedule() == [], "and no later one takes the pages that it waits for"
    sched.pages.free(taken)
    [second] = begin_waiting(sched).values()
    assert (second.wanted.num_local_blocks, second.wanted.blocks) == (4, tuple(range(4, 8)))
    assert [chunk.request_id for chunk in sched.schedule()] == ["small"], "it is no longer pages that it waits for"
    sched.complete({"small": 1})
    sched.ahead.end(second, 4)
    [chunk] = sched.schedule()
    assert (chunk.request_id, chunk.start) == ("a", 8 * BLOCK_TOKENS)
    assert sched.drain_admitted()[-1].num_ahead_blocks == 8
    sched.check_integrity()


def test_a_share_that_others_have_published_meanwhile_is_not_waited_for() -> None:
    sched = scheduler(16)
    taken = sched.pages.allocate(10)
    it = promised(sched, "a", 8 * BLOCK_TOKENS + 1, 8, 0)
    [pull] = begin_waiting(sched).values()
    sched.ahead.end(pull, 4)
    sched.pages.publish(taken[:4], it.keys[4:8])
    sched.pages.free(taken)
    assert begin_waiting(sched) == {}
    [chunk] = sched.schedule()
    assert chunk.start == 8 * BLOCK_TOKENS


def test_without_a_pool_nothing_is_waited_for() -> None:
    sched = scheduler(8)
    taken = sched.pages.allocate(6)
    promised(sched, "a", 6 * BLOCK_TOKENS, 5, 0)
    [pull] = begin_waiting(sched).values()
    sched.ahead.end(pull, 2)
    sched.pages.free(taken)
    sched.ahead.forget_lacking()
    [chunk] = sched.schedule()
    assert chunk.start == 2 * BLOCK_TOKENS


def test_no_prompt_misses_its_pull_because_many_are_pulled_before_it() -> None:
    sched = scheduler(64, max_num_seqs=2)
    for at, name in enumerate(("a", "b", "c")):
        promised(sched, name, 2 * BLOCK_TOKENS + 1, 2, 50 * at)
    found = begin_waiting(sched)
    assert found.keys() == {"a", "b"}
    assert sched.schedule() == [], "c waits for its pull to begin"
    sched.ahead.end(found["a"], 2)
    assert begin_waiting(sched) == {}
    assert [chunk.request_id for chunk in sched.schedule()] == ["a"]
    sched.complete({"a": 1})
    assert begin_waiting(sched).keys() == {"c"}


def test_pages_held_for_a_later_sequence_do_not_keep_the_first_one_from_its_pull() -> None:
    sched = scheduler(8)
    first = sequence("first", 8 * BLOCK_TOKENS - 1, num_pool_blocks=7, prefill_only=True)
    pages = sched.pages.allocate(5)
    sched.pages.publish(pages, first.keys[:5])
    sched.add(first)
    sched.ahead.end(begun(sched, waiting(sched, "later", 14, start=100), 3), 3)
    sched.pages.free(pages)
    assert (sched.ahead.num_pages, sched.pages.num_available) == (3, 5), "all five are blocks of the first"
    [pull] = begin_waiting(sched).values()
    assert (pull.wanted.num_local_blocks, pull.wanted.blocks) == (5, (5, 6))
