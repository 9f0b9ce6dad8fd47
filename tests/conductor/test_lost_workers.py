"""Whether requests wait for workers that are lost."""

from __future__ import annotations

from worker_info import info

from moonpool.base.cluster import WorkerRole
from moonpool.conductor.lost_workers import LostWorkers

FAR = "tcp:10.0.0.2:7900"
PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


def test_only_a_role_whose_workers_are_all_silent_is_not_waited_for() -> None:
    lost = LostWorkers()
    lost.lost(info("d0", address=FAR), 0.0, was_silent=True)
    assert lost.silent_role({PREFILL}, 0.0) is DECODE
    assert lost.silent_role({PREFILL, DECODE}, 0.0) is None, "others are there"
    lost.lost(info("d1", address=FAR), 1.0, was_silent=False)
    assert lost.silent_role({PREFILL}, 2.0) is None, "one is started again"
    assert lost.silent_role({PREFILL}, 40.0) is DECODE, "it was not"
    lost.came("d0")
    assert lost.silent_role({PREFILL}, 40.0) is None
    lost.lost(info("p0", address=FAR), 50.0, was_silent=True)
    assert lost.silent_role((), 50.0) is PREFILL


def test_a_process_of_this_machine_that_hangs_is_waited_for() -> None:
    lost = LostWorkers()
    lost.lost(info("d0"), 0.0, was_silent=True)
    assert lost.silent_role({PREFILL}, 1.0) is None
