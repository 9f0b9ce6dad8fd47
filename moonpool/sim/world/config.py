"""What is simulated: machines, model, the settings of production code, and when nodes fail. Pure.

Failures are written as text:

p3@600+120          node p3 crashes at 600 s and is back, empty, 120 s later
p3@600              it never comes back
d0@600+120:slow=4   its network has a quarter of its bandwidth for 120 s
d0@600+120:frozen   it carries nothing for 120 s; data in transit waits

Changes of roles that a person orders, too:

p1@600:decode       node p1 becomes a decode worker at 600 s
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from moonpool.base.cluster import WorkerRole
from moonpool.base.errors import ConfigError, InvalidInput
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.retries import RetryPolicy
from moonpool.master.rules import PoolRules
from moonpool.sim.physics.cost import EngineCost
from moonpool.sim.physics.hardware import NodeSpec
from moonpool.sim.physics.model_shape import ModelShape
from moonpool.sim.physics.roofline import kv_capacity_tokens
from moonpool.sim.world.pool import sim_pool_rules

Kind = Literal["crash", "slow", "frozen"]
REPORT_EVERY_S = 0.05  # between two reports of a real worker, if few workers report
_NUMBER = r"\d+(?:\.\d+)?"
_TEXT = re.compile(rf"(?P<node>[a-z]+\d+)@(?P<at>{_NUMBER})(?:\+(?P<lasts>{_NUMBER}))?(?::(?P<kind>.+))?")
_SLOW = re.compile(rf"slow=({_NUMBER})")
_FORMS = "p3@600+120, p3@600, d0@600+120:slow=4 or d0@600+120:frozen"


@dataclass(frozen=True)
class Failure:
    """`lasts_s` None: the failure does not end. A slow network has 1 / `factor` of its bandwidth."""

    at_s: float
    node: str
    lasts_s: float | None = None
    kind: Kind = "crash"
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < math.inf or (self.lasts_s is not None and not 0 < self.lasts_s < math.inf):
            raise InvalidInput(f"{self.node} cannot fail at {self.at_s:g} s for {self.lasts_s} s")
        if self.kind == "slow" and not 1 < self.factor < math.inf:
            raise InvalidInput(f"{self.node}: a slow network is more than 1 times slower, not {self.factor:g}")
        if self.kind == "frozen" and self.lasts_s is None:
            raise InvalidInput(f"{self.node}: a frozen network needs a duration, because its requests would never end")

    @property
    def end_s(self) -> float:
        return math.inf if self.lasts_s is None else self.at_s + self.lasts_s

    def __str__(self) -> str:
        lasts = "" if self.lasts_s is None else f"+{self.lasts_s:g}"
        kind = {"crash": "", "slow": f":slow={self.factor:g}", "frozen": ":frozen"}[self.kind]
        return f"{self.node}@{self.at_s:g}{lasts}{kind}"


def parse_failure(text: str) -> Failure:
    """Parse the text form. Raise InvalidInput with the forms that exist."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise InvalidInput(f"{text!r} is no failure; write {_FORMS}")
    lasts_s = None if found["lasts"] is None else float(found["lasts"])
    kind, factor = _kind(found["kind"], text)
    return Failure(float(found["at"]), found["node"], lasts_s, kind, factor)


def _kind(text: str | None, whole: str) -> tuple[Kind, float]:
    if text is None or text == "crash":
        return "crash", 1.0
    if text == "frozen":
        return "frozen", 1.0
    slow = _SLOW.fullmatch(text)
    if slow is None:
        raise InvalidInput(f"{whole!r} is no failure; write {_FORMS}")
    return "slow", float(slow[1])


def check_schedule(failures: Iterable[Failure], nodes: Collection[str]) -> None:
    """Raise InvalidInput for a failure of an unknown node, or a crash of a node that is down."""
    crashes: dict[str, list[Failure]] = {}
    for failure in failures:
        if failure.node not in nodes:
            raise InvalidInput(f"there is no node {failure.node!r}; there are {_listed(list(nodes))}")
        if failure.kind == "crash":
            crashes.setdefault(failure.node, []).append(failure)
    for node, each in crashes.items():
        each.sort(key=lambda failure: failure.at_s)
        for first, second in pairwise(each):
            if second.at_s <= first.end_s:
                raise InvalidInput(f"{node} cannot crash at {second.at_s:g} s: it is down since {first.at_s:g} s")


def _listed(nodes: Sequence[str]) -> str:
    return ", ".join(nodes) if len(nodes) <= 8 else f"{nodes[0]} to {nodes[-1]}"


_CHANGE = re.compile(rf"(?P<node>[a-z]+\d+)@(?P<at>{_NUMBER}):(?P<role>prefill|decode)")


