"""The outgoing side of a hand-off, on a queue that the test plays itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest

from moonpool.base.checksum import crc32c
from moonpool.base.clock import Clock, VirtualClock
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import Cancelled, Internal, MoonpoolError, PeerLost, StaleGeneration
from moonpool.base.rpc import Call
from moonpool.engine.kv_memory import KvLayout
from moonpool.store.client.put_session import PutSession
from moonpool.transfer import Pending, Priority, TransferEngine, TransferRequest
from moonpool.worker.kv_link.decode_peers import DecodePeers
from moonpool.worker.kv_link.pieces import HostPieces, ReadyPoint
from moonpool.worker.kv_link.pool import PoolWriter
from moonpool.worker.kv_link.push import Push
from moonpool.worker.kv_link.send_queue import SendQueue, Urgency
from moonpool.worker.messages import AbortHandoff, CommitHandoff, OpenHandoff, Ticket, TokenOut

LAYOUT = KvLayout(num_pages=4, num_layers=2, num_kv_heads=1, block_tokens=4, head_dim=4, dtype="float32")
REMOTE_PAGES = 32
FIRST = TokenOut(5)


class HandQueue:
    """Runs everything at once, most urgent first, when told to."""

    def __init__(self) -> None:
        self.tasks: list[tuple[Urgency, Callable[[], None]]] = []

    def put(self, urgency: Urgency, task: Callable[[], None], lane: str = "") -> None:
        self.tasks.append((urgency, task))

    def put_after(self, transfer: Pending[None], task: Callable[[], None], lane: str = "") -> None:
        transfer.add_done_callback(lambda _: self.put(Urgency.HANDOFF, task))

    def put_answered(self, call: Future[Any], task: Callable[[], None], lane: str = "") -> None:
        call.add_done_callback(lambda _: self.put(Urgency.HANDOFF, task))

    def track(self, transfer: Pending[None]) -> None: ...

    def run(self) -> None:
        while self.tasks:
            tasks, self.tasks = self.tasks, []
            for _, task in sorted(tasks, key=lambda entry: entry[0]):
                task()


class Calls:
    """The connection to the decode worker, and what came over it. Plays DecodePeers."""

    def __init__(self) -> None:
        self.made: list[Call[Any]] = []
        self.refusals: dict[type[Call[Any]], MoonpoolError] = {}
        self.is_slow = False  # calls are not answered by themselves
        self.unanswered: list[tuple[Future[Any], Call[Any]]] = []

    def open(self, address: str, call: Call[None]) -> Future[Calls]:
        return self._make(call)

    def call(self, line: Calls, call: Call[None]) -> Future[Calls]:
        assert line is self, "the connection that has opened the hand-off"
        return self._make(call)

    def send(self, line: Calls, call: Call[None]) -> None:
        assert line is self
        self.made.append(call)

    def _make(self, call: Call[None]) -> Future[Calls]:
        self.made.append(call)
        future: Future[Calls] = Future()
        self.unanswered.append((future, call))
        if not self.is_slow:
            self.answer()
        return future

    def answer(self) -> None:
        """Answer the calls that wait for it."""
        unanswered, self.unanswered = self.unanswered, []
        for future, call in unanswered:
            if type(call) in self.refusals:
                future.set_exception(self.refusals[type(call)])
            else:
                future.set_result(self)

    @property
    def said(self) -> list[type[Call[Any]]]:
        return [type(call) for call in self.made]


class DecodeWorker:
    """The other side's memory. Plays the remote segment and what writes to it."""

    takes_gpu_memory = False

    def __init__(self) -> None:
        self.memory = bytearray(REMOTE_PAGES * LAYOUT.page_nbytes)
        self.write_error: MoonpoolError | None = None
        self.num_writes = 0  # batches
        self.is_slow = False  # transfers do not end by themselves
        self.transfers: list[Pending[None]] = []

    def open(self, descriptor: SegmentDescriptor) -> DecodeWorker:
        return self

    def submit(self, requests: Sequence[TransferRequest], **options: Any) -> Pending[None]:
        assert options["priority"] is Priority.HANDOFF
        self.num_writes += 1
        self.transfers.append(Pending())
        if not self.is_slow:
            self.end(requests, self.transfers[-1])
        return self.transfers[-1]

    def end(self, requests: Sequence[TransferRequest], transfer: Pending[None]) -> None:
        if self.write_error is not None:
            transfer.fail(self.write_error)
            return
        for request in requests:
            data = b"".join(bytes(buffer) for buffer in request.buffers)  # type: ignore[arg-type]
            self.memory[request.offset : request.offset + len(data)] = data
        transfer.resolve(None)

    def page(self, page: int) -> bytes:
        return bytes(self.memory[page * LAYOUT.page_nbytes : (page + 1) * LAYOUT.page_nbytes])


