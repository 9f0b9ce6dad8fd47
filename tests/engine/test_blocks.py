"""Pages: counted once, reused by key, evicted least recently used first, never both free and in use."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.base.errors import AlreadyExists, NoSpace
from moonpool.engine.blocks import PageManager


def key(n: int) -> bytes:
    return n.to_bytes(32, "little")


def cached(manager: PageManager, *numbers: int) -> list[int]:
    pages = manager.allocate(len(numbers))
    for page, n in zip(pages, numbers, strict=True):
        manager.publish([page], [key(n)])
    manager.free(pages)
    return pages


def test_allocate_is_all_or_nothing() -> None:
    manager = PageManager(4, 16)
    manager.allocate(3)
    with pytest.raises(NoSpace):
        manager.allocate(2)
    assert (manager.num_free, manager.num_used, manager.num_cached) == (1, 3, 0)


def test_match_takes_the_leading_run_only() -> None:
    manager = PageManager(8, 16)
    pages = cached(manager, 1, 2, 4)
    assert manager.count_local([key(1), key(2), key(3), key(4)]) == 2
    assert manager.match([key(1), key(2), key(3), key(4)]) == pages[:2]
    assert (manager.num_used, manager.num_cached) == (2, 1)
    assert manager.page_of(key(4)) == pages[2]


def test_shared_page_is_free_after_its_last_reference() -> None:
    manager = PageManager(2, 16)
    (page,) = cached(manager, 1)
    assert manager.match([key(1)]) == manager.match([key(1)]) == [page]
    manager.free([page])
    assert manager.num_used == 1
    manager.free([page])
    assert (manager.num_used, manager.num_cached) == (0, 1)


def test_eviction_drops_the_oldest_chain_and_its_tail_first() -> None:
    manager = PageManager(4, 16)
    cached(manager, 1, 2)
    cached(manager, 3, 4)
    manager.free(manager.match([key(1), key(2)]))  # touched: now younger than 3 and 4
    manager.drain_events()
    manager.allocate(3)
    assert manager.drain_events() == {key(4): False, key(3): False, key(2): False}
    assert manager.count_local([key(1)]) == 1


def test_second_page_of_the_same_block_stays_private() -> None:
    manager = PageManager(4, 16)
    first, second = manager.allocate(2)
    for page in (first, first, second):
        manager.publish([page], [key(1)])
    assert manager.page_of(key(1)) == first
    assert manager.drain_events() == {key(1): True}
    manager.free([first, second])
    assert (manager.num_free, manager.num_cached) == (3, 1)


def test_reserve_reuses_what_is_here_and_is_given_back_by_name() -> None:
    manager = PageManager(4, 16)
    present = cached(manager, 1, 2)
    reservation = manager.reserve("a", 3, [key(1), key(2)])
    assert reservation.pages[:2] == present
    assert reservation.num_present_blocks == 2
    with pytest.raises(AlreadyExists):
        manager.reserve("a", 1)
    with pytest.raises(NoSpace):
        manager.reserve("b", 4, [key(1)])
    manager.check_integrity({})
    manager.release("a")
    manager.release("a")
    assert (manager.num_free, manager.num_cached) == (2, 2)


def test_held_page_survives_its_sequence() -> None:
    manager = PageManager(2, 16)
    pages = cached(manager, 1)
    manager.hold("put", pages)
    with pytest.raises(NoSpace):
        manager.allocate(2)
    manager.release("put")
    assert len(manager.allocate(2)) == 2


def test_take_passes_the_references_on() -> None:
    manager = PageManager(2, 16)
    pages = manager.reserve("a", 2).pages
    assert manager.detach("a") == pages
    assert manager.detach("a") == []
    manager.check_integrity(Counter(pages))


def test_events_are_bounded_and_loss_is_counted() -> None:
    manager = PageManager(4, 16, max_events=2)
    cached(manager, 1, 2)
    assert manager.num_events_lost == 0
    cached(manager, 3)
    assert manager.num_events_lost == 3
    assert manager.drain_events() == {}
    silent = PageManager(4, 16, max_events=0)
    cached(silent, 1, 2, 3)
    assert (silent.num_events_lost, silent.drain_events()) == (0, {})
    assert sorted(manager.published_keys()) == [key(1), key(2), key(3)]


def test_drop_cached_leaves_pages_in_use_alone() -> None:
    manager = PageManager(4, 16)
    cached(manager, 1, 2)
    manager.match([key(1)])
    assert manager.drop_cached() == 1
    assert manager.count_local([key(1), key(2)]) == 1
    assert (manager.num_free, manager.num_used, manager.num_cached) == (3, 1, 0)


class Pages(RuleBasedStateMachine):
    """Random use by several owners; the books balance and the events retell what is published."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = PageManager(6, 16)
        self.owned: list[list[int]] = []
        self.told: set[bytes] = set()

    @rule(n=st.integers(0, 7))
    def allocate(self, n: int) -> None:
        if n > self.manager.num_available:
            with pytest.raises(NoSpace):
                self.manager.allocate(n)
        else:
            self.owned.append(self.manager.allocate(n))

    @rule(ns=st.lists(st.integers(0, 5), unique=True, max_size=4))
    def match(self, ns: list[int]) -> None:
        self.owned.append(self.manager.match([key(n) for n in ns]))

    @precondition(lambda self: any(self.owned))
    @rule(data=st.data(), n=st.integers(0, 5))
    def publish(self, data: st.DataObject, n: int) -> None:
        page = data.draw(st.sampled_from([p for pages in self.owned for p in pages]))
        if page not in [self.manager.page_of(key(m)) for m in range(6)]:
            self.manager.publish([page], [key(n)])

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.manager.free(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @rule(owner=st.sampled_from("ab"), n=st.integers(0, 3))
    def reserve_or_release(self, owner: str, n: int) -> None:
        if owner in self.manager.owned:
            self.manager.release(owner)
        elif n <= self.manager.num_available:
            self.manager.reserve(owner, n)

    @rule()
    def drop_cached(self) -> None:
        self.manager.drop_cached()

    @invariant()
    def balances(self) -> None:
        self.manager.check_integrity(Counter(p for pages in self.owned for p in pages))
        for which, added in self.manager.drain_events().items():
            (self.told.add if added else self.told.discard)(which)  # added and dropped since: dropped is all we hear
        assert self.told == set(self.manager.published_keys())


Pages.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPages = Pages.TestCase
