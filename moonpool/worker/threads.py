"""How many CPU threads a worker computes with: as many as it was told, else its part of the machine's cores.

A worker that was started by hand is not told how many others share its machine, and others may start later. So its
part is counted again every few seconds, and a change is applied between two steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import torch

from moonpool.base.limits import CorePresence, available_cores

_LOG = logging.getLogger(__name__)
_COUNT_EVERY_S = 2.0


def choose_threads(told: int | None, presence: CorePresence) -> int:
    """Return the number of threads to start with, and log it beside the number of cores."""
    threads = told if told is not None else presence.num_threads()
    _LOG.info(
        "computes with %d CPU threads; %d workers share %d cores here (--threads sets it)",
        threads,
        presence.num_workers(),
        available_cores(),
    )
    return threads


async def follow_share(
    threads: int,
    presence: CorePresence,
    post: Callable[[Callable[[], None]], None],
    every_s: float = _COUNT_EVERY_S,
) -> None:
    """Keep the engine's number of threads at this worker's part of the cores. Runs until it is cancelled.

    `post` runs a function on the engine's thread: torch keeps the number per thread.
    """
    while True:
        await asyncio.sleep(every_s)
        share = presence.num_threads()
        if share != threads:
            _LOG.info("%d workers share the cores now: %d CPU threads", presence.num_workers(), share)
            post(lambda number=share: torch.set_num_threads(number))  # type: ignore[misc]
            threads = share
