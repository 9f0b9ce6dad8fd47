"""The queue in front of the conductor's state, on a virtual clock: which requests wait, are sent, are refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_info import info as worker_info

from moonpool.base.cluster import DecodeSample, PrefillSample, ReportedRequest, ReportWorker, WorkerInfo, WorkerLoad
from moonpool.base.errors import Overloaded, Unavailable
from moonpool.conductor.admission.forms import AdmissionForm, Cause
from moonpool.conductor.messages import Decision, DecisionRecord, RequestEnded, Route
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.placement.prefix_index import PrefixIndex
from moonpool.conductor.request_queue import QueueAnswer, RequestQueue
from moonpool.conductor.state import ConductorState

TOKENS = 640  # one second


def info(name: str, **changes: object) -> WorkerInfo:
    return worker_info(name, **{"num_pages": 10_000, "max_num_seqs": 64, **changes})


def route(request_id: str, num_tokens: int = TOKENS, **fields: Any) -> Route:
    return Route(request_id=request_id, keys=[], num_tokens=num_tokens, max_tokens=2000, **fields)


class Room:
    """A conductor with one prefill and one decode worker; a prompt takes a second, ten answers 0.1 s a token."""

    def __init__(self, *names: str, **config: Any) -> None:
        self.config = PolicyConfig(**{"worker_backlog_s": 1000.0, **config})
        self.state = ConductorState(self.config, PrefixIndex(), 1000)
        for name in names or ("p0", "d0"):
            self.state.register(info(name))
        self.state.costs.learn(
            prefills=[PrefillSample(TOKENS, 0, 1.0)] * 9,
            decodes=[DecodeSample(num, num * TOKENS, 0.01 * num) for num in (1, 5, 10, 20)] * 9,
        )
        self.room = RequestQueue(self.state, self.config)
        self.now_s = 0.0
        self.sequence = 0  # of the last report

    def ask(self, request_id: str, **kwargs: Any) -> Decision | None:
        return self.room.submit(route(request_id, **kwargs), "fe", self.now_s, self.now_s)

    def report(self, name: str, load: WorkerLoad, **fields: Any) -> None:
        self.sequence += 1
        call = ReportWorker(name=name, incarnation=1, sequence=self.sequence, load=load, **fields)
        self.state.report(call, self.now_s)

    def record(self, request_id: str) -> DecisionRecord:
        record = self.state.records.get(request_id)
        assert record is not None
        return record

    def after(self, seconds: float) -> list[QueueAnswer]:
        self.now_s += seconds
        return self.room.dispatch(self.now_s)

    def prefilled(self, request_id: str) -> list[QueueAnswer]:
        self.state.prefill_ended(request_id, self.now_s)
        return self.room.dispatch(self.now_s)

    def ended(self, request_id: str, output_tokens: int = 16) -> list[QueueAnswer]:
        self.state.request_ended(RequestEnded(request_id=request_id, output_tokens=output_tokens), self.now_s)
        return self.room.dispatch(self.now_s)

    def serve_all(self, first: str) -> list[str]:
        """One prefill after the other; in which order those that wait are sent."""
        order, current = [], [first]
        while current:
            self.now_s += 0.1  # they are faster than predicted
            current = [one.request_id for each in current for one in self.prefilled(each)]
            order += current
        return order


def test_without_targets_all_but_a_small_backlog_waits_and_none_is_refused() -> None:
    room = Room(worker_backlog_s=2.5)
    sent = [room.ask(f"r{number}") is not None for number in range(500)]
    assert [number for number, is_sent in enumerate(sent) if is_sent] == [0, 1, 2]
    assert len(room.room) == 497
    order, room.now_s = [], 3600.0  # however long they wait
    for request_id in ("r0", "r1", "r2"):
        order += room.serve_all(request_id)
    assert order == [f"r{number}" for number in range(3, 500)]
    assert (len(room.room), room.room.next_event_s(room.now_s)) == (0, None)


def test_the_next_request_is_sent_when_the_backlog_has_become_small_by_time_alone() -> None:
    """Nothing is reported between: so a worker has its next prompt before it ends the one that it computes."""
    room = Room(worker_backlog_s=0.25)
    assert room.ask("r0") is not None
    assert room.ask("r1") is None
    at_s = room.room.next_event_s(0.0)
    assert at_s is not None
    assert 0.7 < at_s < 0.8
    assert room.after(at_s - 0.01) == []
    assert room.room.next_event_s(room.now_s) == at_s
    [answer] = room.after(at_s - room.now_s)
    assert answer.request_id == "r1"
    assert room.ask("r2") is None
    assert room.room.next_event_s(room.now_s) is None, "two prompts are there: time alone does not make room"


def test_workers_of_a_pipeline_get_as_many_prompts_as_it_has_stages() -> None:
    """The first stage has ended a prompt before the last one has."""
    room = Room("d0", worker_backlog_s=0.25)
    for name in ("p0", "p1"):
        room.state.register(info(name, pipeline=2))
    assert [room.ask(f"r{number}") is not None for number in range(4)] == [True, True, False, False]
    assert room.state.counters["pipelined"] == 2
    [answer] = room.prefilled("r0")
    assert answer.request_id == "r2"


def test_a_request_on_an_idle_service_does_not_wait() -> None:
    room = Room("p0", "p1", "d0", worker_backlog_s=1e-3)
    for number in range(2):
        decision = room.ask(f"r{number}")
        assert decision is not None
        assert decision.waited_s == 0.0
    assert room.ask("r2") is None


@pytest.mark.parametrize("slo_s", [None, 100.0])
def test_a_tenant_that_floods_delays_another_one_by_a_turn_whatever_priorities_it_gives(slo_s: float | None) -> None:
    room = Room(worker_backlog_s=0.5, ttft_slo_s=slo_s, queue_capacity=40)
    for number in range(300):
        with contextlib.suppress(Overloaded):
            room.ask(f"a{number}", tenant="a", priority=10)
    for number in range(5):
        assert room.ask(f"b{number}", tenant="b", priority=-10) is None
    assert all(isinstance(one.outcome, Overloaded) and one.request_id[0] == "a" for one in room.after(0.0))
    order = room.serve_all("a0")
    assert max(order.index(f"b{number}") - 2 * number for number in range(5)) <= 2
    assert all(room.record(f"b{number}").waited_s < 2 for number in range(5))


def test_a_tenant_with_less_at_the_workers_passes_prompts_that_wait_for_pages() -> None:
    """Those have not been begun, so the backlog of the prefill worker stands still."""
    room = Room(worker_backlog_s=0.5)
    for number in range(8):
        room.ask(f"a{number}", tenant="a")
    sent = 0
    while not room.state.lacks_pages:
        room.report("d0", WorkerLoad(free_pages=0, num_running=sent, waiting_pages=10))
        for number in range(3):
            sent += len(room.prefilled(f"a{number}"))  # three answers are being decoded, a fourth prompt waits
    assert room.state.num_open == 4
    assert room.room.submit(route("b0", tenant="b"), "fe", 0.0, 0.0) is None
    answers = room.after(0.0)
    assert [one.request_id for one in answers] == ["b0"]
    for number in range(1, 6):
        room.room.submit(route(f"b{number}", tenant="b"), "fe", 0.0, 0.0)
    assert [one.request_id for one in room.after(0.0)] == ["b1", "b2"], "until it has as much as the other one"
    room.report("d0", WorkerLoad(free_pages=100))
    assert room.after(0.0) == [], "no prompt waits for pages: the backlog counts"


def test_an_answer_that_has_begun_goes_on_before_all_that_wait() -> None:
    room = Room(worker_backlog_s=0.5)
    assert [room.ask(f"r{number}") is None for number in range(4)] == [False, True, True, True]
    decision = room.ask("lost its worker", has_output=True)
    assert decision is not None
    assert decision.waited_s == 0.0


def test_prompts_that_another_conductor_has_sent_are_turns_of_their_tenants() -> None:
    """The prefill worker reports them; this conductor's own ones are no news."""
    room = Room(worker_backlog_s=0.5)
    for number in range(6):
        room.ask(f"a{number}", tenant="a")
        room.ask(f"b{number}", tenant="b")
    theirs = [ReportedRequest(f"x{number}", TOKENS, tenant="a") for number in range(4)]
    own = ReportedRequest("a0", TOKENS, tenant="a")
    room.report("p0", WorkerLoad(free_pages=1000), requests=(own, *theirs))
    room.report("p0", WorkerLoad(free_pages=1000), gone=tuple(one.request_id for one in theirs))
    order = room.serve_all("a0")
    assert order[:4] == ["b0", "b1", "b2", "b3"], order
    assert sorted(order[4:7]) in (["a1", "a2", "b4"], ["a1", "b4", "b5"])


