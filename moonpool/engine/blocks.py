"""Tracks the pages of a worker's KV memory: references, published blocks, the cache. Pure: it never touches their
bytes.

A page is in exactly one of three states:

    free      no reference, no reusable content
    used      referenced by one or more sequences or owners
    cached    no reference, but it holds a published block that a later prompt may reuse

A published page is not written again until it is evicted from the cache (least recently used first). `drain_events()`
returns which blocks were published and dropped; a caller that missed events reads `published_keys()`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moonpool.base.errors import AlreadyExists, NoSpace

MAX_EVENTS = 65_536


@dataclass(frozen=True, slots=True)
class PageGrant:
    """Pages for KV that will arrive; the first `num_present_blocks` of them hold their KV already."""

    pages: list[int]
    num_present_blocks: int


class PageManager:
    """All pages of one worker. A call that raises changes nothing."""

    def __init__(self, num_pages: int, block_tokens: int, max_events: int = MAX_EVENTS) -> None:
        """With `max_events` 0 no events are kept or counted."""
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
        self.owned: dict[str, list[int]] = {}  # pages by owner; for reading
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
        """How many pages `allocate` could return now."""
        return self.num_free + self.num_cached

    # -- references --------------------------------------------------------------------------------------

    def allocate(self, num_pages: int) -> list[int]:
        """Return pages with one reference each, whose content is undefined; evict cached blocks if necessary. Raise
        NoSpace if there are too few pages."""
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
        """Release one reference per page; a published page stays reusable.

        The last block of a chain is useless without the first, so it enters the cache first and is evicted first.
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
        """Return how many leading keys `match` would find now; nothing changes."""
        count, page_of = 0, self._page_of
        for key in keys:
            if key not in page_of:
                break
            count += 1
        return count

    def page_of(self, key: bytes) -> int | None:
        """Return the page of a published block, or None."""
        return self._page_of.get(key)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Return the pages of the leading run of published blocks, each with one more reference."""
        pages = [self._page_of[key] for key in keys[: self.count_local(keys)]]
        for page in pages:
            self._refer(page)
        return pages

    def publish(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        """Make used pages, complete and verified, reusable under these keys; skip keys that another page has."""
        page_of, key_of, references, added = self._page_of, self._key_of, self._references, []
        for page, key in zip(pages, keys, strict=True):
            assert references[page] > 0, f"page {page} is published without a reference"
            if page_of.setdefault(key, page) != page:
                continue
            if page in key_of:
                assert key_of[page] == key, f"page {page} is published under another key already"
            else:
                key_of[page] = key
                added.append(key)
        self._record_events(added, True)

    # -- owners: references that do not belong to a sequence -----------------------------------------------

    def reserve(self, owner: str, num_pages: int, keys: Sequence[bytes] = ()) -> PageGrant:
        """Allocate pages for `owner`, for KV that will arrive from another process. Raise NoSpace or AlreadyExists.

        The leading run of `keys` that is published here is reused; its pages must not be written.
        """
        if owner in self.owned:
            raise AlreadyExists(f"{owner} holds pages already")
        present = self.match(keys[:num_pages])
        try:
            fresh = self.allocate(num_pages - len(present))
        except NoSpace:
            self.free(present)
            raise
        self.owned[owner] = [*present, *fresh]
        return PageGrant(pages=[*present, *fresh], num_present_blocks=len(present))

    def hold(self, owner: str, pages: Iterable[int]) -> None:
        """Add a reference of `owner` to pages in use or cached, so that their bytes stay while they are copied.
        Repeated calls add up."""
        held = self.owned.setdefault(owner, [])
        for page in pages:
            assert self._references[page] > 0 or page in self._cached, f"page {page} is free"
            self._refer(page)
            held.append(page)

    def share(self, owner: str) -> list[int]:
        """Return the owner's pages, each with one more reference, which is the caller's."""
        for page in self.owned[owner]:
            self._refer(page)
        return list(self.owned[owner])

    def detach(self, owner: str) -> list[int]:
        """Return the owner's pages; the caller becomes the owner of their references. Empty if there are none."""
        return self.owned.pop(owner, [])

    def release(self, owner: str) -> None:
        """Release the owner's references; idempotent."""
        self.free(self.detach(owner))

    # -- the cache -----------------------------------------------------------------------------------------

    def drop_cached(self) -> int:
        """Evict every cached block. Return the number of pages that became free."""
        count = len(self._cached)
        self._free.extend(self._evict(count))
        return count

    def published_keys(self) -> list[bytes]:
        return list(self._page_of)

    def drain_events(self) -> dict[bytes, bool]:
        """Return the last event of each key since the last call: True if the block became reusable here, False if it
        was dropped. Bounded: if no caller drains them, events are lost and counted in `num_events_lost`."""
        events, self._events = self._events, {}
        return events

    # -- internals -----------------------------------------------------------------------------------------

    def _refer(self, page: int) -> None:
        self._cached.pop(page, None)
        self._references[page] += 1

    def _evict(self, num_pages: int) -> list[int]:
        cached, key_of, page_of = self._cached, self._key_of, self._page_of
        pages = [cached.popitem(last=False)[0] for _ in range(num_pages)]
        keys = [key_of.pop(page) for page in pages]
        for key in keys:
            del page_of[key]
        self._record_events(keys, False)
        return pages

    def _record_events(self, keys: Sequence[bytes], is_there: bool) -> None:
        if not self._max_events:
            return
        self._events.update(dict.fromkeys(keys, is_there))
        if len(self._events) > self._max_events:
            self.num_events_lost += len(self._events)
            self._events = {}

    def check_integrity(self, references: Mapping[int, int] | None = None) -> None:
        """Assert that all counts agree; `references` are those of sequences."""
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
            known = Counter(references) + Counter(p for pages in self.owned.values() for p in pages)
            counted = {page: count for page, count in enumerate(self._references) if count}
            assert counted == dict(known), f"references {counted}, known {dict(known)}"