class NoPool:
    """A pool that wants nothing."""

    max_pieces = 10

    def write(self, pages: Mapping[PutSession, int], layers: range, ready: object = None) -> set[PutSession]:
        assert not pages
        return set()

    def begin(self, keys: Sequence[bytes], parents: Mapping[bytes, bytes]) -> dict[bytes, PutSession]:
        return {}


class SlowPool:
    """A pool that takes every block and notes what it was told."""

    max_pieces = 1

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes] = {}
        self.kept: list[int] = []
        self.finished: list[int] = []

    def begin(self, keys: Sequence[bytes], parents: Mapping[bytes, bytes]) -> dict[bytes, PutSession]:
        self.parents = dict(parents)
        return {key: cast(PutSession, object()) for key in keys}

    def write(self, pages: Mapping[PutSession, int], layers: range, ready: object = None) -> set[PutSession]:
        return set()

    def renew(self, sessions: Sequence[PutSession]) -> None:
        self.kept.append(len(sessions))

    def finish(self, sessions: Sequence[PutSession]) -> None:
        self.finished.append(len(sessions))


class Bench:
    """One hand-off. Those `beside` another one go to the same decode worker, by the same queue and connection."""

    def __init__(
        self,
        *,
        num_present: int = 0,
        pool: object = None,
        clock: Clock | None = None,
        name: str = "r",
        beside: Bench | None = None,
    ) -> None:
        self.memory = memoryview(bytearray(np.random.default_rng(1).bytes(LAYOUT.total_nbytes)))
        self.decode: DecodeWorker = beside.decode if beside else DecodeWorker()
        self.calls: Calls = beside.calls if beside else Calls()
        self.queue: HandQueue = beside.queue if beside else HandQueue()
        segment = SegmentDescriptor(name="d/kv", nbytes=len(self.decode.memory), incarnation=1, host="", endpoints=())
        ticket = Ticket(
            request_id=name,
            epoch=1,
            address="unix:/d",
            segment=segment,
            pages=[30, 2, 17],  # also beyond the number of pages that this worker has
            num_present_blocks=num_present,
            generation=9,
        )
        self.push = Push(
            ticket,
            [b"k0", b"k1"],
            queue=cast(SendQueue, self.queue),
            memory=HostPieces(self.memory, LAYOUT),
            pool=cast(PoolWriter, pool or NoPool()),
            peers=cast(DecodePeers, self.calls),
            transfer=cast(TransferEngine, self.decode),
            clock=clock,
        )
        self.outcomes: list[MoonpoolError | None] = []

    def compute(self, blocks: Sequence[int] = (0, 1, 2), *, slowly: bool = False) -> None:
        """Compute all layers; slowly: each is sent before the next one is ready."""
        for layer in range(LAYOUT.num_layers):
            self.push.layer_ready(layer, blocks)
            if slowly:
                self.queue.run()

    def commit(self) -> MoonpoolError | None:
        self.push.commit(FIRST, 11, self.outcomes.append)
        self.queue.run()
        return self.outcomes[-1]

    def page(self, page: int) -> bytes:
        return bytes(self.memory[page * LAYOUT.page_nbytes : (page + 1) * LAYOUT.page_nbytes])


