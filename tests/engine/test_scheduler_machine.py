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
        self.pulls: list[AdmittedSequence] = []
        self.bad: dict[str, int | None] = {}  # the first block of each pull that came wrong
        self.live: dict[str, Sequence] = {}
        self.held: list[str] = []
        self.ahead: list[tuple[PullAhead, list[int]]] = []  # under way, with the tokens of their sequences

    @initialize(budget=st.integers(3, 12), seqs=st.integers(1, 3))
    def build(self, budget: int, seqs: int) -> None:
        self.sched = scheduler(NUM_PAGES, max_batch_tokens=budget, max_num_seqs=seqs)
        self.model = FakeModel(NUM_PAGES)

    def new(self, prompt: list[int], max_tokens: int, **more: Any) -> Sequence:
        self.count += 1
        return sequence(f"r{self.count}", prompt, max_tokens=max_tokens, **more)

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
        if all(pull.request_id != name for pull in self.pulls):
            self.sched.rewind(name, position)

    @precondition(lambda self: self.chunks is None)
    @rule(data=st.data(), pull_fails=st.booleans())
    def begin_step(self, data: st.DataObject, pull_fails: bool) -> None:
        chunks = self.schedule()
        for admitted in self.sched.drain_admitted():
            if not admitted.blocks:
                continue
            self.pull(admitted, data.draw(st.sampled_from(admitted.blocks)) if pull_fails else None)
        self.chunks = chunks or None

    def schedule(self) -> list[Chunk]:
        chunks = self.sched.schedule()
        suspects = [chunk for chunk in chunks if self.live[chunk.request_id].num_alone_steps]
        assert not suspects or len(chunks) == 1, "a suspect is computed with others"
        return chunks

    def pull(self, admitted: AdmittedSequence, bad: int | None) -> None:
        tokens = self.live[admitted.request_id].tokens
        for page, block in zip(admitted.pages, admitted.blocks, strict=True):
            poison = 0 if bad is None or block < bad else 7
            self.model.fill([page], [block], tokens, poison=poison)
        self.bad[admitted.request_id] = bad
        self.pulls.append(admitted)

    @precondition(lambda self: self.chunks is not None)
    @rule()
    def end_step(self) -> None:
        """The model writes as late as it can: over whatever was wrongly given to others meanwhile."""
        assert self.chunks is not None
        sampled = self.model.execute(self.chunks)
        self.settle()
        result = self.sched.complete(sampled)
        self.chunks = None
        for accepted in result.accepted:
            if accepted.finish_reason is not None:
                self.finished(self.live.pop(accepted.request_id), accepted.finish_reason)

    def settle(self) -> None:
        for pull in self.pulls:
            bad = self.bad.pop(pull.request_id)
            if bad is None:
                self.sched.confirm_pulled(pull.request_id)
            else:
                self.sched.rewind(pull.request_id, bad * BLOCK_TOKENS)
        self.pulls = []

    def finished(self, it: Sequence, reason: FinishReason) -> None:
        whole = expected(it.tokens[: it.num_prompt_tokens], it.params.max_tokens)
        if it.hold_pages:
            self.held.append(it.request_id)
        if reason == "handoff":
            assert it.output == whole[:1]
        else:
            assert it.output == whole

    @precondition(lambda self: self.chunks is None)
    @rule(data=st.data(), pull_fails=st.booleans())
    def whole_step(self, data: st.DataObject, pull_fails: bool) -> None:
        self.begin_step(data, pull_fails)
        if self.chunks is not None:
            self.end_step()

    @precondition(lambda self: self.chunks is not None)
    @rule(isolate=st.booleans())
    def fail_step(self, isolate: bool) -> None:
        assert self.chunks is not None
        self.sched.abandon_step()
        if isolate:
            self.sched.queues.isolate(chunk.request_id for chunk in self.chunks)
        self.chunks, self.pulls, self.bad = None, [], {}

    @precondition(lambda self: self.sched.queues.waiting)
    @rule(data=st.data(), end=st.integers(1, 5))
    def begin_ahead(self, data: st.DataObject, end: int) -> None:
        it = data.draw(st.sampled_from(self.sched.queues.waiting))
        pull = self.sched.ahead.begin(it, end, NUM_PAGES)
        if pull is not None:
            self.ahead.append((pull, list(it.tokens)))

    @precondition(lambda self: self.ahead)
    @rule(data=st.data())
    def end_ahead(self, data: st.DataObject) -> None:
        """It writes as late as it can; blocks from the first bad one on are wrong."""
        pull, tokens = self.ahead.pop(data.draw(st.integers(0, len(self.ahead) - 1)))
        num_good = data.draw(st.integers(0, len(pull.wanted.blocks)))
        for index, (page, block) in enumerate(zip(pull.wanted.pages, pull.wanted.blocks, strict=True)):
            self.model.fill([page], [block], tokens, poison=0 if index < num_good else 7)
        self.sched.ahead.end(pull, num_good)

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
            self.end_step()
        for pull, _ in self.ahead:
            self.sched.ahead.end(pull, 0)
        for _ in range(2000):
            for name in self.held:
                self.sched.release(name)
            self.held = []
            if not self.live:
                break
            self.finish_one_step()
        assert not self.live, "somebody never ended"
        self.sched.check_integrity()
        assert self.sched.pages.num_used == 0

    def finish_one_step(self) -> None:
        chunks = self.schedule()
        assert chunks, "stuck"
        for admitted in self.sched.drain_admitted():
            if admitted.blocks:
                self.pull(admitted, None)
        self.chunks = chunks
        self.end_step()
        self.sched.check_integrity()


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestSchedulerMachine = Machine.TestCase
