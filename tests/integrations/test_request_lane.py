"""The bounded queue before the LMCache plug-in's threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from moonpool.integrations.lmcache.request_lane import RequestLane


class Blocked:
    """A lane whose only thread is busy until release() is called."""

    def __init__(self, **bounds: int) -> None:
        self.lane = RequestLane("test", 1, **bounds)
        self._begun, self._go = threading.Event(), threading.Event()
        self.answers: list[tuple[str, bool]] = []
        assert self.lane.submit(self._block)
        assert self._begun.wait(30)

    def submit(self, name: str, nbytes: int = 0) -> bool:
        return self.lane.submit(lambda is_wanted: self.answers.append((name, is_wanted)), nbytes)

    def release(self) -> None:
        self._go.set()

    def _block(self, is_wanted: bool) -> None:
        self._begun.set()
        assert self._go.wait(30)


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    made = Blocked(max_requests=3, max_nbytes=100)
    yield made
    made.release()
    made.lane.close()


def test_more_requests_than_the_bound_are_refused(blocked: Blocked) -> None:
    assert [blocked.submit(name) for name in "abcd"] == [True, True, True, False]


def test_more_bytes_than_the_bound_are_refused_unless_alone(blocked: Blocked) -> None:
    assert blocked.submit("huge", 500)
    assert not blocked.submit("small", 1)


def test_bytes_of_done_requests_leave_room(blocked: Blocked) -> None:
    assert blocked.submit("a", 60)
    assert not blocked.submit("b", 60)
    blocked.release()
    done = threading.Event()
    while not blocked.lane.submit(lambda _: done.set(), 60):
        pass
    assert done.wait(30)
    assert blocked.answers == [("a", True)]


def test_close_gives_up_what_waits_and_waits_for_what_runs(blocked: Blocked) -> None:
    blocked.submit("a")
    blocked.submit("b")
    closing = threading.Thread(target=blocked.lane.close)
    closing.start()
    while len(blocked.answers) < 2:
        pass
    assert blocked.answers == [("a", False), ("b", False)]
    assert closing.is_alive()  # the running request holds it
    blocked.release()
    closing.join(30)
    assert not closing.is_alive()
    assert not blocked.submit("late")
