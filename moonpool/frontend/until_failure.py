"""Runs work in the caller's own task and ends it early if something else fails meanwhile.

A task for the work and one for the other, with a wait for both, would do the same and take more time than most steps of
a short request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def until_failure(work: Coroutine[Any, Any, _T], other: asyncio.Future[Any]) -> _T:
    """Return the result of the work. If `other` fails first, cancel the work and raise what `other` raised.

    `other` goes on when this returns. A cancellation of the caller cancels the work.
    """
    caller = asyncio.current_task()
    assert caller is not None
    is_over = is_cancelled = False

    def cancel_work(failed: asyncio.Future[Any]) -> None:
        nonlocal is_cancelled
        # A future that is done calls its callbacks later: the work may have ended since.
        if not is_over and (failed.cancelled() or failed.exception() is not None):
            is_cancelled = caller.cancel()

    other.add_done_callback(cancel_work)
    try:
        return await work
    except asyncio.CancelledError:
        if is_cancelled:
            is_cancelled = False
            if not caller.uncancel():  # no other task has cancelled it
                other.result()
        raise
    finally:
        is_over = True
        other.remove_done_callback(cancel_work)
        if is_cancelled:  # and the work ended with something else than that cancellation
            caller.uncancel()
