"""The scheduler's rules, one by one, with a model that is a pure function of the tokens."""

from collections import Counter
from typing import Any

import pytest
from scheduler_model import BLOCK_TOKENS, CONFIG, drive, next_token, pulled, scheduler, sequence
from severe import check_tokens

from moonpool.base.errors import AlreadyExists, ConfigError, Internal, NoSpace, PromptTooLong
from moonpool.base.keys import chain_keys
from moonpool.engine.scheduler import Scheduler, SchedulerConfig
from moonpool.engine.sequence import Chunk, Sequence, SequenceStatus, StepResult


def sampled(sched: Scheduler, chunks: list[Chunk]) -> dict[str, int]:
    tokens = {}
    for chunk in chunks:
        known = sched.get(chunk.request_id)
        if chunk.wants_logits and known is not None:
            tokens[chunk.request_id] = next_token(known.tokens)
    return tokens


def step(sched: Scheduler) -> list[Chunk]:
    chunks = sched.schedule()
    sched.complete(sampled(sched, chunks))
    sched.check_integrity()
    return chunks


def finished(result: StepResult) -> dict[str, str]:
    return {a.request_id: a.finish_reason for a in result.accepted if a.finish_reason is not None}


def shape(chunks: list[Chunk]) -> list[tuple[str, int, int]]:
    return [(c.request_id, c.start, len(c.tokens)) for c in chunks]


def test_decodes_come_first_then_prefills_share_the_budget() -> None:
    sched = scheduler(max_batch_tokens=8)
    sched.add(sequence("a", 3))
    sched.add(sequence("b", 9))
    sched.add(sequence("c", 2))
    assert shape(step(sched)) == [("a", 0, 3), ("b", 0, 5)]
    assert shape(step(sched)) == [("a", 3, 1), ("b", 5, 4), ("c", 0, 2)]
    assert shape(step(sched)) == [("a", 4, 1), ("b", 9, 1), ("c", 2, 1)]


def test_no_more_than_max_num_seqs_run_and_the_queue_is_fair() -> None:
    sched = scheduler(max_num_seqs=2)
    for name in "abcd":
        sched.add(sequence(name, 3, max_tokens=2))
    assert [c.request_id for c in step(sched)] == ["a", "b"]
    assert (sched.queues.num_running, sched.queues.num_waiting, sched.queues.num_waiting_tokens) == (2, 2, 6)
    step(sched)
    assert [c.request_id for c in step(sched)] == ["c", "d"]


def test_finish_reasons() -> None:
    sched = scheduler()
    first = next_token(list(range(3)))
    kinds: dict[str, dict[str, Any]] = {
        "length": {"max_tokens": 1},
        "stop": {"stop_token_ids": (first,)},
        "barred": {"stop_token_ids": (first,), "min_tokens": 1},
    }
    for name, how in kinds.items():
        sched.add(sequence(name, 3, **how))
    chunks = sched.schedule()
    assert sched.barred_tokens(sched.queues.sequences["barred"]) == {first} | CONFIG.eos_token_ids
    result = sched.complete(sampled(sched, chunks))
    assert finished(result) == {"length": "length", "stop": "stop"}


def test_eos_ends_unless_ignored() -> None:
    sched = scheduler()
    (eos,) = CONFIG.eos_token_ids
    sched.add(sequence("a", 3))
    sched.add(sequence("b", 3, ignore_eos=True))
    sched.schedule()
    assert finished(sched.complete({"a": eos, "b": eos})) == {"a": "stop"}


def test_the_context_ends_a_sequence() -> None:
    sched = scheduler(max_seq_tokens=6)
    sched.add(sequence("a", 4, max_tokens=50))
    assert drive(sched)["a"] == ("length", 2)


def test_full_blocks_are_told_once_with_their_keys() -> None:
    sched = scheduler()
    it = sequence("a", 6, max_tokens=6)
    sched.add(it)
    told = []
    while sched.has_work():
        chunks = sched.schedule()
        told += sched.complete(sampled(sched, chunks)).full_blocks
    keys = chain_keys(it.root, it.tokens[:-1], 4)  # the last token's KV was never computed
    assert [(b.index, b.key) for b in told] == list(enumerate(keys))
    assert sched.pages.match(keys) == [b.page for b in told]


