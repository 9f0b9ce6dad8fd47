"""`moonpool drain WORKER|NODE`: empty a worker or a node, so that it can be stopped without loss.

A worker takes no new requests. It ends those that it has, or lets its answers go on at other decode workers; then its
process ends, and a launcher does not start it again (`moonpool scale` does). A node takes no new objects, and its
objects move to the other nodes; those for which they have no room stay on SSD. It then waits to be stopped; started
again, it takes new objects.
"""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from moonpool.base.cluster import WORKER_SERVICE, WorkerInfo
from moonpool.base.config import nearest
from moonpool.base.errors import InvalidInput, NotFound, Unavailable
from moonpool.base.rpc import BlockingClient
from moonpool.base.units import format_nbytes
from moonpool.cli.pool import (
    CONDUCTOR_VARIABLE,
    ConductorOption,
    MasterOption,
    ask_conductor,
    change_workers,
    conductor_address,
    master_address,
    pool,
)
from moonpool.cli.waiting import BoundedWait
from moonpool.conductor.messages import DrainWorker, Status
from moonpool.store import Store
from moonpool.store.messages import SegmentStats, TaskInfo, Tier
from moonpool.worker.messages import GetStats

_SAY_EVERY_S = 2.0


def command(
    name: Annotated[str, typer.Argument(metavar="WORKER|NODE", help="its name, as `moonpool stat` lists it")],
    wait: Annotated[bool, typer.Option(help="wait until it is empty")] = True,
    timeout: Annotated[float, typer.Option(help="seconds to wait at most; the drain goes on after them")] = 120.0,
    force: Annotated[
        bool, typer.Option("--force", help="drain the last worker of its role, or the last node, too")
    ] = False,
    master: MasterOption = None,
    conductor: ConductorOption = None,
) -> None:
    address = master_address(master)
    conductor = conductor_address(conductor, address)
    workers = [] if conductor is None else _workers(conductor)
    progress = BoundedWait(timeout, _SAY_EVERY_S, unmet=f"{name} is not empty", goes_on="the drain", prefix=f"{name}: ")
    worker = next((info for info in workers if info.name == name), None)
    if worker is not None and conductor is not None:
        _tell_worker(worker, conductor, progress, force)
        _follow_worker(worker, conductor, progress if wait else None)
        return
    with pool(address) as store:
        segments = [each for each in store.stats().segments if each.tier & Tier.DRAM]
        known = [*(info.name for info in workers), *(each.node for each in segments)]
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            unasked = "" if conductor else f" (for a worker, name the conductor: --conductor or {CONDUCTOR_VARIABLE})"
            raise NotFound(
                f"no worker and no node is called {name!r}; there are: {listed}{nearest(name, known)}{unasked}"
            )
        _drain_node(store, name, segments, progress if wait else None, force)


def _workers(conductor: str) -> list[WorkerInfo]:
    """Return all workers, those that drain included."""
    status = ask_conductor(conductor, Status())
    return [*(each.info for each in status.workers), *status.leaving]


def _tell_worker(worker: WorkerInfo, conductor: str, progress: BoundedWait, force: bool) -> None:
    """Return when the worker knows that it drains. It hears of it within about a second; a conductor that ends before
    that has passed on nothing, and the next one is told again."""
    while _is_registered(worker, conductor):
        try:
            change_workers(conductor, DrainWorker(worker=worker.name, force=force))
        except NotFound:  # it has left since its registration was seen
            return
        progress.pause("it does not know yet that it drains")


def _follow_worker(worker: WorkerInfo, conductor: str, progress: BoundedWait | None) -> None:
    """Wait until the worker's process has ended."""
    if progress is None:
        print(f"{worker.name} drains")
        return
    while True:
        left = _left_of_worker(worker)
        if left is None and not _is_registered(worker, conductor):
            print(f"{worker.name} is drained and has ended")
            return
        progress.pause("it ends" if left is None else left)


def _left_of_worker(worker: WorkerInfo) -> str | None:
    """Return what the worker has still to do; None if its process has ended."""
    try:
        with closing(
            BlockingClient(worker.address, WORKER_SERVICE, name="moonpool cli", connect_timeout_s=2.0)
        ) as client:
            stats = client.call(GetStats(), timeout_s=5.0)
    except Unavailable:
        return None
    if stats.incarnation != worker.incarnation:
        return None
    return f"{stats.num_running} requests run and {stats.num_waiting} wait"


def _is_registered(worker: WorkerInfo, conductor: str) -> bool:
    workers = ask_conductor(conductor, Status()).workers
    return any((one.info.name, one.info.incarnation) == (worker.name, worker.incarnation) for one in workers)


def _drain_node(
    store: Store, node: str, segments: list[SegmentStats], progress: BoundedWait | None, force: bool
) -> None:
    others = {each.node for each in segments if each.node != node and each.status == "ok"}
    if not others and not force:
        raise InvalidInput(
            f"{node} is the only node that takes objects: they could move nowhere but to SSD; start another node, or "
            "use --force"
        )
    tasks = [store.tasks.drain(each.name) for each in segments if each.node == node]
    if progress is None:
        print(f"{node} drains; `moonpool stat` shows how far it is")
        return
    done = [_follow_task(store, task, progress) for task in tasks]
    failed = next((task for task in done if task.state != "done"), None)
    if failed is not None:
        raise Unavailable(f"{node} is not drained: {failed.message or failed.state}; it takes new objects again")
    moved = format_nbytes(sum(task.nbytes_moved for task in done))
    on_ssd = sum(each.num_objects for each in store.stats().segments if each.node == node and each.tier & Tier.SSD)
    print(f"{node} is drained: {moved} moved to {', '.join(sorted(others)) or 'no other node'}; it can be stopped")
    if on_ssd:
        print(f"{on_ssd:,} objects are on its SSD; those that are nowhere else can be read again when {node} is back")


def _follow_task(store: Store, task_id: int, progress: BoundedWait) -> TaskInfo:
    """Return the task when it has ended."""
    while (task := store.tasks.query(task_id)) is not None and task.state == "running":
        progress.pause(f"{task.num_done:,} of {task.num_total:,} objects moved, {format_nbytes(task.nbytes_moved)}")
    if task is None:
        raise NotFound("the master knows no such drain any more: it was restarted; drain again")
    return task
