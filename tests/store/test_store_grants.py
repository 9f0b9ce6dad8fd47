"""Which puts a client has in its hands, and up to where it can say that it has none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.store.client.grants import Grants


def test_nothing_is_let_go_that_may_still_be_granted() -> None:
    grants = Grants()
    slow, settled = grants.ask()
    assert settled == 0
    quick, _ = grants.ask()
    grants.take_up([7, 0, 8], 9)
    grants.end_ask(quick)
    grants.let_go([7, 8])
    assert grants.ask()[1] == 0, "the slow call may have been granted anything above what was known before it"
    grants.take_up([5], 9)
    grants.end_ask(slow)
    grants.let_go([5])


def test_what_was_lost_is_let_go_when_the_others_are_ended() -> None:
    grants = Grants()
    began, _ = grants.ask()
    grants.take_up([3], 3)
    grants.end_ask(began)
    lost, settled = grants.ask()
    assert settled == 2, "3 is in our hands"
    grants.doubt()
    grants.end_ask(lost)  # 4 was granted, and we never heard
    assert grants.take_doubt()
    assert not grants.take_doubt()
    grants.let_go([3])
    began, settled = grants.ask()
    assert settled == 3
    grants.take_up([0], 4)  # refused, but now we know that there was a 4
    grants.end_ask(began)
    assert grants.ask()[1] == 4


@given(st.lists(st.tuples(st.sampled_from(["ask", "answer", "lose", "end"]), st.integers(0, 3)), max_size=40))
def test_it_never_says_that_it_has_let_go_of_what_it_holds(steps: list[tuple[str, int]]) -> None:
    grants, last = Grants(), 0
    asking: list[int] = []
    held: list[int] = []
    for what, pick in steps:
        if what == "ask":
            began, settled = grants.ask()
            assert all(settled < each for each in held)
            assert all(settled <= each for each in asking), "what they are granted is above"
            asking.append(began)
        elif what in ("answer", "lose") and asking:
            began = asking.pop(pick % len(asking))
            last += 1
            if what == "answer":
                grants.take_up([last], last)
                held.append(last)
            grants.end_ask(began)
        elif what == "end" and held:
            grants.let_go([held.pop(pick % len(held))])
