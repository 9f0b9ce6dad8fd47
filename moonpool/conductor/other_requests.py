"""The requests that other conductors have sent, as workers report them. Pure.

Workers name their requests by id in their reports (base/cluster.py). A conductor leaves its own out: it knows from
their routes, ends of prefill and ends what reports say later and less exactly. It prices the prompts of the others by
its own cost models, each behind the prefix that the worker has or expects, so they count in the worker's queue as its
own prompts do. Their answers are in the batches of decode workers, and in the forecast of admission from the moment at
which their decode worker first names them.

After a restart, the requests from before are those of another conductor, too.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from moonpool.base.cluster import ReportedRequest
from moonpool.conductor.admission.forecast import ExpectedDecode

_MAX_TENANTS = 4096  # with prompts of other conductors, from one look of the queue to the next
MAX_KEPT = 65_536  # requests of one worker; further ones count in its load only


class Forecast(Protocol):
    """What admission takes of these requests: admission/controller.py."""

    def other_came(self, request: ExpectedDecode, now_s: float) -> None: ...

    def other_joined(self, request_id: str, now_s: float) -> None: ...

    def other_ended(self, request_id: str, now_s: float) -> None: ...


class _Answer(NamedTuple):
    num_tokens: int
    max_tokens: int
    decodes: bool


@dataclass(eq=False, slots=True)
class OtherRequests:
    """Those of one worker. `prompts` has also this conductor's own ones, with no work, because their order counts: the
    first one is being computed."""

    prompts: dict[str, float] = field(default_factory=dict)  # predicted seconds, in the order in which they came
    answers: dict[str, _Answer] = field(default_factory=dict)
    work_s: float = 0.0
    num_prompts: int = 0
    num_decoding: int = 0
    decoding_tokens: int = 0  # of their prompts
    answer_tokens: int = 0  # of all answers' prompts

    @property
    def first_s(self) -> float:
        """The work of the first prompt; 0 if it is this conductor's own."""
        return next(iter(self.prompts.values()), 0.0)

    @property
    def has_room(self) -> bool:
        return len(self.prompts) + len(self.answers) < MAX_KEPT

    def set_prompt(self, request_id: str, work_s: float) -> None:
        earlier_s = self.prompts.get(request_id, 0.0)
        self.prompts[request_id] = work_s
        self._count_prompt(work_s - earlier_s, (work_s > 0) - (earlier_s > 0))

    def remove_prompt(self, request_id: str) -> None:
        """Ignore an unknown prompt."""
        work_s = self.prompts.pop(request_id, 0.0)
        self._count_prompt(-work_s, -(work_s > 0))

    def _count_prompt(self, work_s: float, number: int) -> None:
        self.num_prompts += number
        self.work_s = self.work_s + work_s if self.num_prompts else 0.0  # without what rounding left of sums

    def set_answer(self, request_id: str, answer: _Answer) -> None:
        self.remove_answer(request_id)
        self.answers[request_id] = answer
        self._count_answer(answer, 1)

    def remove_answer(self, request_id: str) -> _Answer | None:
        """Ignore an unknown answer."""
        answer = self.answers.pop(request_id, None)
        if answer is not None:
            self._count_answer(answer, -1)
        return answer

    def _count_answer(self, answer: _Answer, sign: int) -> None:
        self.answer_tokens += sign * answer.num_tokens
        if answer.decodes:
            self.num_decoding += sign
            self.decoding_tokens += sign * answer.num_tokens