def test_a_weight_is_a_share() -> None:
    room = Room(worker_backlog_s=0.5)
    for number in range(40):
        room.ask(f"a{number}", tenant="a", weight=3.0)
        room.ask(f"b{number}", tenant="b")
    order = room.serve_all("a0")[:40]
    assert 29 <= sum(one.startswith("a") for one in order) <= 31


def test_without_workers_a_request_without_a_deadline_is_told_so() -> None:
    room = Room(worker_backlog_s=0.5)
    room.ask("r0")
    assert room.ask("r1") is None
    room.state.unregister(room.state.register(info("p0")))
    [answer] = room.after(1.0)
    assert answer.request_id == "r1"
    assert isinstance(answer.outcome, Unavailable)
    assert len(room.room) == 0


def test_a_worker_gets_a_quarter_of_the_target_and_the_rest_waits() -> None:
    room = Room(ttft_slo_s=10.0)
    sent = [room.ask(f"r{number}") is not None for number in range(6)]
    assert sent == [True, True, True, False, False, False]
    assert len(room.room) == 3
    room.now_s += 1.0
    answers = room.prefilled("r0")
    assert [one.request_id for one in answers] == ["r3"]
    decision = answers[0].outcome
    assert isinstance(decision, Decision)
    assert decision.waited_s == pytest.approx(1.0)
    assert decision.ttft_s == pytest.approx(4.0, rel=0.1)  # a second here, two at the worker, its own
    record = room.record("r3")
    assert (record.waited_s, record.predicted_ttft_s, record.outcome) == (decision.waited_s, decision.ttft_s, "open")


