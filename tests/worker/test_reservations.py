"""The decode side of a hand-off: pages are free again exactly when nobody can write them any more."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from waiting import HANG_S

from moonpool.base.errors import AlreadyExists, NoSpace, StaleGeneration
from moonpool.engine.blocks import PageGrant, PageManager
from moonpool.worker.kv_link.pieces import ReadyPoint
from moonpool.worker.kv_link.reservations import Incoming, Reservations


class Fence:
    def __init__(self, num_pages: int) -> None:
        self.generations = [0] * num_pages

    def stamp(self, pages: Sequence[int], generation: int) -> None:
        for page in pages:
            assert generation > self.generations[page], "a generation never goes back"
            self.generations[page] = generation

    def admits(self, pages: list[int], generation: int) -> bool:
        return all(self.generations[page] <= generation for page in pages)


@pytest.fixture
def pages() -> PageManager:
    return PageManager(num_pages=8, block_tokens=4)


@pytest.fixture
def fence() -> Fence:
    return Fence(8)


@pytest.fixture
def reservations(pages: PageManager, fence: Fence) -> Reservations:
    return Reservations(pages, fence.stamp)


def test_a_commit_hands_the_pages_over_and_shuts_the_writer_out(
    reservations: Reservations, pages: PageManager, fence: Fence
) -> None:
    made = reservations.reserve("r", 0, 3, [])
    reservations.open("r", 0, made.generation, writer="p0")
    assert fence.admits(made.pages, made.generation)
    assert reservations.adopt(reservations.begin_commit("r", 0, made.generation)) == made.pages
    assert not fence.admits(made.pages, made.generation)
    pages.check_integrity(Counter(made.pages))
    pages.free(made.pages)
    assert pages.num_available == 8
    assert reservations.num_pages == 0


def test_present_blocks_are_shared_and_never_stamped(
    reservations: Reservations, pages: PageManager, fence: Fence
) -> None:
    [page] = pages.allocate(1)
    pages.publish([page], [b"k0"])
    pages.free([page])
    made = reservations.reserve("r", 0, 2, [b"k0", b"k1"])
    assert made.pages[0] == page
    assert made.num_present == 1
    assert fence.generations[page] == 0
    reservations.leave("r", 0)
    assert fence.generations[page] == 0
    pages.check_integrity({})
    assert pages.num_cached == 1


def test_pages_in_a_writers_hands_outlive_the_reader(
    reservations: Reservations, pages: PageManager, fence: Fence
) -> None:
    made = reservations.reserve("r", 0, 8, [])
    reservations.open("r", 0, made.generation, writer="p0")
    reservations.leave("r", 0)
    assert pages.num_available == 0
    with pytest.raises(StaleGeneration):
        reservations.begin_commit("r", 0, made.generation)
    ended = reservations.abort("r", 0, made.generation, "p0")
    assert ended == [made]
    assert pages.num_available == 0, "another thread owns the page manager"
    for _ in range(2):
        reservations.free(made)
        assert pages.num_available == 8
    assert not fence.admits(made.pages, made.generation)


def test_an_unopened_reservation_ends_with_its_reader(reservations: Reservations, pages: PageManager) -> None:
    made = reservations.reserve("r", 0, 8, [])
    reservations.leave("r", 0)
    assert pages.num_available == 8
    with pytest.raises(StaleGeneration):
        reservations.open("r", 0, made.generation, writer="p0")


def test_a_dead_writer_lets_go_of_all_it_held(reservations: Reservations, pages: PageManager) -> None:
    for name in ("a", "b"):
        reservations.open(name, 0, reservations.reserve(name, 0, 2, []).generation, writer="p0")
    reservations.open("c", 0, reservations.reserve("c", 0, 2, []).generation, writer="p1")
    reservations.leave("a", 0)
    ended = reservations.writer_gone("p0")
    assert sorted(each.request_id for each in ended) == ["a", "b"]
    for each in ended:
        reservations.free(each)
    assert reservations.num_pages == 2
    assert pages.num_available == 6


def test_a_newer_attempt_replaces_an_older_one(reservations: Reservations, pages: PageManager) -> None:
    old = reservations.reserve("r", 0, 2, [])
    reservations.open("r", 0, old.generation, writer="p0")
    new = reservations.reserve("r", 1, 2, [])
    with pytest.raises(AlreadyExists):
        reservations.reserve("r", 1, 2, [])
    assert not set(old.pages) & set(new.pages)
    with pytest.raises(StaleGeneration):
        reservations.begin_commit("r", 0, old.generation)
    assert reservations.abort("r", 0, old.generation, "p0") == [old]
    reservations.free(old)
    assert reservations.num_pages == 2


def test_all_stages_of_a_pipeline_have_written_before_one_commits(
    reservations: Reservations, pages: PageManager, fence: Fence
) -> None:
    made = reservations.reserve("r", 0, 3, [])
    for stage in ("p0", "p1"):
        reservations.open("r", 0, made.generation, writer=stage)
    with pytest.raises(StaleGeneration, match="another worker"):
        reservations.begin_commit("r", 0, made.generation)
    reservations.end_writes("r", 0, made.generation, "p0")
    assert reservations.adopt(reservations.begin_commit("r", 0, made.generation)) == made.pages
    assert not fence.admits(made.pages, made.generation)
    pages.free(made.pages)
    assert pages.num_available == 8


@pytest.mark.parametrize("first", ["p0", "p1"])
def test_pages_of_a_broken_pipeline_are_free_after_its_last_writer(
    reservations: Reservations, pages: PageManager, fence: Fence, first: str
) -> None:
    made = reservations.reserve("r", 0, 3, [])
    for stage in ("p0", "p1"):
        reservations.open("r", 0, made.generation, writer=stage)
    assert reservations.writer_gone(first) == []
    other = "p1" if first == "p0" else "p0"
    for refused in (
        lambda: reservations.begin_commit("r", 0, made.generation),
        lambda: reservations.end_writes("r", 0, made.generation, other),
        lambda: reservations.open("r", 0, made.generation, writer="p2"),
    ):
        with pytest.raises(StaleGeneration):
            refused()
    assert pages.num_available == 5, "the other stage may still write"
    assert reservations.abort("r", 0, made.generation, other) == [made]
    reservations.free(made)
    assert pages.num_available == 8
    assert not fence.admits(made.pages, made.generation)


def test_no_space_changes_nothing(reservations: Reservations, pages: PageManager) -> None:
    reservations.reserve("a", 0, 6, [])
    with pytest.raises(NoSpace):
        reservations.reserve("b", 0, 3, [])
    assert reservations.num_pages == 6
    assert pages.num_available == 2


def test_a_reader_that_leaves_while_the_pieces_are_verified(reservations: Reservations, pages: PageManager) -> None:
    made = reservations.reserve("r", 0, 2, [])
    reservations.open("r", 0, made.generation, writer="p0")
    committing = reservations.begin_commit("r", 0, made.generation)
    reservations.leave("r", 0)
    assert reservations.writer_gone("p0") == []
    assert pages.num_available == 6, "the verifier still reads them"
    assert reservations.adopt(committing) is None
    assert pages.num_available == 8


def test_a_broken_reservation_takes_no_writer_while_it_waits_to_be_freed(
    reservations: Reservations, pages: PageManager
) -> None:
    """Its reader may leave in between, and the request come again: its pages are freed once."""
    made = reservations.reserve("r", 0, 3, [])
    reservations.open("r", 0, made.generation, writer="p0")
    ended = reservations.writer_gone("p0")
    with pytest.raises(StaleGeneration):
        reservations.open("r", 0, made.generation, writer="p1")
    assert reservations.newest_without_writer() is None, "giving it up would help no waiting request"
    again = reservations.reserve("r", 1, 5, [])
    assert pages.num_available == 3
    for each in ended:
        reservations.free(each)
    assert pages.num_available == 3
    assert reservations.num_pages == 5
    reservations.open("r", 1, again.generation, writer="p1")


def test_the_device_is_marked_when_the_pages_are_reserved(pages: PageManager) -> None:
    """What the device was given to do before may still write to them, what it gets later does not."""
    events: list[str] = []

    class NotingPages(PageManager):
        def reserve(self, owner: str, num_pages: int, keys: Sequence[bytes] = ()) -> PageGrant:
            events.append("reserved")
            return super().reserve(owner, num_pages, keys)

    point = cast(ReadyPoint, object())

    def mark() -> ReadyPoint:
        events.append("marked")
        return point

    made = Reservations(NotingPages(8, 4), lambda pages, generation: None, mark).reserve("r", 0, 1, [])
    assert events == ["reserved", "marked"]
    assert made.reserved_at is point


@pytest.mark.parametrize("work", ["reserve", "leave", "free", "adopt"])
def test_writers_do_not_wait_for_the_thread_that_owns_the_pages(pages: PageManager, work: str) -> None:
    """That thread stands still in the middle of its work on pages. Writers open, end, commit and abort meanwhile."""
    is_held, inside, go_on = False, threading.Event(), threading.Event()

    def stamp(pages: Sequence[int], generation: int) -> None:
        if is_held:
            inside.set()
            assert go_on.wait(HANG_S)

    reservations = Reservations(pages, stamp)
    made = {name: reservations.reserve(name, 0, 1, []) for name in "abcdw"}
    reservations.open("w", 0, made["w"].generation, writer="p0")
    committing = reservations.begin_commit("w", 0, made["w"].generation) if work == "adopt" else made["w"]
    if work == "free":
        reservations.abort("w", 0, made["w"].generation, "p0")
    works: dict[str, Callable[[], object]] = {
        "reserve": lambda: reservations.reserve("x", 0, 1, []),
        "leave": lambda: reservations.leave("a", 0),
        "free": lambda: reservations.free(made["w"]),
        "adopt": lambda: reservations.adopt(committing),
    }
    is_held = True
    with ThreadPoolExecutor(2) as threads:
        owner = threads.submit(works[work])
        try:
            assert inside.wait(HANG_S)
            writer = threads.submit(_all_calls_of_a_writer, reservations, made)
            assert writer.result(HANG_S / 2) == made["c"]
            assert not owner.done()
        finally:
            go_on.set()
        owner.result(HANG_S)


def _all_calls_of_a_writer(reservations: Reservations, made: dict[str, Incoming]) -> Incoming:
    for name in "bcd":
        reservations.open(name, 0, made[name].generation, writer="p1")
    reservations.end_writes("b", 0, made["b"].generation, writer="p1")
    assert reservations.abort("d", 0, made["d"].generation, writer="p1") == [made["d"]]
    assert reservations.writer_gone("nobody") == []
    assert reservations.num_pages >= 4
    return reservations.begin_commit("c", 0, made["c"].generation)


class Desk(RuleBasedStateMachine):
    """Random parties come and go; no page is ever free while a writer could still be admitted to it.

    What writers do and what the owner of the pages does come in any order: freed reservations and verified commits wait
    for the owner's next turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageManager(num_pages=6, block_tokens=4)
        self.fence = Fence(6)
        self.reservations = Reservations(self.pages, self.fence.stamp)
        self.made: list[Incoming] = []
        self.epoch = 0
        self.writing: dict[tuple[int, str], Incoming] = {}  # by generation and writer; open, not yet ended
        self.verified: list[tuple[Incoming, bool]] = []  # commits, and whether they are good
        self.to_free: list[Incoming] = []
        self.adopted: list[int] = []

    @rule(name=st.sampled_from("abc"), num_blocks=st.integers(1, 4))
    def reserve(self, name: str, num_blocks: int) -> None:
        self.epoch += 1
        try:
            self.made.append(self.reservations.reserve(name, self.epoch, num_blocks, []))
        except NoSpace:
            assert num_blocks > self.pages.num_available

    @rule(pick=st.integers(0, 99), writer=st.sampled_from("pq"))
    def open(self, pick: int, writer: str) -> None:
        if self.made:
            chosen = self.made[pick % len(self.made)]
            try:
                self.reservations.open(chosen.request_id, chosen.epoch, chosen.generation, writer)
                self.writing[chosen.generation, writer] = chosen
            except StaleGeneration:
                pass

    @rule(pick=st.integers(0, 99))
    def leave(self, pick: int) -> None:
        if self.made:
            chosen = self.made[pick % len(self.made)]
            self.reservations.leave(chosen.request_id, chosen.epoch)

    def _pick(self, pick: int) -> tuple[Incoming, str]:
        (_, writer), chosen = list(self.writing.items())[pick % len(self.writing)]
        return chosen, writer

    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        if self.writing:
            chosen, writer = self._pick(pick)
            self.to_free += self.reservations.abort(chosen.request_id, chosen.epoch, chosen.generation, writer)
            del self.writing[chosen.generation, writer]

    @rule(pick=st.integers(0, 99))
    def end_writes(self, pick: int) -> None:
        if self.writing:
            chosen, writer = self._pick(pick)
            try:
                self.reservations.end_writes(chosen.request_id, chosen.epoch, chosen.generation, writer)
            except StaleGeneration:
                return
            del self.writing[chosen.generation, writer]

    @rule(writer=st.sampled_from("pq"))
    def writer_dies(self, writer: str) -> None:
        self.to_free += self.reservations.writer_gone(writer)
        self.writing = {key: each for key, each in self.writing.items() if key[1] != writer}

    @rule(pick=st.integers(0, 99), good=st.booleans())
    def commit(self, pick: int, good: bool) -> None:
        if self.writing:
            chosen, writer = self._pick(pick)
            try:
                committing = self.reservations.begin_commit(chosen.request_id, chosen.epoch, chosen.generation)
            except StaleGeneration:
                return
            del self.writing[chosen.generation, writer]
            assert chosen not in self.writing.values(), "another stage still writes"
            self.verified.append((committing, good))

    @rule()
    def end_commits(self) -> None:
        for committing, good in self.verified:
            if good:
                self.adopted += self.reservations.adopt(committing) or []
            else:
                self.reservations.free(committing)
        self.verified = []

    @rule()
    def free_ended(self) -> None:
        for ended in self.to_free:
            self.reservations.free(ended)
        self.to_free = []

    @rule()
    def finish_adopted(self) -> None:
        self.pages.free(self.adopted)
        self.adopted = []

    @invariant()
    def books_balance_and_writers_are_fenced(self) -> None:
        self.pages.check_integrity(Counter(self.adopted))
        held = {page for pages in self.pages.owned.values() for page in pages}
        for reservation in (*self.writing.values(), *(each for each, _ in self.verified)):
            assert set(reservation.pages) <= held, "a writer could hit a page that is not reserved"
        for made in self.made:
            if made.owner not in self.pages.owned:
                assert not any(self.fence.admits([page], made.generation) for page in made.pages), "no newer generation"


TestDesk = Desk.TestCase
TestDesk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
