"""Which page of the worker's KV memory belongs to whom. Pure: it counts pages, it never touches their bytes.

A page is in exactly one of three states:

    free      nobody refers to it and it holds nothing worth keeping
    used      referred to by one or more sequences or holders
    cached    nobody refers to it, but it holds a published block that the next prompt may reuse

A published page is never written again until it is taken from the cache (least recently used first) for
another use. Publishing and dropping are told to whoever drains the events; `published_keys()` is the whole
truth for one who missed some.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moonpool.base.errors import AlreadyExists, NoSpace

MAX_EVENTS = 65_536


@dataclass(frozen=True, slots=True)
class PageGrant:
    """Pages for KV to come; the first `num_present_blocks` of them hold the right KV already."""

    pages: list[int]
    num_present_blocks: int


class PageManager:
    """All pages of one worker. Every call either happens entirely or raises and changes nothing."""

    def __init__(self, num_pages: int, block_tokens: int, max_events: int = MAX_EVENTS) -> None:
        """With `max_events` 0 nobody wants to hear of any, and none is kept or counted."""
        assert num_pages > 0, "an engine needs pages"
        assert block_tokens > 0, "a block holds tokens"
        self.num_pages = num_pages
        self.block_tokens = block_tokens
        self.num_events_lost = 0
        self._free = deque(range(num_pages))
        self._references = [0] * num_pages
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._holders: dict[str, list[int]] = {}
        self._max_events = max_events
        self._events: dict[bytes, bool] = {}

    # -- counts ------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """How many pages `allocate` could give now."""
        return self.num_free + self.num_cached

    # -- references --------------------------------------------------------------------------------------

    def allocate(self, num_pages: int) -> list[int]:
        """Pages with one reference each and no content; drops cached blocks when it must. NoSpace: none given."""
        if num_pages > self.num_available:
            raise NoSpace(f"{num_pages} pages wanted, {self.num_available} of {self.num_pages} available")
        free, references = self._free, self._references
        num_free = min(num_pages, len(free))
        pages = [free.popleft() for _ in range(num_free)]
        if num_free < num_pages:
            pages += self._evict(num_pages - num_free)
        for page in pages:
            references[page] = 1
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Gives back one reference per page; a published page stays reusable.

        The last block of a chain is of no use without the first, so it goes into the cache first and leaves
        it first.
        """
        references, key_of, cached, free = self._references, self._key_of, self._cached, self._free
        for page in reversed(pages):
            count = references[page]
            assert count > 0, f"page {page} is freed once too often"
            references[page] = count - 1
            if count > 1:
                continue
            if page in key_of:
                cached[page] = None
            else:
                free.append(page)

    def count_local(self, keys: Sequence[bytes]) -> int:
        """How many leading keys `match` would find now; changes nothing."""
        count, page_of = 0, self._page_of
        for key in keys:
            if key not in page_of:
                break
            count += 1
        return count

    def page_of(self, key: bytes) -> int | None:
        """Where a published block lies now."""
        return self._page_of.get(key)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the leading run of published blocks, each with one more reference."""
        pages = [self._page_of[key] for key in keys[: self.count_local(keys)]]
        for page in pages:
            self._refer(page)
        return pages

    def publish(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        """Makes used pages, complete and verified, reusable under these keys; not where another page has the key."""
        page_of, key_of, references, added = self._page_of, self._key_of, self._references, []
        for page, key in zip(pages, keys, strict=True):
            assert references[page] > 0, f"page {page} is published by nobody who uses it"
            if page_of.setdefault(key, page) != page:
                continue
            if page in key_of:
                assert key_of[page] == key, f"page {page} is published under another key already"
            else:
                key_of[page] = key
                added.append(key)
        self._tell(added, True)

    # -- holders: pages in somebody's hands who is not a sequence ------------------------------------------

    def reserve(self, owner: str, num_pages: int, keys: Sequence[bytes] = ()) -> PageGrant:
        """Pages under a name, for KV that will arrive from elsewhere. NoSpace, AlreadyExists: none given.

        The leading run of `keys` that is published here is reused; its pages must not be written.
        """
        if owner in self._holders:
            raise AlreadyExists(f"{owner} holds pages already")
        present = self.match(keys[:num_pages])
        try:
            fresh = self.allocate(num_pages - len(present))
        except NoSpace:
            self.free(present)
            raise
        self._holders[owner] = [*present, *fresh]
        return PageGrant(pages=[*present, *fresh], num_present_blocks=len(present))

    def hold(self, owner: str, pages: Iterable[int]) -> None:
        """One more reference to pages in use or cached, under a name: their bytes stay while somebody copies
        them. Repeated calls add up."""
        held = self._holders.setdefault(owner, [])
        for page in pages:
            assert self._references[page] > 0 or page in self._cached, f"page {page} is free"
            self._refer(page)
            held.append(page)

    def take(self, owner: str) -> list[int]:
        """Hands the owner's references over to the caller; empty when there are none."""
        return self._holders.pop(owner, [])

    def release(self, owner: str) -> None:
        """Gives back what the owner holds; idempotent."""
        self.free(self.take(owner))

    def holders(self) -> Mapping[str, Sequence[int]]:
        return self._holders

    # -- the cache -----------------------------------------------------------------------------------------

    def drop_cached(self) -> int:
        """Forgets every cached block that nobody uses; the number of pages that became free."""
        count = len(self._cached)
        self._free.extend(self._evict(count))
        return count

    def published_keys(self) -> list[bytes]:
        return list(self._page_of)

    def drain_events(self) -> dict[bytes, bool]:
        """The last word on each key: True when the block became reusable here, False when it was dropped.

        Bounded: when nobody drains, events are lost and counted in `num_events_lost`.
        """
        events, self._events = self._events, {}
        return events

    # -- inside --------------------------------------------------------------------------------------------

    def _refer(self, page: int) -> None:
        self._cached.pop(page, None)
        self._references[page] += 1

    def _evict(self, num_pages: int) -> list[int]:
        cached, key_of, page_of = self._cached, self._key_of, self._page_of
        pages = [cached.popitem(last=False)[0] for _ in range(num_pages)]
        keys = [key_of.pop(page) for page in pages]
        for key in keys:
            del page_of[key]
        self._tell(keys, False)
        return pages

    def _tell(self, keys: Sequence[bytes], is_there: bool) -> None:
        if not self._max_events:
            return
        self._events.update(dict.fromkeys(keys, is_there))
        if len(self._events) > self._max_events:
            self.num_events_lost += len(self._events)
            self._events = {}

    def check_integrity(self, references: Mapping[int, int] | None = None) -> None:
        """Asserts that the books balance; `references` are those that others (sequences) know to have."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached, "a page is free and cached"
        for page, count in enumerate(self._references):
            assert (count == 0) == (page in free or page in cached), f"page {page}: {count} references"
        assert {page: key for key, page in self._page_of.items()} == self._key_of, "keys and pages disagree"
        assert cached <= set(self._key_of), "a cached page holds no block"
        assert not free & set(self._key_of), "a free page is published"
        assert self.num_free + self.num_used + self.num_cached == self.num_pages
        if references is not None:
            known = Counter(references) + Counter(p for pages in self._holders.values() for p in pages)
            counted = {page: count for page, count in enumerate(self._references) if count}
            assert counted == dict(known), f"references {counted}, known {dict(known)}"