def test_a_prefix_is_reused_but_the_last_token_is_always_computed() -> None:
    sched = scheduler()
    sched.add(sequence("a", 8, max_tokens=1))
    drive(sched)
    again = sequence("b", 8, max_tokens=1)
    sched.add(again)
    assert shape(step(sched)) == [("b", 4, 4)]
    assert again.num_cached_tokens == 4
    sched.add(sequence("c", 9, max_tokens=1))
    assert shape(step(sched)) == [("c", 8, 1)]


def test_blocks_on_their_way_are_published_only_when_confirmed() -> None:
    sched = scheduler()
    it = sequence("a", 10)
    sched.add(it)
    pull = pulled(sched, it, 2)
    chunks = sched.schedule()
    (admitted,) = sched.drain_admitted()
    assert shape(chunks) == [("a", 8, 2)]
    assert (admitted.blocks, admitted.pages, admitted.keys) == ((0, 1), tuple(it.pages[:2]), tuple(it.keys[:2]))
    assert sched.pages.published_keys() == []
    with pytest.raises(Internal):
        sched.complete(sampled(sched, chunks))
    sched.confirm_pulled("a")
    assert sched.pages.published_keys() == it.keys[:2]
    result = sched.complete(sampled(sched, chunks))
    assert len(result.accepted) == 1
    assert result.accepted[0].num_cached_tokens == 8
    assert result.full_blocks == []  # the pool has them
    sched.ahead.end(pull, 2)
    sched.check_integrity()


def test_a_full_pool_hit_leaves_the_last_block_to_compute() -> None:
    sched = scheduler()
    it = sequence("a", 8)
    sched.add(it)
    pulled(sched, it, 2)
    assert shape(sched.schedule()) == [("a", 4, 4)]
    assert sched.drain_admitted()[0].blocks == (0,)


def test_rewind_drops_the_token_and_keeps_what_was_pulled_whole() -> None:
    sched = scheduler()
    it = sequence("a", 14)
    sched.add(it)
    pull = pulled(sched, it, 3)
    chunks = sched.schedule()
    pages = list(it.pages)
    sched.rewind("a", 5)
    assert sched.complete({"a": 99}).accepted == []
    assert (it.num_computed_tokens, it.num_cached_tokens, it.pages) == (5, 5, pages)
    assert sched.pages.published_keys() == it.keys[:1]
    sched.ahead.end(pull, 1)
    assert shape(step(sched)) == [("a", 5, 9)]
    assert it.output == [next_token(it.tokens[:14])]
    assert [c.wants_logits for c in chunks] == [True]


def test_a_sequence_whose_pull_is_late_leaves_the_step_and_goes_on_when_it_is_over() -> None:
    sched = scheduler()
    late, other = sequence("late", 14), sequence("other", 6, start=50)
    sched.add(late)
    sched.add(other)
    pull = pulled(sched, late, 3)
    chunks = sched.schedule()
    assert shape(chunks) == [("late", 12, 2), ("other", 0, 6)]
    sched.put_back("late")
    sched.put_back("late")
    sched.check_integrity()
    assert [each.request_id for each in sched.complete(sampled(sched, chunks)).accepted] == ["other"]
    sched.check_integrity()
    assert (late.pages, late.num_computed_tokens, sched.num_preemptions) == ([], 0, 0)
    assert shape(step(sched)) == [("other", 6, 1)], "it does not join again"
    sched.ahead.end(pull, 3)
    assert shape(sched.schedule()) == [("other", 7, 1), ("late", 12, 2)]
    assert tuple(late.pages[:3]) == pull.wanted.pages
    sched.check_integrity()


def test_sealed_blocks_are_never_rewound() -> None:
    sched = scheduler()
    it = sequence("a", 10)
    sched.add(it)
    step(sched)
    sched.rewind("a", 0)
    assert it.num_computed_tokens == 8
    assert shape(step(sched)) == [("a", 8, 3)]


def test_confirm_and_rewind_of_a_request_that_is_gone() -> None:
    sched = scheduler()
    sched.confirm_pulled("x")
    sched.rewind("x", 0)
    it = sequence("a", 10)
    sched.add(it)
    pulled(sched, it, 1)
    chunks = sched.schedule()
    sched.cancel("a")
    sched.confirm_pulled("a")
    sched.rewind("a", 0)
    sched.put_back("a")
    assert sched.complete(sampled(sched, chunks)).accepted == []
    sched.check_integrity()


