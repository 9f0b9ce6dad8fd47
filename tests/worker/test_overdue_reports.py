"""A worker that reports seldom says at once that its engine is overdue, and that it goes on."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from waiting import until
from worker_info import info

from moonpool.base.cluster import ReportWorker, WorkerLoad
from moonpool.conductor.service import Conductor, ConductorConfig
from moonpool.worker.reporter import WorkerReporter


class Engine:
    is_overdue = False

    async def report(self, sequence: int) -> ReportWorker:
        step_s = 4.0 if self.is_overdue else 0.0
        load = WorkerLoad(free_pages=9)
        return ReportWorker(name="p0", incarnation=1, sequence=sequence, load=load, step_s=step_s, step_due_s=3.0)


async def test_a_change_does_not_wait_for_the_next_report(tmp_path: Path) -> None:
    conductor, engine = Conductor(ConductorConfig(address=f"unix:{tmp_path}/c.sock")), Engine()
    address = await conductor.start()
    reporter = WorkerReporter(
        address,
        lambda: info("p0", report_every_s=600.0),
        engine.report,
        must_start_over=lambda: False,
        interval_s=600.0,
        on_assigned=lambda assigned: None,
        is_overdue=lambda: engine.is_overdue,
    )
    running = asyncio.create_task(reporter.run())
    try:
        await reporter.registered.wait()
        assert conductor.state.late == frozenset()
        for is_overdue in (True, False):
            engine.is_overdue = is_overdue
            await until(lambda: bool(conductor.state.late) == is_overdue, "the conductor knows")  # noqa: B023
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await conductor.close()
