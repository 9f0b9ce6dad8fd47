"""What a worker reports of its requests while they wait, are computed, preempted and handed over."""

from __future__ import annotations

from scheduler_model import next_token, scheduler, sequence

from moonpool.base.cluster import MAX_REPORTED, ReportedRequest
from moonpool.engine.request_report import RequestChanges, reported_sequences, reported_stage
from moonpool.engine.scheduler import Scheduler


def numbers(sched: Scheduler) -> dict[str, tuple[int, int, int]]:
    """(uncomputed, reused, max_tokens) of each request."""
    found = reported_sequences(sched.queues.sequences.values())
    return {name: (one.uncomputed_tokens, one.reused_tokens, one.max_tokens) for name, one in found.items()}


def step(sched: Scheduler) -> None:
    chunks = sched.schedule()
    known = {chunk.request_id: sched.get(chunk.request_id) for chunk in chunks if chunk.wants_logits}
    sched.complete({name: next_token(one.tokens) for name, one in known.items() if one is not None})


def test_a_prompt_counts_what_is_left_behind_what_is_reused() -> None:
    sched = scheduler(max_batch_tokens=8, max_num_seqs=1)
    for name, expected in (("a/1", 4), ("b/2", 8), ("c/1", 100)):
        sched.add(sequence(name, 20, prefill_only=True, hold_pages=True))
        waiting = sched.get(name)
        assert waiting is not None
        waiting.expected_tokens = expected
    assert numbers(sched) == {"a": (16, 4, 0), "b": (12, 8, 0), "c": (1, 19, 0)}, "the last token is always computed"
    step(sched)
    assert numbers(sched)["a"] == (12, 8, 0), "computed, not reused as was expected"
    step(sched)
    step(sched)
    assert numbers(sched) == {"b": (12, 8, 0), "c": (1, 19, 0)}, "it only waits to be handed over"


def test_an_answer_has_the_same_numbers_from_its_first_step_to_its_end() -> None:
    sched = scheduler(max_batch_tokens=8)
    sched.add(sequence("a/1", 3, max_tokens=5))
    assert numbers(sched) == {"a": (3, 0, 5)}
    for _ in range(3):
        step(sched)
        assert numbers(sched) == {"a": (0, 3, 5)}
    running = sched.get("a/1")
    assert running is not None
    sched._preempt(running)
    assert numbers(sched) == {"a": (0, 3, 5)}, "it goes on soon"
    for _ in range(2):
        step(sched)
    assert numbers(sched) == {}


def test_reports_name_what_has_changed() -> None:
    changes = RequestChanges()
    one, two = ReportedRequest("a", 10), ReportedRequest("b", 20, 5)
    assert changes.take({"a": one, "b": two}) == ((one, two), ())
    assert changes.take({"a": one, "b": two}) == ((), ())
    less, stage = ReportedRequest("a", 4, 6), reported_stage("c/3", 7)
    assert changes.take({"a": less, "c": stage}) == ((less, ReportedRequest("c", 7)), ("b",))
    changes.start_over()
    assert changes.take({"c": stage}) == ((stage,), ()), "all of them, and none that the conductor does not know"


def test_what_does_not_fit_into_a_report_is_in_the_next() -> None:
    changes = RequestChanges()
    present = {str(number): ReportedRequest(str(number), 10) for number in range(MAX_REPORTED + 3)}
    assert [len(changes.take(present)[0]) for _ in range(3)] == [MAX_REPORTED, 3, 0]
    assert [len(changes.take({})[1]) for _ in range(3)] == [MAX_REPORTED, 3, 0]
