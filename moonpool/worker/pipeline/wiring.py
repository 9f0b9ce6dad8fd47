"""Puts the parts of a worker's pipeline together."""

from __future__ import annotations

from moonpool.base.clock import SystemClock
from moonpool.store import Store
from moonpool.worker.build import Built
from moonpool.worker.kv_link.pull import Puller
from moonpool.worker.kv_link.push_tools import PushTools
from moonpool.worker.kv_link.span_puts import SpanPuts
from moonpool.worker.loop import EngineLoop
from moonpool.worker.metrics import Samples
from moonpool.worker.pipeline.leader import PipelineLeader
from moonpool.worker.pipeline.prefix import PrefixPuller
from moonpool.worker.pipeline.service import StageService
from moonpool.worker.pipeline.stage import StageTools
from moonpool.worker.pipeline.stage_runner import StageRunner
from moonpool.worker.prefill import PrefillRole


def connect_stages(
    name: str,
    built: Built,
    stages: StageRunner,
    prefill: PrefillRole,
    loop: EngineLoop,
    store: Store,
    pushes: PushTools,
    puller: Puller,
    samples: Samples,
) -> tuple[StageService, PipelineLeader]:
    """Return what serves the stages that others lead, and what leads."""
    tools = StageTools(
        name=name,
        runner=built.runner,
        stages=stages,
        loop=loop,
        transfer=pushes.transfer,
        prefix=PrefixPuller(puller, stages, loop, samples, prefill.pull_limit_s, SystemClock()),
        make_push=pushes.push,
    )
    puts = SpanPuts(store, built.pieces, pushes.pool)
    service = StageService(tools, puts, pushes.queue)
    leader = PipelineLeader(
        service,
        puts,
        built.scheduler,
        samples,
        SystemClock(),
        alone=prefill.prefill,
        make_sequence=lambda call: prefill.sequence(call.spec),
    )
    return service, leader