def test_pages_of_a_cancelled_sequence_stay_until_the_step_closes() -> None:
    sched = scheduler(num_pages=4)
    sched.add(sequence("a", 10, max_tokens=2))
    sched.schedule()
    assert sched.cancel("a")
    assert not sched.cancel("a")
    sched.check_integrity()
    assert sched.pages.num_free == 1
    sched.complete({})
    sched.check_integrity()
    assert sched.pages.num_free == 4


def test_request_id_may_be_used_again_within_the_step_that_lost_it() -> None:
    sched = scheduler()
    sched.add(sequence("a", 10))
    sched.schedule()
    sched.cancel("a")
    sched.add(sequence("a", 3))
    assert sched.complete({"a": 1}).accepted == []
    assert shape(step(sched)) == [("a", 0, 3)]


def test_handoff_holds_pages_until_released() -> None:
    sched = scheduler()
    it = sequence("a", 6, prefill_only=True, hold_pages=True)
    sched.add(it)
    assert drive(sched)["a"] == ("handoff", 1)
    assert (it.status, len(it.pages), sched.get(it.request_id)) == (SequenceStatus.HELD, 2, it)
    sched.check_integrity()
    sched.release("a")
    sched.release("a")
    assert (it.status, sched.pages.num_used) == (SequenceStatus.GONE, 0)


def test_a_prefill_whose_first_token_is_the_last_says_so() -> None:
    sched = scheduler()
    sched.add(sequence("a", 6, prefill_only=True, hold_pages=True, max_tokens=1))
    assert drive(sched)["a"] == ("length", 1)
    assert sched.cancel("a")
    assert sched.pages.num_used == 0


def test_adopted_sequence_decodes_from_its_pages() -> None:
    sched = scheduler(max_num_seqs=1)
    sched.add(sequence("first", 3, max_tokens=2))
    step(sched)
    pages = sched.pages.reserve("ticket", 2).pages
    it = sequence("a", 6, output=[next_token(list(range(6)))])
    it.pages, it.num_computed_tokens = sched.pages.detach("ticket"), 6
    sched.adopt(it)
    sched.check_integrity()
    assert sched.pages.match(it.keys[:1]) == pages[:1]
    sched.pages.free(pages[:1])
    assert [c.request_id for c in step(sched)] == ["first"]  # no place yet: it waits with its pages
    assert shape(step(sched)) == [("a", 6, 1)]
    assert sched.drain_admitted() == []


def test_adopt_refuses_kv_that_cannot_be_there() -> None:
    sched = scheduler()
    it = sequence("a", 6, output=[1])
    it.pages, it.num_computed_tokens = sched.pages.allocate(1), 6
    with pytest.raises(Internal):
        sched.adopt(it)
    assert sched.get("a") is None


def test_preemption_takes_the_latest_and_recomputes_it_first() -> None:
    sched = scheduler(num_pages=4, max_num_seqs=4)
    early, late = sequence("early", 4, max_tokens=9), sequence("late", 4, max_tokens=9, start=100)
    sched.add(early)
    sched.add(late)
    sched.add(sequence("next", 3, max_tokens=1))
    outcome = drive(sched)
    assert sched.num_preemptions > 0
    assert late.num_preemptions > 0
    assert early.num_preemptions == 0
    assert outcome == {"early": ("length", 9), "late": ("length", 9), "next": ("length", 1)}


def adopted(sched: Scheduler, request_id: str, tenant: str, weight: float = 1.0, **more: Any) -> Sequence:
    """A hand-off of six tokens, different ones for each request."""
    prompt = [len(request_id), *request_id.encode(), *range(5)][:6]
    it = sequence(request_id, prompt, output=[next_token(prompt)], tenant=tenant, weight=weight, **more)
    it.pages, it.num_computed_tokens = sched.pages.allocate(2), 6
    sched.adopt(it)
    return it


def expected(it: Sequence, num_output: int) -> list[int]:
    tokens = it.tokens[: it.num_prompt_tokens]
    for _ in range(num_output):
        tokens.append(next_token(tokens))
    return tokens[it.num_prompt_tokens :]


def in_batch(sched: Scheduler) -> Counter[str]:
    return Counter(each.tenant for each in sched.queues.running)


