"""What is simulated: machines, model and the rules of production's own parts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from moonpool.base.errors import ConfigError
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.retries import RetryPolicy
from moonpool.master.rules import PoolRules
from moonpool.sim.physics.cost import EngineCost
from moonpool.sim.physics.hardware import NodeSpec
from moonpool.sim.physics.model_shape import ModelShape
from moonpool.sim.physics.roofline import kv_capacity_tokens
from moonpool.sim.world.failures import Failure, check_schedule
from moonpool.sim.world.pool import rules_on_paper

PoolKind = Literal["shared", "local", "none"]


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Prefill and decode apart. `pool`: one of all nodes, one for each prefill node alone, or none."""

    shape: ModelShape
    node: NodeSpec
    cost: EngineCost
    num_prefill: int
    num_decode: int
    pipeline_nodes: int = 1  # prefill nodes that are one worker, a line of stages
    pool: PoolKind = "shared"
    pool_rules: PoolRules = field(default_factory=rules_on_paper)
    max_run_blocks: int = 16  # that are one object of the simulated pool (runs.py)
    decode_nodes_hold_blocks: bool = False  # whether the pool has their memory too
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    layer_wise: bool = True  # loading and sending go on while layers are computed
    answers_between_steps: bool = False  # a decode worker gives places and takes hand-offs between steps, as ours do
    always_pulls: bool = False  # whatever the policy says, a prefill worker takes what the pool has
    max_batch_tokens: int = 8192  # of a prefill worker's step
    max_num_seqs: int = 256
    report_every_s: float = 1.0
    asked_tokens: int = 1024  # clients do not know how long an answer will be: they allow so many, or what came if more
    failures: tuple[Failure, ...] = ()
    retry: RetryPolicy = field(default_factory=RetryPolicy)  # when workers are lost

    def __post_init__(self) -> None:
        if self.num_prefill < 1 or self.num_decode < 1:
            raise ConfigError("a cluster has at least one prefill and one decode node")
        if self.pipeline_nodes < 1 or self.num_prefill % self.pipeline_nodes:
            raise ConfigError(f"{self.num_prefill} prefill nodes are no pipelines of {self.pipeline_nodes}")
        if self.pipeline_nodes > self.shape.num_layers:
            raise ConfigError(f"{self.shape.name} has {self.shape.num_layers} layers for {self.pipeline_nodes} stages")
        check_schedule(self.failures, [*self.prefill_nodes, *self.decode_nodes])

    @property
    def prefill_nodes(self) -> list[str]:
        return [f"p{number}" for number in range(self.num_prefill)]

    @property
    def decode_nodes(self) -> list[str]:
        return [f"d{number}" for number in range(self.num_decode)]

    def num_pages(self, block_tokens: int, num_nodes: int = 1) -> int:
        """Of the GPUs of a node, or of several that share the layers."""
        gpu = replace(self.node.gpu, hbm_nbytes=self.node.gpu.hbm_nbytes * num_nodes)
        return kv_capacity_tokens(self.shape, replace(self.node, gpu=gpu)) // block_tokens