def test_what_would_come_too_late_is_refused_at_once() -> None:
    room = Room(ttft_slo_s=4.0)
    room.ask("r0")
    room.ask("r1")
    assert room.ask("r2") is None
    assert room.ask("r3") is None
    with pytest.raises(Overloaded, match="other prompts come first") as caught:
        room.ask("r4")
    assert caught.value.retry_after_s >= 1
    with pytest.raises(Overloaded, match="a shorter prompt"):
        room.ask("r5", num_tokens=100 * TOKENS)
    assert room.state.refused == {Cause.TTFT: 1, Cause.TOO_LONG: 1}
    assert room.ask("urgent", priority=1) is None  # those that wait come after it
    assert room.record("r4").reason == str(caught.value)


def test_tenants_in_turn_and_of_each_the_higher_priorities_first() -> None:
    room = Room(ttft_slo_s=100.0)
    sent: list[str] = []
    while room.ask(f"first{len(sent)}") is not None:
        sent.append(f"first{len(sent)}")
    for number in range(4):
        room.ask(f"flood{number}", tenant="a")
    room.ask("b0", tenant="b")
    room.ask("urgent", tenant="a", priority=5)
    order: list[str] = []
    for request_id in sent:
        order += room.serve_all(request_id)
    order.remove(f"first{len(sent)}")  # that of no tenant
    own = [one for one in order if one != "b0"]
    assert own == ["urgent", *(f"flood{number}" for number in range(4))]
    assert order.index("b0") <= 1


def test_a_full_queue_turns_the_newest_of_the_largest_away() -> None:
    room = Room(ttft_slo_s=40.0, queue_capacity=2)
    number = 0
    while room.ask(f"first{number}") is not None:
        number += 1
    assert room.ask("a1", tenant="a") is None
    with pytest.raises(Overloaded, match="the most that may wait"):
        room.ask("a2", tenant="a")
    assert room.ask("urgent", priority=1) is None
    [answer] = room.after(0.0)
    assert answer.request_id in ("a1", f"first{number}")
    assert isinstance(answer.outcome, Overloaded)
    assert room.state.refused[Cause.GAVE_WAY] == room.state.refused[Cause.QUEUE_FULL] == 1


def test_those_whose_time_is_over_are_told() -> None:
    room = Room(ttft_slo_s=10.0)
    for number in range(5):
        room.ask(f"r{number}")
    assert [one.request_id for one in room.after(1.0)] == ["r3"]  # the first prompt may be nearly over
    assert room.room.next_event_s(1.0) == pytest.approx(9.0, abs=0.2)
    assert room.after(7.0) == []  # the worker stands still
    [answer] = room.after(1.5)
    assert answer.request_id == "r4"
    assert room.state.refused[Cause.TOO_LATE] == 1
    assert room.record("r4").waited_s == 9.5
    samples = {sample.name: sample.value for sample in room.room.wait_times.family("waited", "").samples}
    assert (samples["waited_count"], samples["waited_sum"]) == (2, 10.5)


def test_with_a_target_between_tokens_alone_requests_wait_for_prefill_and_not_for_answers_to_end() -> None:
    room = Room(tbt_slo_s=0.05, admission=AdmissionForm.EARLY, worker_backlog_s=0.5)
    assert room.ask("r0") is not None
    assert [room.ask(f"r{number}") for number in range(1, 8)] == [None] * 7
    answers = [answer for number in range(8) for answer in room.prefilled(f"r{number}")]
    assert [one.request_id for one in answers] == [f"r{number}" for number in range(1, 8)], "in order, none waits on"
    refused = [one.request_id for one in answers if isinstance(one.outcome, Overloaded)]
    assert refused[-1] == "r7"
    assert len(refused) < 6
    with pytest.raises(Overloaded, match="apart"):
        room.ask("r8")
    assert room.state.refused == {Cause.TBT: len(refused) + 1}


