"""Segments that cannot be read are probed in the background, and no reader waits for that."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from late_threads import no_thread_begins
from waiting import wait_until

from moonpool.base.errors import Unavailable
from moonpool.store.client.directory import UnreadableSegments
from moonpool.store.messages import Placement

PLACE = Placement(segment="n0.dram", offset=0, incarnation=1, generation=1)


@pytest.fixture
def probed() -> threading.Event:
    return threading.Event()


@pytest.fixture
def unreadable(probed: threading.Event) -> Iterator[UnreadableSegments]:
    """Every segment can be read again when it is probed."""

    def is_resolved(place: Placement) -> bool:
        assert place == PLACE
        probed.set()
        return True

    made = UnreadableSegments(is_resolved)
    yield made
    made.close()
    wait_until(lambda: "store-segments" not in {each.name for each in threading.enumerate()}, "the prober ends")


def test_a_reader_does_not_wait_for_the_probing_thread(unreadable: UnreadableSegments, probed: threading.Event) -> None:
    with no_thread_begins() as free:
        unreadable.add(PLACE, Unavailable("it is away"))
        assert unreadable.failure(PLACE.segment, PLACE.incarnation) is not None
        assert not probed.is_set()
        free.set()
        wait_until(lambda: not unreadable.listed, "the segment can be read again")
    assert probed.is_set()
    assert unreadable.failure(PLACE.segment, PLACE.incarnation) is None


def test_a_second_outage_is_probed_too(unreadable: UnreadableSegments, probed: threading.Event) -> None:
    for _ in range(2):
        probed.clear()
        unreadable.add(PLACE, Unavailable("it is away"))
        wait_until(lambda: not unreadable.listed, "the segment can be read again")
        assert probed.is_set()
