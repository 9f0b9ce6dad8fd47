"""helpers/kill_storm.py: which lost answers a kill excuses."""

from __future__ import annotations

import pytest
from kill_storm import Kill, Storm
from stream_clients import SeenAnswer

KILL = Kill("frontend", 7, 0.0, stopped_s=10.0, gone_s=11.0, ports=frozenset({500}))
REFUSED, RESET = "connection: ConnectionRefusedError", "connection: ConnectionResetError"


def lost(began_s: float, ended_s: float, port: int) -> SeenAnswer:
    return SeenAnswer(0, began_s, connected_s=began_s, port=port, ended_s=ended_s, error=RESET)


def refused(at_s: float) -> SeenAnswer:
    return SeenAnswer(0, at_s, ended_s=at_s, error=REFUSED)


def served(began_s: float) -> SeenAnswer:
    return SeenAnswer(0, began_s, connected_s=began_s, port=1, ended_s=began_s + 1.0, text="right")


def unexcused(*answers: SeenAnswer, kills: tuple[Kill, ...] = (KILL,)) -> list[SeenAnswer]:
    return Storm(["right"], list(answers), list(kills)).unexcused()


def test_what_the_killed_front_end_had_is_excused() -> None:
    assert unexcused(lost(9.0, 11.0, 500)) == []
    assert unexcused(lost(10.5, 11.0, 501)) == [], "it connected while the front end was stopped"


@pytest.mark.parametrize("answer", [lost(9.0, 11.0, 501), lost(8.0, 9.5, 500), lost(11.5, 12.0, 500)])
def test_what_another_front_end_had_or_had_then_is_not(answer: SeenAnswer) -> None:
    assert unexcused(answer) == [answer]


def test_no_other_role_excuses_anything() -> None:
    kill = Kill("decode-0", 7, 0.0, stopped_s=10.0, gone_s=11.0, ports=frozenset({500}))
    assert unexcused(lost(9.0, 11.0, 500), refused(11.5), kills=(kill,)) == [lost(9.0, 11.0, 500), refused(11.5)]


def test_a_refusal_is_excused_until_the_next_front_end_listens() -> None:
    in_its_queue = lost(10.5, 11.0, 501)
    assert unexcused(served(8.0), in_its_queue, refused(11.5), refused(14.0), served(15.0)) == []
    assert unexcused(served(12.0), refused(14.0)) == [refused(14.0)]
    assert unexcused(refused(9.0), served(12.0)) == [refused(9.0)]