def test_every_page_goes_to_its_place_whatever_the_other_side_s_size() -> None:
    bench = Bench()
    bench.push.begin([1, 3, 0], 0, 0)
    bench.compute()
    assert bench.commit() is None
    for ours, theirs in ((1, 30), (3, 2), (0, 17)):
        assert bench.decode.page(theirs) == bench.page(ours)
    assert bench.calls.said == [OpenHandoff, CommitHandoff]
    sent = bench.calls.made[-1]
    assert isinstance(sent, CommitHandoff)
    pieces = [HostPieces(bench.memory, LAYOUT).piece(page, layer) for page in (1, 3, 0) for layer in range(2)]
    assert sent.checksums == np.array([crc32c(piece) for piece in pieces], dtype="<u4").tobytes()


def test_puts_of_a_prompt_that_takes_long_are_kept_alive() -> None:
    """The pool discards a put after half a minute; a long prompt takes longer."""
    pool, clock = SlowPool(), VirtualClock()
    bench = Bench(pool=pool, clock=clock)
    bench.push.begin([1, 3, 0], 0, 0)
    for _ in range(8):
        clock.advance(4.0)
        bench.push.layer_ready(0, [0])
        bench.queue.run()
    assert pool.kept == [2] * 3
    bench.compute()
    assert bench.commit() is None
    assert pool.parents == {b"k1": b"k0"}


def test_what_is_present_is_not_sent() -> None:
    bench = Bench(num_present=2)
    bench.push.begin([1, 3, 0], 2, 0)
    bench.compute([2], slowly=True)
    assert bench.commit() is None
    assert bench.decode.page(30) == bench.decode.page(2) == bytes(LAYOUT.page_nbytes)
    assert bench.decode.num_writes == 2


def test_a_piece_computed_again_is_sent_again_and_its_last_bytes_count() -> None:
    bench = Bench()
    bench.push.begin([1, 3, 0], 0, 0)
    bench.compute()
    bench.queue.run()
    bench.push.begin([2, 3, 0], 0, 0)  # preempted: it got another page
    bench.compute()
    assert bench.commit() is None
    assert bench.decode.page(30) == bench.page(2)
    assert bench.calls.said == [OpenHandoff, CommitHandoff]


def test_a_piece_that_was_never_sent_fails_the_attempt_and_frees_the_pages() -> None:
    bench = Bench()
    bench.push.begin([1, 3, 0], 0, 0)
    bench.compute([0, 2])
    assert isinstance(bench.commit(), Internal)
    assert bench.calls.said == [OpenHandoff, AbortHandoff]


def test_after_an_abort_nothing_is_written_any_more() -> None:
    """The decode worker may give the pages to somebody else as soon as it has heard of it."""
    bench = Bench()
    bench.push.begin([1, 3, 0], 0, 0)
    bench.push.layer_ready(0, [0])
    bench.queue.run()
    bench.push.abort()
    bench.push.layer_ready(1, [0])
    bench.queue.run()
    assert bench.calls.said == [OpenHandoff, AbortHandoff]
    assert bench.decode.num_writes == 1
    bench.push.abort()
    bench.queue.run()
    assert bench.calls.said == [OpenHandoff, AbortHandoff], "said once"


def test_layers_go_out_one_after_the_other_without_waiting() -> None:
    """One batch per layer, and the next one is sent while the last is under way."""
    bench = Bench()
    bench.decode.is_slow = True
    bench.push.begin([1, 3, 0], 0, 0)
    bench.compute(slowly=True)
    bench.push.commit(FIRST, 11, bench.outcomes.append)
    bench.queue.run()
    assert bench.decode.num_writes == LAYOUT.num_layers
    assert bench.calls.said == [OpenHandoff], "the commit waits for the writes"
    for transfer in bench.decode.transfers:
        transfer.resolve(None)
        bench.queue.run()
    assert bench.outcomes == [None]
    assert bench.calls.said == [OpenHandoff, CommitHandoff]


