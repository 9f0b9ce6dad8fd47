"""Blocks that are brought for sequences that wait: they are found at admission, given back when not wanted, and
never cost a running sequence its pages."""

from __future__ import annotations

from scheduler_model import BLOCK_TOKENS, scheduler, sequence

from moonpool.engine.pulls_ahead import PullAhead
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
