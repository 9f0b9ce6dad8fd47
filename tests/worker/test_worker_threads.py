"""A worker's threads: as told, else its part of the cores, counted again while others come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
import torch
from waiting import HANG_S

from moonpool.base.limits import CorePresence
from moonpool.worker.build import choose_threads, follow_share


class Shares(CorePresence):
    """Says what a test tells it."""

    def __init__(self, *shares: int) -> None:
        self._shares = list(shares)

    def num_workers(self) -> int:
        return 2

    def num_threads(self) -> int:
        return self._shares.pop(0) if len(self._shares) > 1 else self._shares[0]


def test_what_it_was_told_counts_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_threads(5, Shares(2)) == 5
        assert choose_threads(None, Shares(2)) == 2
    assert "computes with 2 CPU threads; 2 workers share" in caplog.text


async def test_the_engine_hears_of_a_new_share_once(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[int] = []
    posted: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
    monkeypatch.setattr(torch, "set_num_threads", applied.append)
    task = asyncio.create_task(follow_share(4, Shares(4, 4, 2, 2, 1), posted.put_nowait, every_s=0.0))
    try:
        for _ in range(2):
            (await asyncio.wait_for(posted.get(), HANG_S))()
        await asyncio.sleep(0.01)
    finally:
        task.cancel()
    assert applied == [2, 1]
    assert posted.empty()
