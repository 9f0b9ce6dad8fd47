"""Requests that other conductors have sent: told apart by their ids, priced behind their prefixes, and forecast."""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec
import pytest
from worker_info import info

from moonpool.base.cluster import (
    MAX_REPORTED,
    DecodeSample,
    PrefillSample,
    ReportedRequest,
    ReportWorker,
    WorkerLoad,
)
from moonpool.base.errors import Overloaded
from moonpool.conductor.admission.forecast import ExpectedDecode
from moonpool.conductor.admission.forms import AdmissionForm, Cause
from moonpool.conductor.messages import Decision, Route
from moonpool.conductor.other_requests import MAX_KEPT, OtherRequests, ReportedRequests
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.placement.prefix_index import PrefixIndex
from moonpool.conductor.placement.tables import Backlog
from moonpool.conductor.registration import Registration
from moonpool.conductor.state import ConductorState
from moonpool.engine.request_report import RequestChanges

BLOCK = 64
PROMPT = 128 * BLOCK
CACHED = [bytes([1, number]) * 16 for number in range(120)]  # 94 % of a prompt


def prefill_s(num_tokens: int, prefix: int) -> float:
    return 0.01 + 1e-4 * (num_tokens - prefix)


class Cluster:
    """Conductors that share two prefill workers and a decode worker, with a report that all of them get."""

    def __init__(self, num_conductors: int, policy: PolicyConfig | None = None) -> None:
        self.states = [ConductorState(policy or PolicyConfig(), PrefixIndex(), 0) for _ in range(num_conductors)]
        self._sequences = {"p0": 0, "p1": 0, "d0": 0}
        for state in self.states:
            for name in self._sequences:
                state.register(info(name, num_pages=100_000, max_num_seqs=512))
        sizes = [(tokens, prefix) for tokens in (1024, 8192, 16_384) for prefix in (0, tokens // 2, tokens * 7 // 8)]
        prefills = tuple(PrefillSample(*size, prefill_s(*size)) for size in sizes)
        steps = tuple(
            DecodeSample(number, number * kv, 0.02 + 1e-3 * number) for number in (1, 8, 32) for kv in (1, 10_000)
        )
        self.report("p0", cached=tuple(CACHED), prefills=prefills, decodes=steps)

    def report(self, name: str, *, now_s: float = 0.0, **fields: object) -> None:
        self._sequences[name] += 1
        load = WorkerLoad(free_pages=100_000)
        call = ReportWorker(name=name, incarnation=1, sequence=self._sequences[name], load=load, **fields)  # type: ignore[arg-type]
        for state in self.states:
            state.report(call, now_s)

    def workers(self, name: str) -> list[Registration]:
        return [one for state in self.states for one in state.workers if one.info.name == name]

    def waits_s(self, name: str, now_s: float) -> list[float]:
        return [worker.backlog.wait_s(now_s) for worker in self.workers(name)]


def route(name: str, own: int) -> Route:
    """A request with the cached prefix and eight blocks of its own."""
    keys = [*CACHED, *(bytes([2, own, number, 0]) * 8 for number in range(8))]
    return Route(request_id=name, keys=keys, num_tokens=PROMPT, max_tokens=100)


def prompt(name: str, uncomputed: int = PROMPT, reused: int = 0) -> ReportedRequest:
    return ReportedRequest(name, uncomputed, reused)


def answer(name: str, *, decodes: bool, num_tokens: int = 1000) -> ReportedRequest:
    return ReportedRequest(name, *((0, num_tokens) if decodes else (num_tokens, 0)), max_tokens=200)


def test_a_worker_with_cached_prompts_is_as_busy_as_each_conductor_predicts() -> None:
    """Ten prompts of 8k, 94 % cached, are worth a prompt without a prefix to none of the conductors."""
    cluster = Cluster(2)
    one, other = cluster.states
    decisions = [one.route(route(f"r{number}", number), "fe", 0.0, 0.0) for number in range(10)]
    assert {each.prefill.name for each in decisions} == {"p0"}, "the others have no blocks of it"
    own_s = cluster.waits_s("p0", 0.0)[0]
    prompts = [prompt(f"r{at}", PROMPT - each.reused_tokens, each.reused_tokens) for at, each in enumerate(decisions)]
    cluster.report("p0", requests=tuple(prompts))
    again_s, others_s = cluster.waits_s("p0", 0.0)
    assert again_s == own_s, "these are its own requests"
    assert others_s == pytest.approx(own_s, rel=0.05)
    assert own_s < prefill_s(2 * PROMPT, 0), "each has eight blocks to compute"
    assert [int(table.assigned[cluster.workers("p0")[0].slot]) for table in (one.prefills, other.prefills)] == [10, 10]
    cluster.report("p0", now_s=1.0, requests=(prompt("r1", 0, PROMPT),), gone=("r0",))
    assert cluster.waits_s("p0", 1.0)[1] < 0.9 * others_s


def test_work_of_others_that_comes_first_is_done_first() -> None:
    backlog = Backlog()
    backlog.set_others(2, 3.0, 1.0, 10.0)
    assert [backlog.wait_s(at) for at in (10.0, 10.5, 11.0, 12.0)] == [3.0, 2.5, 2.0, 2.0], "the second is not begun"
    backlog.add("own", 1.5, 10.5)
    assert backlog.wait_s(10.5) == 4.0
    assert backlog.num_requests == 3
    backlog.set_others(1, 2.0, 0.0, 12.0)  # the own one is before it
    assert [backlog.wait_s(at) for at in (12.0, 13.0, 20.0)] == [3.5, 2.5, 2.0], "it begins only now"
    backlog.remove("own", 14.0)
    assert backlog.wait_s(20.0) == 2.0
    backlog.set_others(0, 0.0, 0.0, 21.0)
    assert backlog.wait_s(21.0) == 0.0


class Forecast:
    """Who is expected or decodes, as admission hears of it."""

    def __init__(self) -> None:
        self.open: dict[str, str] = {}
        self.ends_s: dict[str, float] = {}

    def other_came(self, request: ExpectedDecode, now_s: float) -> None:
        self.open[request.request_id] = "comes"
        self.ends_s[request.request_id] = request.prefill_ends_s

    def other_joined(self, request_id: str, now_s: float) -> None:
        self.open[request_id] = "decodes"

    def other_ended(self, request_id: str, now_s: float) -> None:
        del self.open[request_id]


class Reports:
    """Two workers, and what reports say of their requests."""

    def __init__(self, *own: str) -> None:
        self.own, self.forecast = set(own), Forecast()
        self.requests = ReportedRequests(self.own, self.forecast)
        self.workers = OtherRequests(), OtherRequests()

    def __call__(
        self, worker: int, *requests: ReportedRequest, gone: Iterable[str] = (), now_s: float = 0.0, wait_s: float = 0.0
    ) -> OtherRequests:
        self.requests.changed(self.workers[worker], requests, gone, prefill_s, wait_s, now_s)
        return self.workers[worker]


def test_answers_of_others_are_forecast_from_when_they_come_until_they_end() -> None:
    reports = Reports("own")
    decode = reports(0, answer("a", decodes=False), answer("own", decodes=False))
    assert reports.forecast.open == {"a": "comes"}
    assert (len(decode.answers), decode.answer_tokens, decode.num_decoding) == (1, 1000, 0)
    reports(1, prompt("b"), prompt("a", 5000), now_s=1.0, wait_s=2.0)
    assert reports.forecast.ends_s["a"] == pytest.approx(1 + 2 + prefill_s(PROMPT, 0) + prefill_s(5000, 0))
    reports(1, prompt("a", 1000, 4000), gone=["b"], now_s=2.0, wait_s=2.0)
    assert reports.forecast.ends_s["a"] == pytest.approx(2 + prefill_s(5000, 4000)), "it is being computed"
    reports(1, gone=["a"])
    reports(0, answer("a", decodes=True))
    assert reports.forecast.open == {"a": "decodes"}
    assert (decode.num_decoding, decode.decoding_tokens, reports.requests.num_decoding) == (1, 1000, 1)
    reports(0, gone=["a", "own", "unknown"])
    assert reports.forecast.open == {}
    assert (decode.num_decoding, decode.answer_tokens, reports.requests.num_decoding) == (0, 0, 0)


def test_an_answer_that_moves_is_forecast_once_whichever_worker_reports_first() -> None:
    reports = Reports()
    reports(0, answer("a", decodes=True))
    reports(1, answer("a", decodes=True))
    reports(0, gone=["a"])
    assert reports.forecast.open == {"a": "decodes"}
    assert reports.requests.num_decoding == 1
    reports.requests.worker_gone(reports.workers[1], 0.0)
    assert reports.forecast.open == {}
    assert reports.requests.num_decoding == 0


def test_a_request_that_this_conductor_takes_over_is_its_own() -> None:
    reports = Reports()
    old, new = reports(0, answer("a", decodes=True)), reports(1, prompt("a"))
    reports.own.add("a")
    reports.requests.take_over("a", [new])
    assert (new.work_s, new.first_s, new.num_prompts) == (0.0, 0.0, 0)
    reports(0, gone=["a"])
    assert (old.answers, reports.requests.num_decoding) == ({}, 0)
    assert reports.forecast.open == {"a": "decodes"}, "admission has been told of its own request"


def test_sums_are_those_of_what_is_there() -> None:
    draw, reports = random.Random(4), Reports(*(f"r{number}" for number in range(0, 40, 3)))
    told: dict[int, dict[str, ReportedRequest]] = {0: {}, 1: {}}
    for step in range(2000):
        worker = draw.randrange(2)
        names = [f"r{number}" for number in draw.sample(range(40), 3)]
        if draw.random() < 0.4:
            reports(worker, gone=names)
            for name in names:
                told[worker].pop(name, None)
        else:
            some = [
                prompt(each, draw.randint(0, 9000), draw.randint(1, 9000))
                if worker
                else answer(each, decodes=draw.random() < 0.5)
                for each in names
            ]
            reports(worker, *some, now_s=float(step))
            told[worker] |= {each.request_id: each for each in some}
        there = [each for each in told[worker].values() if each.request_id not in reports.own]
        found, begun = (
            reports.workers[worker],
            [each for each in there if each.max_tokens and not each.uncomputed_tokens],
        )
        work_s = [
            prefill_s(each.uncomputed_tokens + each.reused_tokens, each.reused_tokens)
            for each in there
            if not each.max_tokens
        ]
        assert found.work_s == pytest.approx(sum(work_s))
        assert found.num_prompts == len(work_s)
        assert found.num_decoding == len(begun)
        assert found.decoding_tokens == 1000 * len(begun)
        assert found.answer_tokens == 1000 * sum(each.max_tokens > 0 for each in there)
    assert reports.requests.num_decoding == reports.workers[0].num_decoding


def test_thousands_of_requests_take_several_reports_and_each_is_bounded() -> None:
    changes, reports = RequestChanges(), Reports()
    present = {f"{number:024x}": prompt(f"{number:024x}") for number in range(2 * MAX_REPORTED + 10)}
    largest = 0
    for _ in range(3):
        requests, gone = changes.take(present)
        largest = max(largest, len(msgspec.msgpack.encode((requests, gone))))
        worker = reports(0, *requests, gone=gone)
    assert worker.num_prompts == len(present)
    assert largest < 256 * 1024
    assert changes.take(present) == ((), ())
    assert len(changes.take({})[1]) == MAX_REPORTED


def test_no_worker_makes_a_conductor_keep_more_than_it_has_room_for() -> None:
    reports = Reports()
    for start in range(0, MAX_KEPT + 10_000, 2000):
        worker = reports(0, *(prompt(f"r{number}") for number in range(start, start + 2000)))
    assert worker.num_prompts == MAX_KEPT
    reports(0, gone=["r1"])
    reports(0, prompt("new"), prompt("r2", 1))
    assert worker.num_prompts == MAX_KEPT


def sent_until_refused(state: ConductorState, now_s: float) -> list[Decision]:
    """Send requests until one is refused because too many answers would be written."""
    sent: list[Decision] = []
    while len(sent) < 100:
        try:
            sent.append(state.route(route(f"{id(state)}-{now_s}-{len(sent)}", len(sent)), "fe", now_s, 0.0))
        except Overloaded:
            break
    assert state.refused.keys() == {Cause.TBT}
    return sent


@pytest.mark.parametrize("form", [AdmissionForm.PAPER, AdmissionForm.PREDICTED])
def test_a_conductor_refuses_what_the_answers_of_another_one_leave_no_room_for(form: AdmissionForm) -> None:
    """Both forms look ahead: the answers of the other conductor are still at their prefill worker."""
    cluster = Cluster(2, PolicyConfig(tbt_slo_s=0.05, admission=form))
    one, other = cluster.states
    sent = sent_until_refused(one, 0.0)
    assert 10 < len(sent) < 40
    names = [each.request_id for each in sent]
    cluster.report("d0", requests=tuple(answer(name, decodes=False, num_tokens=PROMPT) for name in names))
    for worker in ("p0", "p1"):
        here = [each for each in sent if each.prefill.name == worker]
        prompts = [prompt(each.request_id, PROMPT - each.reused_tokens, each.reused_tokens) for each in here]
        cluster.report(worker, requests=tuple(prompts))
    assert len(sent_until_refused(other, 0.0)) <= 1
    cluster.report("d0", now_s=0.2, gone=tuple(names))
    assert len(sent_until_refused(other, 0.2)) > 10
