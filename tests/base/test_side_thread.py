"""A thread that begins and ends without its starter."""

from __future__ import annotations

import os
import threading
from os import _exit

import pytest
from late_threads import no_thread_begins
from waiting import HANG_S

from moonpool.base.side_thread import SideThread


def waiting_for(end: threading.Event) -> SideThread:
    def act() -> None:
        end.wait(HANG_S)

    return SideThread(act, "aside")


def test_it_runs_under_its_name_and_ends() -> None:
    names: list[str] = []
    thread = SideThread(lambda: names.append(threading.current_thread().name), "aside")
    thread.join(HANG_S)
    assert names == ["aside"]
    assert not thread.is_alive()
    assert "aside" not in {each.name for each in threading.enumerate()}


def test_its_starter_does_not_wait_and_it_counts_as_alive() -> None:
    ran = threading.Event()
    with no_thread_begins() as free:
        thread = SideThread(ran.set, "aside")
        assert thread.is_alive()
        assert not ran.is_set()
        free.set()
        thread.join(HANG_S)
    assert ran.is_set()


def test_join_waits_no_longer_than_asked() -> None:
    end = threading.Event()
    thread = waiting_for(end)
    thread.join(0.01)
    assert thread.is_alive()
    end.set()
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_a_fork_has_no_such_thread() -> None:
    end = threading.Event()
    thread = waiting_for(end)
    child = os.fork()
    if child == 0:
        thread.join(HANG_S)  # returns at once
        _exit(1 if thread.is_alive() else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert thread.is_alive()
    end.set()
    thread.join(HANG_S)


def test_one_that_cannot_start_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ran = threading.Event()
    thread = SideThread(ran.set, "aside")
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert not ran.is_set()
