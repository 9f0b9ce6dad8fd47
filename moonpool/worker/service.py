"""A worker process: builds the engine, serves worker/messages.py, reports to the conductor.

Every worker can do both roles (roles.py). The one it has is state: it decides which requests the conductor sends, and
the conductor may ask for the other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from moonpool.base.address import split_addresses
from moonpool.base.clock import SystemClock
from moonpool.base.cluster import (
    WORKER_SERVICE,
    AssignedRole,
    WorkerInfo,
    WorkerLeft,
    WorkerRole,
)
from moonpool.base.errors import InvalidInput, NotFound
from moonpool.base.limits import CorePresence
from moonpool.base.metrics import GetMetrics, process_metrics, snapshot
from moonpool.base.process import EXIT_BUG, EXIT_HANGS
from moonpool.base.rpc import Call, RpcPeer, RpcServer
from moonpool.engine.engine import Engine
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.transfer.config import check_numa_node, describe_segment, warn_if_open
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.memory.location import host_id
from moonpool.worker.build import Built, build, choose_threads, follow_share, worker_kind
from moonpool.worker.calibration import calibrate
from moonpool.worker.config import WorkerConfig
from moonpool.worker.decode import DecodeRole
from moonpool.worker.kv_link.decode_peers import DecodePeers
from moonpool.worker.kv_link.device_pieces import DevicePieces
from moonpool.worker.kv_link.device_probe import DeviceProbe
from moonpool.worker.kv_link.pool import PoolHealth, PoolProbe, PoolWriter, verified_nbytes
from moonpool.worker.kv_link.pull import Puller
from moonpool.worker.kv_link.push_tools import PushTools
from moonpool.worker.kv_link.reservations import Reservations
from moonpool.worker.kv_link.send_queue import SendQueue
from moonpool.worker.loop import EngineLoop
from moonpool.worker.messages import (
    AbortHandoff,
    ChunkReady,
    CommitHandoff,
    Decode,
    EndWrites,
    GetStats,
    OpenHandoff,
    PieceChecksums,
    Prefill,
    PutSpan,
    RunStage,
    StartStage,
    VerifyObject,
    WorkerStats,
)
from moonpool.worker.metrics import Samples, WorkerCollector
from moonpool.worker.moving import AnswerMover
from moonpool.worker.pipeline.stage_runner import StageRunner
from moonpool.worker.pipeline.wiring import connect_stages
from moonpool.worker.prefill import PrefillRole
from moonpool.worker.reporter import (
    ReportSource,
    WorkerReporter,
    any_registered,
    has_others,
    leave_all,
    longest_silence_s,
    make_reporters,
    tell_all,
)
from moonpool.worker.roles import BothRoles
from moonpool.worker.watchdog import EngineProgress, Watchdog, work_of

_LOG = logging.getLogger(__name__)
_ON_THEIR_WAY_S = 1.0  # requests that were sent here before the conductor knew that this worker leaves arrive by then
_PAGE_LOCK_S = 10.0  # of a GPU worker's start, for the pool's memory; about 40 GB
_C = TypeVar("_C", Prefill, Decode, RunStage)


class Worker:
    """Serves from `await start()` until `await close()`."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.incarnation = time.time_ns()
        self._closers = contextlib.ExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._reporters: list[WorkerReporter] = []
        self._server: RpcServer | None = None
        self._address = ""
        self._writers: set[RpcPeer] = set()
        self._assigned = AssignedRole(role=WorkerRole(config.role), fixed=not config.elastic)
        self._has_left = asyncio.Event()
        self._conductors = split_addresses(config.conductor_address)

    async def start(self) -> str:
        """Load the model and serve; return the address once a conductor knows this worker."""
        check_numa_node(self.config.numa_node)
        self.config.task_limits()  # report a wrong value before the model is loaded
        self.config.transfer().guard()  # report a missing file before the model is loaded
        presence = self._closers.enter_context(CorePresence())
        threads = choose_threads(self.config.threads, presence)
        config = replace(self.config, threads=threads)
        self._built = built = await asyncio.to_thread(build, config, self.incarnation)
        self._closers.callback(built.segment.close)
        self._connect(built)
        await asyncio.to_thread(self._calibrate, built)
        self._server = RpcServer(WORKER_SERVICE, self._handlers(), name=self.config.name, incarnation=self.incarnation)
        self._address = self._stages.address = await self._server.listen(self.config.address)
        self._loop.start()
        self._watchdog.start()
        self._reporters = self._make_reporters(built)
        self._tasks += [asyncio.create_task(each.run(), name="reporter") for each in self._reporters]
        if self._is_prefill_at_first and self.config.calibration_s > 0:
            self._tasks.append(asyncio.create_task(self._keep_measuring(), name="pool probe"))
        if self.config.threads is None and self.config.gpu is None:
            self._tasks.append(asyncio.create_task(follow_share(threads, presence, self._loop.post), name="cores"))
        await any_registered(self._reporters)
        return self._address

    async def drain(self) -> None:
        """Tell the conductors that this worker leaves, so that no new request comes, and return when all that were sent
        here have ended or gone on elsewhere. A conductor that starts meanwhile is told too."""
        self._assigned = msgspec.structs.replace(self._assigned, leaves=True)
        await leave_all(self._reporters, _ON_THEIR_WAY_S)
        self._mover.start()
        idle, wait_s = False, _ON_THEIR_WAY_S
        while not idle:
            await asyncio.sleep(wait_s)
            idle, wait_s = await asyncio.wrap_future(self._loop.call(self._is_idle)), self.config.report_interval_s

    async def left(self) -> None:
        """Return when the conductor has told this worker to leave, and nothing is left to do."""
        await self._has_left.wait()

    async def _leave(self) -> None:
        _LOG.info("leaves: its answers go on elsewhere or end here, and it takes nothing new")
        await self.drain()
        left = WorkerLeft(name=self.config.name, incarnation=self.incarnation)
        await tell_all(self._conductors, left)
        self._has_left.set()

    def _is_idle(self) -> bool:
        queues = self._built.scheduler.queues
        has_requests = self._prefill.num_prompts or self._decode.streams or self._reservations.num_pages
        has_stages = self._stages.num_stages or self._leader.num_putting
        return not (has_requests or has_stages or queues.num_waiting or queues.num_running or len(self._queue))

    async def close(self) -> None:
        """Stop serving and release everything. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            self._mover.stop()
            await self._server.close()
            await self._leader.close()
        await asyncio.to_thread(self._closers.close)

    # -- construction ------------------------------------------------------------------------------------------

    def _connect(self, built: Built) -> None:
        config, own = self.config, self._closers
        self._transfer = TransferEngine(config.transfer())
        own.callback(self._transfer.close)
        self._segment = self._transfer.serve(built.segment)
        _LOG.info("serves %s", describe_segment(self._segment))
        warn_if_open(_LOG, config, self._transfer.addresses)
        self._store = self._open_store()
        own.callback(self._store.close)
        if isinstance(built.pieces, DevicePieces):
            self._transfer.use_gpu(built.pieces.device)
        self._probe = self._make_probe(built)
        identity = built.identity.digest()
        self._pool_health = PoolHealth(config.pool_rest_s)
        self._pool = PoolWriter(self._store, built.pieces, identity, self._pool_health)
        self._peers = DecodePeers(config.name, asyncio.get_running_loop())
        own.callback(self._peers.close)
        self._queue = SendQueue()
        own.callback(self._queue.close)
        self._pushes = PushTools(
            queue=self._queue, memory=built.pieces, pool=self._pool, peers=self._peers, transfer=self._transfer
        )
        self._samples = Samples()
        self._reservations = Reservations(built.scheduler.pages, self._stamp, built.pieces.mark)
        puller = Puller(self._store, built.pieces, identity, health=self._pool_health)
        own.callback(puller.close)
        self._prefill, self._decode = self._make_prefill(built, puller), self._make_decode(built)
        own.callback(self._decode.close)
        stages = StageRunner(built.runner, built.scheduler.pages)
        progress = EngineProgress(SystemClock(), launches=config.gpu is not None)
        if built.runner.launcher is not None:
            built.runner.launcher.on_prepare = progress.prepare
        roles = BothRoles(self._prefill, self._decode, stages, progress)
        self._loop = EngineLoop(
            Engine(built.scheduler, built.runner, roles),
            on_step=roles.on_step,
            at_boundary=roles.at_boundary,
            on_fatal=lambda error: os._exit(EXIT_BUG),  # the launcher restarts the process
            progress=progress,
        )
        self._watchdog = Watchdog(progress, config.task_limits(), lambda: os._exit(EXIT_HANGS))
        others = partial(has_others, self._conductors, config.name, WorkerRole.DECODE)
        self._mover = AnswerMover(self._decode, built.scheduler, self._queue, puller, self._loop, others)
        self._prefill.loop = self._decode.loop = stages.loop = self._prefill.ahead.loop = self._loop
        own.callback(self._loop.close)
        own.callback(self._watchdog.close)
        self._stages, self._leader = connect_stages(
            config.name, built, stages, self._prefill, self._loop, self._store, self._pushes, puller, self._samples
        )
        self.registry = CollectorRegistry()
        self.registry.register(WorkerCollector(self.stats))
        self._samples.times.register(self.registry)

    def _open_store(self) -> Store:
        config = self.config
        limits = ClientConfig(
            name=config.name,
            rpc_timeout_s=config.pool_timeout_s,
            silence_s=config.pool_silence_s,
            retry_s=0.0,  # a pool that is away is a miss: do not wait for it
            transfer_timeout_s=config.pool_timeout_s,
            uses_gpu=config.gpu is not None,
        )
        return Store(config.master_address, engine=self._transfer, config=limits)

    def _make_probe(self, built: Built) -> PoolProbe:
        if isinstance(built.pieces, DevicePieces):
            return DeviceProbe(self._open_store, built.pieces.scratch(), SystemClock())
        return PoolProbe(self._open_store, built.layout.page_nbytes, SystemClock())

    def _calibrate(self, built: Built) -> None:
        if self.config.calibration_s > 0:
            calibrate(built, self.config, self._samples)
            self._learn_costs()
            if self._samples.prefills:  # the last run is the longest; the samples go to the conductor
                self._prefill.calibrate(self._samples.prefills[-1])
        if isinstance(built.pieces, DevicePieces):  # after the runs: meanwhile every call of the driver is slow
            self._store.page_lock_local(_PAGE_LOCK_S)
        if self.config.calibration_s > 0:
            if self._is_prefill_at_first:
                self._samples.pulls.extend(self._probe.measure())
            _LOG.info("calibrated with %d runs", len(self._samples.prefills) + len(self._samples.decodes))

    def _learn_costs(self) -> None:
        costs = self._loop.progress.costs
        for prompt in self._samples.prefills:
            costs.learn(work_of(prompt.num_tokens - prompt.prefix_tokens, prompt.prefix_tokens), prompt.seconds)
        for step in self._samples.decodes:
            costs.learn(work_of(step.num_seqs, step.kv_tokens / step.num_seqs), step.seconds)

    @property
    def _is_prefill_at_first(self) -> bool:
        """Workers measure what their first role needs; the conductor's cost models are the same for all workers."""
        return self.config.role == "prefill"

    async def _keep_measuring(self) -> None:
        pulls = self._samples.pulls
        await self._probe.keep_measuring(
            lambda found: self._loop.post(lambda: pulls.extend(found)), lambda: self._samples.last_pull_s
        )

    def _make_prefill(self, built: Built, puller: Puller) -> PrefillRole:
        return PrefillRole(
            scheduler=built.scheduler,
            puller=puller,
            make_push=self._pushes.push,
            samples=self._samples,
            pull_timeout_s=self.config.pull_timeout_s,
            pull_grace_s=self.config.pull_grace_s,
            clock=SystemClock(),
            times=built.runner.times,
        )

    def _make_decode(self, built: Built) -> DecodeRole:
        return DecodeRole(
            scheduler=built.scheduler,
            reservations=self._reservations,
            memory=built.pieces,
            pool=self._pool,
            queue=self._queue,
            samples=self._samples,
            describe=lambda: (self._address, self._segment),
            clock=SystemClock(),
        )

    def _stamp(self, pages: Sequence[int], generation: int) -> None:
        fence, layout = self._built.segment.fence, self._built.layout
        assert fence is not None, "KV memory is fenced"
        for page in pages:
            fence.stamp(*layout.page(page), generation)
        fence.limit = generation  # generations rise, so no greater one was granted

    def _info(self, built: Built) -> WorkerInfo:
        config = self.config
        return WorkerInfo(
            name=config.name,
            role=self._assigned.role,
            address=self._address,
            incarnation=self.incarnation,
            identity=built.identity.digest(),
            model=built.files.name,
            block_tokens=config.block_tokens,
            num_pages=built.layout.num_pages,
            max_num_seqs=config.max_num_seqs,
            page_nbytes=built.layout.page_nbytes,
            num_layers=built.layout.num_layers,
            step_tokens=config.step_tokens,
            fixed=self._assigned.fixed,
            lease=self._assigned.lease,
            leaves=self._assigned.leaves,
            kind=worker_kind(config),
            pipeline=config.pipeline,
            host=host_id(),
            report_every_s=longest_silence_s(config.report_interval_s),
        )

    def _make_reporters(self, built: Built) -> list[WorkerReporter]:
        return make_reporters(
            self._conductors,
            lambda: self._info(built),
            ReportSource(
                built.scheduler,
                self._samples,
                staged=self._stages.tools.stages.waiting_work,
                awaited=self._decode.awaited,
                unreserved_pages=lambda: self._decode.unreserved_pages,
            ),
            self._loop,
            self.config.report_interval_s,
            self._take_role,
        )

    def _take_role(self, assigned: AssignedRole) -> None:
        """Take the role that the conductor asks for. Prompts go on to their end, answers here or elsewhere."""
        if assigned.lease < self._assigned.lease:
            _LOG.warning("refuses to be a %s worker: lease %d has ended", assigned.role, assigned.lease)
            return
        if self._assigned.leaves:
            return
        if assigned.leaves:
            if not any(task.get_name() == "leave" for task in self._tasks):
                self._tasks.append(asyncio.create_task(self._leave(), name="leave"))
            return
        if assigned.role is not self._assigned.role:
            _LOG.info("is a %s worker from now on", assigned.role)
            (self._mover.start if assigned.role is WorkerRole.PREFILL else self._mover.stop)()
        self._assigned = assigned

    # -- calls ---------------------------------------------------------------------------------------------------

    def _handlers(self) -> dict[type[Call[Any]], Callable[[Any, RpcPeer], Any]]:
        return {
            GetStats: lambda call, peer: self._ask_stats(),
            VerifyObject: lambda call, peer: asyncio.to_thread(verified_nbytes, self._store, call.key),
            PieceChecksums: lambda call, peer: self._piece_checksums(call.key),
            GetMetrics: lambda call, peer: [*snapshot(self.registry), *process_metrics()],
            Prefill: lambda call, peer: (self._leader if call.stages else self._prefill).prefill(self._checked(call)),
            RunStage: lambda call, peer: self._stages.run(self._checked(call)),
            StartStage: lambda call, peer: self._stages.start(call),
            ChunkReady: lambda call, peer: self._stages.chunk_ready(call),
            PutSpan: lambda call, peer: self._stages.put_span(call),
            Decode: lambda call, peer: self._decode.decode(self._checked(call).spec, call.resumes),
            OpenHandoff: self._open_handoff,
            CommitHandoff: lambda call, peer: self._decode.commit_handoff(call),
            EndWrites: self._decode.end_writes,
            AbortHandoff: self._decode.abort_handoff,
        }

    def _checked(self, call: _C) -> _C:
        """Return the call. Raise InvalidInput for token ids that the model does not have: they would crash a GPU."""
        tokens, vocab_size = call.spec.tokens, self._built.runner.model.config.vocab_size
        if not (1 <= call.spec.num_prompt_tokens <= len(tokens) and min(tokens) >= 0 and max(tokens) < vocab_size):
            raise InvalidInput(f"a request needs a prompt of token ids below {vocab_size}", param="prompt")
        return call

    def _open_handoff(self, call: OpenHandoff, peer: RpcPeer) -> None:
        if peer not in self._writers:
            self._writers.add(peer)
            peer.on_close(lambda: self._writer_gone(peer))
        self._decode.open_handoff(call, peer)

    def _writer_gone(self, peer: RpcPeer) -> None:
        self._writers.discard(peer)
        self._decode.writer_gone(peer)

    async def _piece_checksums(self, key: bytes) -> bytes:
        built = self._built

        def read() -> bytes:
            page = built.scheduler.pages.page_of(key)
            if page is None:
                raise NotFound("that block is not in this worker's pages")
            found = built.pieces.checksums([page], range(built.layout.num_layers), built.pieces.mark())
            return found.astype("<u4").tobytes()

        return await self._loop.ask(read)

    async def _ask_stats(self) -> WorkerStats:
        return await self._loop.ask(self.stats)

    def stats(self) -> WorkerStats:
        """Return the current counts; exact on the engine's thread, approximate elsewhere."""
        scheduler, counters = self._built.scheduler, self._store.counters()
        return WorkerStats(
            name=self.config.name,
            role=self._assigned.role,
            incarnation=self.incarnation,
            pid=os.getpid(),
            num_pages=scheduler.pages.num_pages,
            free_pages=scheduler.pages.num_available,
            cached_pages=scheduler.pages.num_cached,
            reserved_pages=self._reservations.num_pages,
            num_waiting=scheduler.queues.num_waiting,
            num_running=scheduler.queues.num_running,
            pool_read_nbytes=counters["bytes_read"],
            pool_written_nbytes=counters["bytes_written"],
            handoff_nbytes=self._samples.handoff_nbytes,
            pull_failures=self._failures(),
            failed_requests=self._samples.failed_requests,
            resumed_answers=self._samples.resumed_answers,
            recomputed_tokens=self._samples.recomputed_tokens,
        )

    def _failures(self) -> dict[str, int]:
        # Copied first, in one step each: other threads change them at the same time.
        return dict(Counter(dict(self._samples.pull_failures)) + Counter(dict(self._pool.failures)))
