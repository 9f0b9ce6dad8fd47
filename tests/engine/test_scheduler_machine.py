"""Whatever happens to requests on their way - cancels, failed pulls, preemption, hand-offs, failed steps - the books
balance after every event and each request that ends has exactly the tokens it would have had alone."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_model import BLOCK_TOKENS, FakeModel, next_token, scheduler, sequence

from moonpool.base.errors import NoSpace
from moonpool.engine.pulls_ahead import PullAhead
from moonpool.engine.sequence import AdmittedSequence, Chunk, FinishReason, Sequence, pages_for

NUM_PAGES = 8
PROMPTS = st.tuples(st.integers(0, 2), st.integers(1, 18)).map(lambda t: [t[0], *range(t[1])])


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.chunks: list[Chunk] | None = None  # of the open step
        self.joined: list[AdmittedSequence] = []  # the open step; their pulls are under way
        self.live: dict[str, Sequence] = {}
        self.held: list[str] = []
        self.ahead: list[tuple[PullAhead, list[int]]] = []  # under way, with the tokens of their sequences
        self.arrived: dict[str, int] = {}  # good blocks of pulls that ended beside the open step

    @initialize(budget=st.integers(3, 12), seqs=st.integers(1, 3))
    def build(self, budget: int, seqs: int) -> None:
        self.sched = scheduler(NUM_PAGES, max_batch_tokens=budget, max_num_seqs=seqs)
        self.model = FakeModel(NUM_PAGES)

    def new(self, prompt: list[int], max_tokens: int, **more: Any) -> Sequence:
        self.count += 1
        tenant: dict[str, Any] = {"tenant": "abc"[self.count % 3], "weight": (1.0, 1.0, 2.5)[self.count % 3]}
        return sequence(f"r{self.count}", prompt, max_tokens=max_tokens, **tenant, **more)

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        pool=st.integers(0, 4),
        prefill_only=st.booleans(),
        alone=st.sampled_from([0, 0, 0, 1, 3, 10**9]),
    )
    def add(self, prompt: list[int], max_tokens: int, pool: int, prefill_only: bool, alone: int) -> None:
        prefill = {"num_pool_blocks": pool, "prefill_only": prefill_only, "hold_pages": prefill_only}
        it = self.new(prompt, max_tokens, num_alone_steps=alone, **prefill)
        self.sched.add(it)
        self.live[it.request_id] = it

    @rule(prompt=PROMPTS, max_tokens=st.integers(2, 9), alone=st.sampled_from([0, 0, 2]))
    def adopt(self, prompt: list[int], max_tokens: int, alone: int) -> None:
        """A hand-off from another worker: KV of the prompt arrives in reserved pages."""
        it = self.new(prompt, max_tokens, output=[next_token(prompt)], num_alone_steps=alone)
        blocks = pages_for(len(prompt), BLOCK_TOKENS)
        try:
            reservation = self.sched.pages.reserve("ticket", blocks, it.keys)
        except NoSpace:
            return
        arriving = range(reservation.num_present_blocks, blocks)
        self.model.fill([reservation.pages[b] for b in arriving], arriving, prompt)
        it.pages, it.num_computed_tokens = self.sched.pages.detach("ticket"), len(prompt)
        self.sched.adopt(it)
        self.live[it.request_id] = it

    @precondition(lambda self: self.live or self.held)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted([*self.live, *self.held])))
        assert self.sched.cancel(name)
        assert not self.sched.cancel(name)
        self.live.pop(name, None)
        self.held = [other for other in self.held if other != name]

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.sched.release(self.held.pop())

    @precondition(lambda self: self.live)
    @rule(data=st.data(), position=st.integers(0, 30))
    def rewind(self, data: st.DataObject, position: int) -> None:
        """At any time, for no reason; not for one with a pull, whose outcome the end of the step decides."""
        name = data.draw(st.sampled_from(sorted(self.live)))
        if all(pull.request_id != name for pull in self.joined):
            self.sched.rewind(name, position)

    @precondition(lambda self: self.chunks is None)
    @rule(begins=st.booleans())
    def begin_step(self, begins: bool) -> None:
        """Perhaps after the pulls were begun for which there are pages; without, none is waited for."""
        if begins:
            self.sched.ahead.begin_waiting(self.sched.queues, self.begun)
        else:
            self.sched.ahead.forget_lacking()
        chunks = self.schedule()
        self.joined = [admitted for admitted in self.sched.drain_admitted() if admitted.blocks]
        self.chunks = chunks or None

    def begun(self, it: Sequence, pull: PullAhead) -> None:
        self.ahead.append((pull, list(it.tokens)))

    def schedule(self) -> list[Chunk]:
        chunks = self.sched.schedule()
        suspects = [chunk for chunk in chunks if self.live[chunk.request_id].num_alone_steps]
        assert not suspects or len(chunks) == 1, "a suspect is computed with others"
        return chunks

    @precondition(lambda self: self.chunks is not None)
    @rule(data=st.data())
    def end_step(self, data: st.DataObject) -> None:
        """Pulls beside the step end in it, whole or not, or are late."""
        ends = data.draw(st.sampled_from(["whole", "some", "late"])) if self.joined else "whole"
        joined = {admitted.request_id for admitted in self.joined}
        if ends != "late":
            for pull, _ in [each for each in self.ahead if each[0].request_id in joined and each[0].has_joined]:
                self.arrive(pull, len(pull.wanted.blocks) // (2 if ends == "some" else 1))
        self.close_step()

    def close_step(self) -> None:
        """The model writes as late as it can: over whatever was wrongly given to others meanwhile."""
        assert self.chunks is not None
        sampled = self.model.execute(self.chunks)
        for admitted in self.joined:
            self.settle(admitted)
        self.joined = []
        result = self.sched.complete(sampled)
        self.chunks = None
        for accepted in result.accepted:
            if accepted.finish_reason is not None:
                self.finished(self.live.pop(accepted.request_id), accepted.finish_reason)

    def settle(self, admitted: AdmittedSequence) -> None:
        num_good = self.arrived.pop(admitted.request_id, None)
        if num_good is None:
            self.sched.put_back(admitted.request_id)
        elif num_good == len(admitted.blocks):
            self.sched.confirm_pulled(admitted.request_id)
        else:
            self.sched.rewind(admitted.request_id, (admitted.blocks[0] + num_good) * BLOCK_TOKENS)

    def finished(self, it: Sequence, reason: FinishReason) -> None:
        whole = expected(it.tokens[: it.num_prompt_tokens], it.params.max_tokens)
        if it.hold_pages:
            self.held.append(it.request_id)
        if reason == "handoff":
            assert it.output == whole[:1]
        else:
            assert it.output == whole

    @precondition(lambda self: self.chunks is None)
    @rule(data=st.data(), begins=st.booleans())
    def whole_step(self, data: st.DataObject, begins: bool) -> None:
        self.begin_step(begins)
        if self.chunks is not None:
            self.end_step(data)

    @precondition(lambda self: self.chunks is not None)
    @rule(isolate=st.booleans())
    def fail_step(self, isolate: bool) -> None:
        assert self.chunks is not None
        self.sched.abandon_step()
        if isolate:
            self.sched.queues.isolate(chunk.request_id for chunk in self.chunks)
        self.chunks, self.joined = None, []

    @precondition(lambda self: self.sched.queues.waiting)
    @rule(data=st.data(), end=st.integers(1, 5))
    def begin_ahead(self, data: st.DataObject, end: int) -> None:
        it = data.draw(st.sampled_from(self.sched.queues.waiting))
        pull = self.sched.ahead.begin(it, end, NUM_PAGES)
        if pull is not None:
            self.begun(it, pull)

    @precondition(lambda self: self.ahead)
    @rule(data=st.data())
    def let_join(self, data: st.DataObject) -> None:
        pull, _ = data.draw(st.sampled_from(self.ahead))
        pull.may_join = not pull.was_late

    @precondition(lambda self: any(not pull.has_joined or pull.is_given_up for pull, _ in self.ahead))
    @rule(data=st.data())
    def end_ahead(self, data: st.DataObject) -> None:
        """Blocks from the first bad one on are wrong, and are not pulled again."""
        outside = [pull for pull, _ in self.ahead if not pull.has_joined or pull.is_given_up]
        pull = data.draw(st.sampled_from(outside))
        self.arrive(pull, data.draw(st.integers(0, len(pull.wanted.blocks))))

    def arrive(self, pull: PullAhead, num_good: int) -> None:
        """It writes as late as it can."""
        at = next(at for at, (each, _) in enumerate(self.ahead) if each is pull)
        _, tokens = self.ahead.pop(at)
        wanted = pull.wanted
        for index, (page, block) in enumerate(zip(wanted.pages, wanted.blocks, strict=True)):
            self.model.fill([page], [block], tokens, poison=0 if index < num_good else 7)
        if pull.has_joined and not pull.is_given_up:
            self.arrived[pull.request_id] = num_good
        it = self.live.get(pull.request_id)
        if it is not None and num_good < len(wanted.blocks):
            it.ahead_limit = wanted.num_local_blocks + num_good
        self.sched.ahead.end(pull, num_good)

    @precondition(lambda self: self.chunks is None)
    @rule(tenant=st.sampled_from("abcd"), num_wanted=st.integers(1, NUM_PAGES))
    def make_way(self, tenant: str, num_wanted: int) -> None:
        before = {each.request_id: each.num_preemptions for each in self.live.values()}
        has_room = self.sched.make_way(tenant, 1.0, num_wanted)
        assert has_room == (self.sched.pages.num_available >= num_wanted)
        for each in self.live.values():
            assert each.num_preemptions == before[each.request_id] or (each.was_displaced and each.tenant != tenant)

    @rule()
    def drop_cached(self) -> None:
        self.sched.pages.drop_cached()

    @invariant()
    def balances(self) -> None:
        if hasattr(self, "sched"):
            self.sched.check_integrity()

    def teardown(self) -> None:
        """Left alone, everybody who is still here ends, with the right tokens, and gives everything back."""
        if not hasattr(self, "sched"):
            return
        if self.chunks is not None:
            self.close_step()
        for _ in range(2000):
            for name in self.held:
                self.sched.release(name)
            self.held = []
            if not self.live:
                break
            self.finish_one_step()
        assert not self.live, "somebody never ended"
        for pull, _ in list(self.ahead):
            self.arrive(pull, 0)
        self.sched.check_integrity()
        assert self.sched.pages.num_used == 0

    def finish_one_step(self) -> None:
        """Pulls end one after the other; while one is under way, the others go on."""
        self.begin_step(True)
        if self.chunks is not None:
            self.close_step()
        else:
            assert self.ahead, "stuck"
        if self.ahead:
            self.arrive(self.ahead[0][0], len(self.ahead[0][0].wanted.blocks))
        self.sched.check_integrity()


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestSchedulerMachine = Machine.TestCase