def test_a_tenant_above_its_share_hands_places_to_one_that_waits_and_goes_on_where_it_was() -> None:
    sched = scheduler(num_pages=200, max_num_seqs=6)
    flood = [adopted(sched, f"a{number}", "a") for number in range(12)]
    step(sched)
    step(sched)
    late = [adopted(sched, f"b{number}", "b") for number in range(4)]
    chunks = step(sched)
    assert in_batch(sched) == {"a": 3, "b": 3}, "in the very next step"
    assert len(chunks) == 6
    assert [each.status.value for each in late] == ["running"] * 3 + ["waiting"]
    assert [each.status.value for each in flood[3:6]] == ["waiting"] * 3
    assert all(each.num_computed_tokens == 8 and each.pages for each in flood[3:6]), "with their pages"
    for _ in range(5):
        step(sched)
        assert in_batch(sched) == {"a": 3, "b": 3}, "no place goes to and fro"
    drive(sched)
    assert sched.num_preemptions == 0
    for each in (*flood, *late):
        check_tokens(each.tokens[6:], expected(each, 20), "of a request that waited with its pages")


def test_places_follow_the_weights() -> None:
    sched = scheduler(num_pages=200, max_num_seqs=8)
    for number in range(12):
        adopted(sched, f"a{number}", "a")
    step(sched)
    for number in range(12):
        adopted(sched, f"b{number}", "b", weight=3.0)
    step(sched)
    assert in_batch(sched) == {"a": 2, "b": 6}


def test_one_tenant_alone_hands_no_place_over() -> None:
    sched = scheduler(num_pages=200, max_num_seqs=2)
    for number in range(6):
        adopted(sched, f"a{number}", "a")
    for _ in range(5):
        step(sched)
        assert [each.request_id for each in sched.queues.running] == ["a0", "a1"]


def test_a_tenant_above_its_share_loses_pages_to_one_that_has_fewer_and_ends_with_the_same_tokens() -> None:
    sched = scheduler(num_pages=12, max_num_seqs=8)
    flood = [adopted(sched, f"a{number}", "a", max_tokens=6) for number in range(6)]
    step(sched)
    assert sched.pages.num_available == 0
    assert not sched.make_way("a", 1.0, 2), "not to itself"
    assert not sched.make_way("b", 1.0, 10), "it would have more than the other one"
    assert sched.num_preemptions == 0
    assert sched.make_way("b", 1.0, 4)
    assert [each.was_displaced for each in flood] == [False] * 4 + [True] * 2
    sched.pages.reserve("b's", 4)
    assert not sched.make_way("b", 1.0, 4, num_reserved=4), "it has its share"
    assert not sched.may_pass("b", 1.0, 5, num_reserved=4)
    assert sched.may_pass("b", 1.0, 4, num_reserved=4)
    sched.pages.release("b's")
    outcome = drive(sched)
    assert {name: reason for name, (reason, _) in outcome.items()} == {f"a{number}": "length" for number in range(6)}
    for each in flood:
        check_tokens(each.tokens[6:], expected(each, 6), "of a request that lost its pages")