def test_an_abort_is_told_when_nothing_is_under_way_any_more() -> None:
    bench = Bench()
    bench.decode.is_slow = True
    bench.push.begin([1, 3, 0], 0, 0)
    bench.compute(slowly=True)
    bench.push.commit(FIRST, 11, bench.outcomes.append)
    bench.push.abort()
    bench.queue.run()
    bench.decode.transfers[1].fail(Cancelled("cancelled"))
    bench.queue.run()
    assert bench.calls.said == [OpenHandoff], "the first layer may still be written"
    bench.decode.transfers[0].resolve(None)
    bench.queue.run()
    bench.queue.run()
    assert bench.calls.said == [OpenHandoff, AbortHandoff]
    assert [type(outcome) for outcome in bench.outcomes] == [Cancelled]


def test_layers_that_wait_go_together() -> None:
    bench = Bench()
    bench.push.begin([1, 3, 0], 0, 0)
    bench.compute([0, 1])
    bench.compute([2])
    assert bench.commit() is None
    assert bench.decode.num_writes == 2, "one batch per set of pages"
    for ours, theirs in ((1, 30), (3, 2), (0, 17)):
        assert bench.decode.page(theirs) == bench.page(ours)
    sent = bench.calls.made[-1]
    assert isinstance(sent, CommitHandoff)
    pieces = [HostPieces(bench.memory, LAYOUT).piece(page, layer) for page in (1, 3, 0) for layer in range(2)]
    assert sent.checksums == np.array([crc32c(piece) for piece in pieces], dtype="<u4").tobytes()


def test_layers_that_wait_go_together_as_far_as_the_window_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.worker.kv_link.push._WINDOW_NBYTES", 2 * LAYOUT.piece_nbytes)
    bench = Bench()
    bench.push.begin([1, 3, 0], 0, 0)
    bench.compute([0])
    bench.compute([1, 2])
    assert bench.commit() is None
    assert bench.decode.num_writes == 1 + LAYOUT.num_layers, "two pieces of one page fit, four of two pages do not"


def test_layers_of_a_pull_are_not_merged_with_those_of_a_step() -> None:
    """They are ready at points of different streams, of which none covers the other."""
    bench, point = Bench(), cast(ReadyPoint, object())
    bench.push.begin([1, 3, 0], 0, 0)
    bench.push.layer_ready(0, [0], point)
    bench.push.layer_ready(1, [0])
    bench.compute([1, 2])
    assert bench.commit() is None
    assert bench.decode.num_writes == 3


def test_a_reservation_that_is_gone_ends_the_attempt_before_the_first_write() -> None:
    bench = Bench()
    bench.calls.refusals[OpenHandoff] = StaleGeneration("too late")
    bench.push.begin([1, 3, 0], 0, 0)
    bench.compute()
    assert isinstance(bench.commit(), StaleGeneration)
    assert bench.calls.said == [OpenHandoff], "nothing was opened, so nothing is aborted"
    assert bench.decode.num_writes == 0


@pytest.mark.parametrize("error", [PeerLost("gone"), StaleGeneration("late")])
def test_a_write_that_fails_is_the_attempt_s_failure(error: MoonpoolError) -> None:
    bench = Bench()
    bench.decode.write_error = error
    bench.calls.refusals[AbortHandoff] = PeerLost("gone as well")
    bench.push.begin([1, 3, 0], 0, 0)
    bench.compute()
    assert bench.commit() is error
    assert bench.decode.num_writes == 1, "after the first failure there is no use"
    assert bench.calls.said == [OpenHandoff, AbortHandoff]


