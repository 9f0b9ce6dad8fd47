"""Which puts a client has in its hands, and up to where it can say that it has none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.store.client.put_calls import Grants


def test_nothing_is_discard_that_may_still_be_granted() -> None:
    grants = Grants()
    slow, settled = grants.begin_call()
    assert settled == 0
    quick, _ = grants.begin_call()
    grants.add([7, 0, 8], 9)
    grants.end_call(quick)
    grants.discard([7, 8])
    assert grants.begin_call()[1] == 0, "the slow call may have been granted anything above what was known before it"
    grants.add([5], 9)
    grants.end_call(slow)
    grants.discard([5])


def test_what_was_lost_is_discard_when_the_others_are_ended() -> None:
    grants = Grants()
    began, _ = grants.begin_call()
    grants.add([3], 3)
    grants.end_call(began)
    lost, settled = grants.begin_call()
    assert settled == 2, "3 is in our hands"
    grants.end_call(lost)  # 4 was granted, and we never heard
    grants.discard([3])
    began, settled = grants.begin_call()
    assert settled == 3
    grants.add([0], 4)  # refused, but now we know that there was a 4
    grants.end_call(began)
    assert grants.begin_call()[1] == 4


@given(st.lists(st.tuples(st.sampled_from(["ask", "answer", "lose", "end"]), st.integers(0, 3)), max_size=40))
def test_it_never_says_that_it_has_discard_of_what_it_holds(steps: list[tuple[str, int]]) -> None:
    grants, last = Grants(), 0
    asking: list[int] = []
    held: list[int] = []
    for what, pick in steps:
        if what == "ask":
            began, settled = grants.begin_call()
            assert all(settled < each for each in held)
            assert all(settled <= each for each in asking), "what they are granted is above"
            asking.append(began)
        elif what in ("answer", "lose") and asking:
            began = asking.pop(pick % len(asking))
            last += 1
            if what == "answer":
                grants.add([last], last)
                held.append(last)
            grants.end_call(began)
        elif what == "end" and held:
            grants.discard([held.pop(pick % len(held))])
