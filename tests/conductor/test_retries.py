"""Whose fault a lost attempt was decides what it costs."""

from __future__ import annotations

from moonpool.conductor.retries import Loss, Retries, RetryPolicy


def begun(policy: RetryPolicy | None = None) -> Retries:
    retries = Retries(policy or RetryPolicy())
    retries.begin()
    return retries


def is_alone(retries: Retries) -> bool:
    """A call, because it changes between two looks."""
    return retries.alone


def test_attempts_that_others_lose_cost_nothing() -> None:
    retries = begun()
    for number in range(200):
        if number % 10 == 9:
            retries.lost(["w0"], Loss.DIED)
            retries.survived()
        pause_s = retries.lost([f"w{number % 2}"], Loss.ABSENT)
        assert pause_s is not None
        assert 0 < pause_s <= RetryPolicy.max_backoff_s
        assert not is_alone(retries)
        retries.begin()


def test_workers_that_nobody_here_can_reach_are_given_up_in_the_end() -> None:
    retries = begun()
    for _ in range(RetryPolicy.max_absences - 1):
        assert retries.lost(["w0"], Loss.ABSENT) is not None
    assert retries.lost(["w0"], Loss.ABSENT) is None
    assert not retries.is_fatal


def test_living_workers_may_fail_it_only_so_often() -> None:
    retries = begun(RetryPolicy(max_attempts=3))
    assert retries.lost(["w0"], Loss.REFUSED) == 0.1
    assert retries.lost(["w1"], Loss.ABSENT) is not None
    assert retries.lost(["w1"], Loss.REFUSED) is not None
    assert retries.lost(["w0"], Loss.REFUSED) is None
    assert not retries.is_fatal
    assert retries.failed == {"w0", "w1"}


def test_a_front_end_that_is_cut_off_does_not_wait() -> None:
    for has_tokens in (False, True):
        retries = begun()
        assert retries.refused(0.0, for_load=False, has_tokens=has_tokens) is not None, "workers may start again"
        assert retries.refused(0.0, for_load=False, has_tokens=has_tokens, is_cut_off=True) is None


def test_after_two_deaths_it_runs_alone_and_a_third_gives_it_up() -> None:
    retries = begun()
    assert retries.lost(["w0"], Loss.DIED) is not None
    assert not is_alone(retries)
    assert retries.lost(["w1"], Loss.DIED) is not None
    assert is_alone(retries)
    assert retries.lost(["w0"], Loss.ABSENT) is not None, "it was not computed there"
    assert is_alone(retries)
    assert retries.lost(["w0"], Loss.DIED) is None
    assert retries.is_fatal


def test_one_that_was_computed_alone_and_lives_is_no_suspect_any_more() -> None:
    retries = begun()
    for _ in range(50):
        retries.lost(["w0"], Loss.DIED)
        retries.lost(["w1"], Loss.DIED)
        assert is_alone(retries)
        retries.survived()
        assert not is_alone(retries)
        assert retries.lost(["w2"], Loss.DIED) is not None
        retries.survived()
    assert not retries.is_fatal