def test_a_commit_that_is_refused_is_followed_by_an_abort() -> None:
    bench = Bench()
    bench.calls.refusals[CommitHandoff] = StaleGeneration("too late")
    bench.push.begin([1, 3, 0], 0, 0)
    bench.compute()
    assert isinstance(bench.commit(), StaleGeneration)
    assert bench.calls.said == [OpenHandoff, CommitHandoff, AbortHandoff]


def test_any_number_of_hand_offs_are_opened_and_committed_at_once() -> None:
    """No call is waited for: the thread of a decode worker goes on with other prompts."""
    first = Bench()
    benches = [first, *(Bench(name=f"r{number}", beside=first) for number in range(7))]
    first.calls.is_slow = True
    for bench in benches:
        bench.push.begin([1, 3, 0], 0, 0)
        bench.compute()
        bench.push.commit(FIRST, 11, bench.outcomes.append)
    first.queue.run()
    assert first.calls.said == [OpenHandoff] * 8
    assert first.decode.num_writes == 0, "the pages may be reserved for another request by now"
    first.calls.answer()
    first.queue.run()
    assert first.calls.said == [OpenHandoff] * 8 + [CommitHandoff] * 8
    late = Bench(name="late", beside=first)
    late.push.begin([1, 3, 0], 0, 0)
    late.compute()
    late.queue.run()
    assert first.calls.said[-1] is OpenHandoff, "the commits have not been answered"
    assert all(bench.outcomes == [] for bench in benches)
    first.calls.answer()
    first.queue.run()
    assert all(bench.outcomes == [None] for bench in benches)


@pytest.mark.parametrize("refused", [False, True])
def test_an_abort_waits_for_the_answer_to_the_commit(refused: bool) -> None:
    bench = Bench()
    bench.push.begin([1, 3, 0], 0, 0)
    bench.compute()
    bench.queue.run()
    bench.calls.is_slow = True
    if refused:
        bench.calls.refusals[CommitHandoff] = StaleGeneration("too late")
    bench.push.commit(FIRST, 11, bench.outcomes.append)
    bench.push.abort()
    bench.queue.run()
    assert bench.calls.said == [OpenHandoff, CommitHandoff]
    bench.calls.answer()
    bench.queue.run()
    assert bench.calls.said == [OpenHandoff, CommitHandoff, *([AbortHandoff] if refused else [])]
    assert [type(outcome) for outcome in bench.outcomes] == [StaleGeneration if refused else type(None)]


def test_an_abort_before_the_hand_off_is_open() -> None:
    bench = Bench()
    bench.calls.is_slow = True
    bench.push.begin([1, 3, 0], 0, 0)
    bench.compute()
    bench.push.abort()
    bench.queue.run()
    assert bench.calls.said == [OpenHandoff], "the answer shows whether there is something to give back"
    bench.calls.answer()
    bench.queue.run()
    assert bench.calls.said == [OpenHandoff, AbortHandoff]
    assert bench.decode.num_writes == 0


def test_pages_are_kept_until_the_last_byte_is_written() -> None:
    """The worker gives them to another prompt as soon as finish_puts() is done."""
    bench, done = Bench(pool=SlowPool()), list[bool]()
    bench.calls.is_slow = bench.decode.is_slow = True
    bench.push.begin([1, 3, 0], 0, 0)
    bench.compute()
    bench.push.commit(FIRST, 11, bench.outcomes.append)
    bench.push.finish_puts(complete=True, on_done=lambda: done.append(True))
    bench.queue.run()
    assert not done, "the pieces wait for the answer of the decode worker"
    bench.calls.answer()
    bench.queue.run()
    assert not done, "they are on the wire"
    for transfer in bench.decode.transfers:
        transfer.resolve(None)
    bench.calls.is_slow = False
    bench.queue.run()
    bench.calls.answer()
    bench.queue.run()
    assert done == [True]