class ReportedRequests:
    """Those of all workers. `own` are the ids of the requests that this conductor has sent."""

    def __init__(self, own: Container[str], forecast: Forecast) -> None:
        self._own, self._forecast = own, forecast
        self._ends_s: dict[str, float] = {}  # predicted, of prompts
        self._decoding_at: dict[str, OtherRequests] = {}
        self.num_decoding = 0
        self.served: dict[str, float] = {}  # what prompts took of each tenant's share since the caller cleared it

    def changed(
        self,
        worker: OtherRequests,
        requests: Iterable[ReportedRequest],
        gone: Iterable[str],
        prefill_s: Callable[[int, int], float],
        wait_s: float,
        now_s: float,
    ) -> None:
        """Apply a worker's report. `prefill_s` predicts the time of a prompt from its tokens and those that are reused;
        `wait_s` is how long the worker computes this conductor's own prompts."""
        for request_id in gone:
            worker.remove_prompt(request_id)
            self._ends_s.pop(request_id, None)
            self._end_answer(worker, request_id, now_s)
        for request in requests:
            if request.max_tokens:
                self._set_answer(worker, request, now_s)
            else:
                self._set_prompt(worker, request, prefill_s, wait_s, now_s)

    def take_over(self, request_id: str, workers: Iterable[OtherRequests]) -> None:
        """This conductor sends a request to these workers, which another one may have sent before."""
        for worker in workers:
            if request_id in worker.prompts:
                worker.set_prompt(request_id, 0.0)
            self._remove_answer(worker, request_id)
        self._decoding_at.pop(request_id, None)  # elsewhere it counts until its worker reports that it is gone

    def worker_gone(self, worker: OtherRequests, now_s: float) -> None:
        for request_id in worker.prompts:
            self._ends_s.pop(request_id, None)
        for request_id in list(worker.answers):
            self._end_answer(worker, request_id, now_s)

    def _set_prompt(
        self,
        worker: OtherRequests,
        request: ReportedRequest,
        prefill_s: Callable[[int, int], float],
        wait_s: float,
        now_s: float,
    ) -> None:
        name, is_new = request.request_id, request.request_id not in worker.prompts
        if is_new and not worker.has_room:
            return
        if name in self._own:
            worker.set_prompt(name, 0.0)
            return
        work_s = prefill_s(request.uncomputed_tokens + request.reused_tokens, request.reused_tokens)
        worker.set_prompt(name, work_s)
        if is_new and (request.tenant in self.served or len(self.served) < _MAX_TENANTS):
            self.served[request.tenant] = self.served.get(request.tenant, 0.0) + work_s / request.weight
        # Its tokens change when it is being computed: before that, all of the queue comes first.
        self._ends_s[name] = now_s + (wait_s + worker.work_s if is_new else work_s)
        answer_at = self._decoding_at.get(name)
        if answer_at is not None and not answer_at.answers[name].decodes:
            self._expect(name, answer_at.answers[name], now_s)

    def _set_answer(self, worker: OtherRequests, request: ReportedRequest, now_s: float) -> None:
        name, earlier = request.request_id, worker.answers.get(request.request_id)
        if name in self._own or (earlier is None and not worker.has_room):
            return
        num_tokens = request.uncomputed_tokens + request.reused_tokens
        answer = _Answer(num_tokens, request.max_tokens, decodes=not request.uncomputed_tokens)
        self.num_decoding += answer.decodes - (earlier is not None and earlier.decodes)
        worker.set_answer(name, answer)
        if earlier is None:
            self._decoding_at[name] = worker
            self._expect(name, answer, now_s)
        if answer.decodes:
            self._forecast.other_joined(name, now_s)

    def _expect(self, name: str, answer: _Answer, now_s: float) -> None:
        ends_s = self._ends_s.get(name, now_s)  # not known yet: its prefill worker names it soon
        self._forecast.other_came(ExpectedDecode(name, ends_s, answer.num_tokens, answer.max_tokens), now_s)

    def _end_answer(self, worker: OtherRequests, request_id: str, now_s: float) -> None:
        self._remove_answer(worker, request_id)
        if self._decoding_at.get(request_id) is worker:  # otherwise it goes on at another one
            del self._decoding_at[request_id]
            self._forecast.other_ended(request_id, now_s)

    def _remove_answer(self, worker: OtherRequests, request_id: str) -> None:
        answer = worker.remove_answer(request_id)
        self.num_decoding -= answer is not None and answer.decodes