@dataclass(frozen=True)
class RoleChange:
    """As `moonpool role NODE ROLE`, at that time."""

    at_s: float
    node: str
    role: WorkerRole

    def __str__(self) -> str:
        return f"{self.node}@{self.at_s:g}:{self.role}"


def parse_role_change(text: str) -> RoleChange:
    """Parse the text form. Raise InvalidInput with the form."""
    found = _CHANGE.fullmatch(text)
    if found is None:
        raise InvalidInput(f"{text!r} is no change of a role; write p1@600:decode or d0@600:prefill")
    return RoleChange(float(found["at"]), found["node"], WorkerRole(found["role"]))


PoolKind = Literal["shared", "local", "none"]


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A cluster with separate prefill and decode. `pool`: shared by all nodes, local to each prefill node, or none."""

    shape: ModelShape
    node: NodeSpec
    cost: EngineCost
    num_prefill: int
    num_decode: int
    pipeline_nodes: int = 1  # prefill nodes per worker, a pipeline of stages
    pipeline: int = 1  # prefill workers that compute a long prompt together, as `serve --pipeline`
    pool: PoolKind = "shared"
    pool_rules: PoolRules = field(default_factory=sim_pool_rules)
    max_run_blocks: int = 16  # most blocks of one object of the simulated pool, see BlockRuns
    decode_nodes_hold_blocks: bool = False  # whether their memory is part of the pool
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    layer_wise: bool = True  # KV is loaded and sent while other layers are computed
    answers_between_steps: bool = False  # decode workers handle requests between steps only
    always_pulls: bool = False  # prefill workers ignore the policy's limit of pool blocks
    max_batch_tokens: int = 8192  # per step of a prefill worker
    max_num_seqs: int = 256
    report_every_s: float = 1.0  # less often than real workers: a single conductor learns little from load reports
    num_conductors: int = 1  # each routes an equal part of the requests; the first one may change roles
    # max_tokens of a request, or the length of its answer if that is more; None: as many as its context has room for,
    # which is what clients ask for that set no limit
    asked_tokens: int | None = None
    elastic: bool = False  # nodes change their roles by the conductor's rule (conductor/elastic.py)
    role_changes: tuple[RoleChange, ...] = ()  # in the order of their times
    failures: tuple[Failure, ...] = ()
    retry: RetryPolicy = field(default_factory=RetryPolicy)  # of requests that lost a worker

    def __post_init__(self) -> None:
        if self.num_prefill < 1 or self.num_decode < 1 or self.num_conductors < 1:
            raise ConfigError("a cluster has at least one prefill node, one decode node and one conductor")
        if self.num_conductors > 1 and self.pipeline > 1:
            raise ConfigError("several conductors with nodes that share long prompts are not simulated")
        if self.pipeline_nodes < 1 or self.num_prefill % self.pipeline_nodes:
            raise ConfigError(f"{self.num_prefill} prefill nodes are no pipelines of {self.pipeline_nodes}")
        num_stages = max(self.pipeline_nodes, self.pipeline)
        if num_stages > self.shape.num_layers:
            raise ConfigError(f"{self.shape.name} has {self.shape.num_layers} layers for {num_stages} stages")
        if not 1 <= self.pipeline <= self.num_prefill:
            raise ConfigError(f"{self.num_prefill} prefill nodes cannot compute a prompt in {self.pipeline} stages")
        nodes = [*self.prefill_nodes, *self.decode_nodes]
        check_schedule(self.failures, nodes)
        unknown = [change.node for change in self.role_changes if change.node not in nodes]
        if unknown:
            raise InvalidInput(f"there is no node {unknown[0]!r}; there are {_listed(nodes)}")
        if self.changes_roles and (self.failures or self.pipeline_nodes > 1 or self.pool == "local"):
            raise ConfigError("nodes that change their roles cannot fail, be pipelines, or cache each alone")
        if self.pipeline > 1 and (self.failures or self.changes_roles or self.pipeline_nodes > 1):
            raise ConfigError("nodes that share long prompts cannot fail, change their roles, or be one worker")
        if self.pipeline > 1 and self.pool == "local":
            raise ConfigError("nodes that share long prompts cannot cache each alone")

    @property
    def changes_roles(self) -> bool:
        """Whether a node may have another role later than at the start; all nodes then hold blocks of the pool."""
        return self.elastic or bool(self.role_changes)

    @property
    def prefill_nodes(self) -> list[str]:
        return [f"p{number}" for number in range(self.num_prefill)]

    @property
    def decode_nodes(self) -> list[str]:
        return [f"d{number}" for number in range(self.num_decode)]

    def num_pages(self, block_tokens: int, num_nodes: int = 1) -> int:
        """Return the pages of a node's GPUs, or of several nodes that share the layers."""
        gpu = replace(self.node.gpu, hbm_nbytes=self.node.gpu.hbm_nbytes * num_nodes)
        return kv_capacity_tokens(self.shape, replace(self.node, gpu=gpu)) // block_tokens