def test_a_page_that_a_launched_step_writes_to_stays_until_that_step_is_over() -> None:
    sched = scheduler(num_pages=18, max_num_seqs=8)
    flood = [adopted(sched, f"a{number}", "a", max_tokens=30) for number in range(6)]
    chunks = sched.schedule()
    [written] = [chunk.pages[chunk.start // BLOCK_TOKENS] for chunk in sched.look_ahead() if chunk.request_id == "a5"]
    sched.complete(sampled(sched, chunks))
    assert not sched.make_way("b", 1.0, 8), "one page of the two is not free yet"
    assert (sched.pages.num_available, [each.was_displaced for each in flood]) == (7, [False] * 5 + [True])
    assert written not in sched.pages.reserve("b's", 7).pages
    sched.check_integrity()
    sched.settle_ahead()
    assert sched.pages.num_available == 1


def test_adopted_sequences_cannot_starve_a_runner_of_pages_for_ever() -> None:
    sched = scheduler(num_pages=3, max_num_seqs=1)
    sched.add(sequence("runner", 4, max_tokens=6))
    step(sched)
    it = sequence("adopted", 6, output=[7], max_tokens=2)
    it.pages, it.num_computed_tokens = sched.pages.allocate(2), 6
    sched.adopt(it)
    outcome = drive(sched)
    assert {name: reason for name, (reason, _) in outcome.items()} == {"runner": "length", "adopted": "length"}


def test_pages_in_other_hands_make_it_wait_not_fail() -> None:
    sched = scheduler(num_pages=4)
    sched.pages.reserve("other", 3)
    sched.add(sequence("a", 6, max_tokens=2))
    assert sched.schedule() == []
    assert sched.has_work()
    sched.pages.release("other")
    assert drive(sched)["a"] == ("length", 2)


def test_what_never_fits_is_refused_at_once() -> None:
    sched = scheduler(num_pages=4, max_seq_tokens=100)
    with pytest.raises(NoSpace):
        sched.add(sequence("a", 10, max_tokens=8))
    with pytest.raises(PromptTooLong):
        sched.add(sequence("b", 100))
    sched.add(sequence("c", 10, max_tokens=7))
    sched.add(sequence("d", 16, prefill_only=True))
    with pytest.raises(AlreadyExists):
        sched.add(sequence("c", 3))
    with pytest.raises(Internal):
        sched.add(sequence("e", 3, block_tokens=8))
    with pytest.raises(Internal):
        sched.add(sequence("f", 3, output=[1, 2], max_tokens=2))


def test_a_step_must_be_completed_with_every_token() -> None:
    sched = scheduler()
    sched.add(sequence("a", 3))
    sched.schedule()
    with pytest.raises(Internal):
        sched.schedule()
    with pytest.raises(Internal):
        sched.complete({})
    sched.complete({"a": 1})


def test_an_abandoned_step_leaves_everything_as_it_was() -> None:
    sched = scheduler()
    it = sequence("a", 10, num_pool_blocks=2)
    sched.add(it)
    sched.schedule()
    sched.abandon_step()
    sched.check_integrity()
    assert it.num_computed_tokens == 0
    assert shape(step(sched)) == [("a", 0, 10)]


def test_max_num_seqs_must_fit_the_token_budget() -> None:
    with pytest.raises(ConfigError):
        SchedulerConfig(max_batch_tokens=4, max_num_seqs=5, max_seq_tokens=100)


def test_prompts_first_while_the_decodes_wait() -> None:
    sched = scheduler(prefill_first=True, max_batch_tokens=16)
    sched.add(sequence("a", 3))
    assert shape(step(sched)) == [("a", 0, 3)]
    assert shape(step(sched)) == [("a", 3, 1)]
    sched.add(sequence("b", 20, start=50))
    sched.add(sequence("c", 4, start=80))
    assert shape(step(sched)) == [("b", 0, 16)]
    assert shape(step(sched)) == [("b", 16, 4), ("c", 0, 4)]
    assert shape(step(sched)) == [("a", 4, 1), ("b", 20, 1), ("c", 4, 1)]
    sched.check_integrity()


def test_a_suspect_is_computed_next_and_by_itself() -> None:
    sched = scheduler(max_batch_tokens=8)
    sched.add(sequence("a", 3))
    sched.add(sequence("b", 3))
    assert shape(step(sched)) == [("a", 0, 3), ("b", 0, 3)]
    sched.add(sequence("waits", 3))
    sched.add(sequence("suspect", 10, num_alone_steps=3))
    assert shape(step(sched)) == [("suspect", 0, 8)]
    assert shape(step(sched)) == [("suspect", 8, 2)]
    assert shape(step(sched)) == [("suspect", 10, 1)]
    assert shape(step(sched)) == [("a", 3, 1), ("b", 3, 1), ("suspect", 11, 1), ("waits", 0, 3)]


def test_requests_of_a_failed_step_are_computed_one_by_one() -> None:
    sched = scheduler()
    for name in "abc":
        sched.add(sequence(name, 3))
    sched.schedule()
    sched.abandon_step()
    sched.queues.isolate(["a", "b", "c", "gone"])
    sched.cancel("b")
    assert shape(step(sched)) == [("a", 0, 3)]
    assert shape(step(sched)) == [("c", 0, 3)]
    assert shape(step(sched)) == [("a", 3, 1), ("c", 3, 1)]


def test_a_suspect_without_pages_lets_the_others_go_on_and_waits() -> None:
    sched = scheduler(num_pages=4)
    sched.add(sequence("a", 8, max_tokens=4))
    step(sched)
    sched.add(sequence("suspect", 12, start=20, max_tokens=2, num_alone_steps=9))
    sched.add(sequence("later", 1, max_tokens=2))
    while sched.get("a") is not None:
        assert [chunk.request_id for chunk in step(sched)] == ["a"]
    assert step(sched)[0].request_id == "suspect"
