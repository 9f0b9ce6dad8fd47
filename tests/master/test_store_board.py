"""The board forgets the dead, keeps the newest, and is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import AlreadyExists, InvalidInput, Overloaded
from moonpool.master.board import SegmentBoard


def segment(name: str, incarnation: int = 1) -> SegmentDescriptor:
    return SegmentDescriptor(name=name, nbytes=1, incarnation=incarnation, host="h", endpoints=())


def test_what_is_not_renewed_is_forgotten() -> None:
    board = SegmentBoard()
    board.announce(segment("a"), 10.0, now_s=0.0)
    board.announce(segment("b"), 10.0, now_s=0.0)
    board.announce(segment("a"), 10.0, now_s=8.0)
    assert board.find("a", 12.0) == segment("a")
    assert board.find("b", 12.0) is None
    board.announce(segment("b", incarnation=0), 10.0, now_s=12.0)  # an older one may come when the newer is forgotten
    board.expire(100.0)
    assert len(board) == 0


def test_it_is_bounded_by_what_is_alive() -> None:
    board = SegmentBoard(max_announcements=2)
    board.announce(segment("a"), 1.0, now_s=0.0)
    board.announce(segment("b"), 5.0, now_s=0.0)
    with pytest.raises(Overloaded):
        board.announce(segment("c"), 5.0, now_s=0.5)
    board.announce(segment("b"), 5.0, now_s=0.5)
    board.announce(segment("c"), 5.0, now_s=1.0)
    for ttl_s in (0.0, -1.0, 1e9, float("nan")):
        with pytest.raises(InvalidInput):
            board.announce(segment("c"), ttl_s, now_s=1.0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["announce", "retract"]), st.sampled_from("ab"), st.integers(1, 4), st.integers(0, 9))
    )
)
def test_the_newest_living_incarnation_is_found(steps: list[tuple[str, str, int, int]]) -> None:
    board, now_s = SegmentBoard(), 0.0
    living: dict[str, tuple[int, float]] = {}
    for act, name, incarnation, pause_s in steps:
        now_s += pause_s
        held = living.get(name)
        held = held if held is not None and now_s < held[1] else None
        if act == "retract":
            board.retract(name, incarnation)
            if held is not None and held[0] == incarnation:
                held = None
        elif held is not None and held[0] > incarnation:
            with pytest.raises(AlreadyExists):
                board.announce(segment(name, incarnation), 10.0, now_s)
        else:
            board.announce(segment(name, incarnation), 10.0, now_s)
            held = (incarnation, now_s + 10.0)
        living[name] = held or (0, 0.0)
        found = board.find(name, now_s)
        assert (found.incarnation if found is not None else None) == (held[0] if held is not None else None)