@pytest.mark.parametrize("form", list(AdmissionForm))
def test_answers_that_end_make_room_for_others(form: AdmissionForm) -> None:
    room = Room(tbt_slo_s=0.05, admission=form, queue_capacity=8)
    sent = []
    for number in range(6):
        if room.ask(f"r{number}") is None:
            break
        sent.append(f"r{number}")
        room.prefilled(f"r{number}")
    if form is AdmissionForm.NONE:
        assert len(sent) == 6  # it looks only when the prompt is done
        return
    assert 3 <= len(sent) <= 5
    assert [one.request_id for one in room.ended(sent[0])] == [f"r{len(sent)}"]


def test_before_decode_is_the_last_word() -> None:
    room = Room(tbt_slo_s=0.05, admission=AdmissionForm.NONE)
    refused = 0
    for number in range(8):
        decision = room.ask(f"r{number}")
        assert decision is not None
        assert decision.asks_before_decode
        try:
            room.state.before_decode(f"r{number}", room.now_s)
            room.prefilled(f"r{number}")
        except Overloaded:
            refused += 1
            room.ended(f"r{number}", 0)
    assert 3 <= refused <= 5
    assert room.state.counters["wasted_prefills"] == refused
    room.ended("r0")
    room.ask("next")
    room.state.before_decode("next", room.now_s)


def test_nobody_is_asked_before_decode_without_a_target() -> None:
    decision = Room(ttft_slo_s=9.0).ask("r0")
    assert decision is not None
    assert not decision.asks_before_decode


def test_cancelled_asked_again_and_abandoned() -> None:
    room = Room(ttft_slo_s=10.0)
    for number in range(6):
        room.ask(f"r{number}")
    assert room.room.cancel("r3", 0.0)
    assert not room.room.cancel("r3", 0.0)
    assert not room.room.cancel("r0", 0.0)
    assert room.ask("r4") is None  # again: it goes to the end of the queue
    assert [one.request_id for one in room.prefilled("r0")] == ["r5"]
    assert room.record("r4").attempt == 2
    room.room.owner_gone("fe", 0.0)
    assert len(room.room) == 0
    assert [room.record(one).outcome for one in ("r3", "r4")] == ["abandoned"] * 2


def test_workers_that_go_and_come_back() -> None:
    room = Room(ttft_slo_s=10.0)
    for number in range(4):
        room.ask(f"r{number}")
    room.state.unregister(room.state.register(info("p0")))
    assert room.after(1.0) == []
    with pytest.raises(Unavailable):
        room.ask("other")
    room.state.register(info("p0"))
    assert [one.request_id for one in room.after(1.0)] == ["r3"]


def test_how_good_the_forecast_was_is_kept() -> None:
    room = Room(tbt_slo_s=10.0)
    for number in range(5):
        room.ask(f"r{number}")
        room.prefilled(f"r{number}")
    errors = {one.model: one for one in room.state.predictions()}
    assert errors["decode_load"].count == 5
    assert errors["decode_load"].p90 < 0.6


@given(st.lists(st.tuples(st.sampled_from("aekcp"), st.integers(0, 9), st.integers(-2, 2)), max_size=60))
def test_each_request_is_answered_exactly_once(steps: list[tuple[str, int, int]]) -> None:
    """Asked, prefilled, ended, cancelled and time passing in any order: whoever waits is answered or taken out."""
    room = Room(ttft_slo_s=6.0, tbt_slo_s=0.05, queue_capacity=3)
    waiting: set[str] = set()

    def take(answers: list[QueueAnswer]) -> None:
        for answer in answers:
            waiting.remove(answer.request_id)

    for action, number, priority in steps:
        request_id = f"r{number}"
        if action == "a":
            waiting.discard(request_id)
            try:
                if room.ask(request_id, tenant=f"t{number % 3}", priority=priority) is None:
                    waiting.add(request_id)
            except Overloaded:
                pass
            take(room.after(0.0))
        elif action == "e":
            if room.room.cancel(request_id, room.now_s):
                waiting.remove(request_id)
            take(room.ended(request_id))
        elif action == "k":
            take(room.prefilled(request_id))
        elif action == "c":
            assert room.room.cancel(request_id, room.now_s) == (request_id in waiting)
            waiting.discard(request_id)
        else:
            take(room.after(number * 0.7))
        assert len(room.room) == len(waiting)
    for number in range(10):
        take(room.prefilled(f"r{number}"))
        if f"r{number}" not in waiting:
            take(room.ended(f"r{number}"))
    take(room.after(10.0))
    assert not waiting
