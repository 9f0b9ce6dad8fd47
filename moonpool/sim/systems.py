"""Serving systems by name, all on the same simulated machines: Moonpool, Moonpool without a feature, and baselines.

Systems with separate prefill and decode refuse requests that are predicted to miss the targets. The coupled systems
refuse nothing, like the engines that they represent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from moonpool.base.errors import InvalidInput
from moonpool.conductor.admission.forms import AdmissionForm
from moonpool.conductor.placement.policy import DEFAULT_POLICY, PolicyConfig
from moonpool.sim.fleet import Fleet
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.config import REPORT_EVERY_S, ClusterConfig, Failure, RoleChange
from moonpool.sim.world.coupled import CoupledCluster, CoupledConfig
from moonpool.sim.world.pool import sim_pool_rules
from moonpool.traces.columns import Trace

World: TypeAlias = SimCluster | CoupledCluster
FULL = "moonpool"
BASELINE = "vllm-v1"  # the baseline of the full system
# vLLM's V1 engine: prefix caching and chunked prefill are on, a step has up to 2,048 tokens on GPUs like these; its
# load balancer sends each request to the engine with the fewest requests.
VLLM_TODAY: dict[str, Any] = {
    "chunked_prefill": True,
    "prefix_caching": True,
    "chunk_tokens": 2048,
    "router": "least-loaded",
}


class Goals(NamedTuple):
    """Targets in seconds, the seed of whatever is drawn, and the form of admission."""

    ttft_s: float = 30.0
    tbt_s: float = 0.1
    seed: int = 0
    admission: AdmissionForm = AdmissionForm.PREDICTED

    def policy(self, name: str) -> PolicyConfig:
        return PolicyConfig(
            name=name, ttft_slo_s=self.ttft_s, tbt_slo_s=self.tbt_s, admission=self.admission, seed=self.seed
        )


class System(NamedTuple):
    """`make` returns a cluster that can run once. `config` is None for coupled systems."""

    name: str
    summary: str
    make: Callable[[Trace, Fleet, Goals], World]
    config: Callable[[Fleet, Goals], ClusterConfig] | None = None


def _system_of(name: str, summary: str, config: Callable[[Fleet, Goals], ClusterConfig]) -> System:
    return System(name, summary, lambda trace, fleet, goals: SimCluster(config(fleet, goals), trace), config)


def _split(name: str, summary: str, policy: str, **changes: Any) -> System:
    return _system_of(
        name, summary, lambda fleet, goals: replace(_config(fleet, goals), policy=goals.policy(policy), **changes)
    )


def _coupled(name: str, summary: str, **changes: Any) -> System:
    def make(trace: Trace, fleet: Fleet, goals: Goals) -> World:
        machine = fleet.machine
        cost = machine.cost.in_chunks() if changes.get("chunked_prefill") else machine.cost
        config = CoupledConfig(shape=machine.shape, node=machine.node, cost=cost, num_nodes=fleet.num_nodes, **changes)
        return CoupledCluster(config, trace)

    return System(name, summary, make)


def _config(fleet: Fleet, goals: Goals) -> ClusterConfig:
    return ClusterConfig(
        shape=fleet.shape,
        node=fleet.node,
        cost=fleet.cost,
        num_prefill=fleet.num_prefill,
        num_decode=fleet.num_decode,
        policy=goals.policy(DEFAULT_POLICY),
    )


SYSTEMS = {
    system.name: system
    for system in (
        _split(FULL, "one pool across the prefill nodes; KV is pulled only where that saves time", DEFAULT_POLICY),
        _split("paper", "one pool across the prefill nodes, with the paper's Algorithm 1", "paper"),
        _split("no-pool", "separate prefill and decode; KV is kept in GPU pages only", DEFAULT_POLICY, pool="none"),
        _split(
            "local-round-robin",
            "each prefill node caches alone; requests round-robin",
            "round-robin",
            pool="local",
        ),
        _split(
            "local-affinity",
            "each prefill node caches alone; requests follow their prefix",
            "local",
            pool="local",
        ),
        _coupled("vllm", "prefill and decode in one engine; whole prompts run first; no prefix cache"),
        _coupled("vllm-prefix", "as vllm, with a prefix cache in GPU pages", prefix_caching=True),
        _coupled("vllm-chunked", "as vllm, with chunked prefill; no prefix cache", chunked_prefill=True),
        _coupled(
            BASELINE,
            "today's default of vLLM: chunked prefill and a prefix cache in GPU pages",
            **VLLM_TODAY,
        ),
    )
}


# How to switch each feature of the full system off.
def _without_ssd(config: ClusterConfig) -> ClusterConfig:
    if not config.node.ssd_nbytes:
        raise InvalidInput("the nodes have no SSD to be without; give each one with --ssd 8TB")
    return replace(config, node=replace(config.node, ssd_nbytes=0.0))


_OFF: dict[str, Callable[[ClusterConfig], ClusterConfig]] = {
    "pool": lambda config: replace(config, pool="none"),
    "ssd": _without_ssd,
    "admission": lambda config: replace(config, policy=replace(config.policy, ttft_slo_s=None, tbt_slo_s=None)),
    "replication": lambda config: replace(config, pool_rules=sim_pool_rules(hot_hits=0)),
    "affinity": lambda config: replace(config, policy=replace(config.policy, name="least-loaded"), always_pulls=True),
    "overlap": lambda config: replace(config, layer_wise=False),
}
FEATURES = tuple(_OFF)


def system(name: str) -> System:
    """Return a system by name. Raise InvalidInput with the existing names."""
    if name not in SYSTEMS:
        raise InvalidInput(f"no system {name!r}; there are {', '.join(SYSTEMS)}", param="system")
    return SYSTEMS[name]


def without(feature: str) -> System:
    """Return the full system with one feature off. Raise InvalidInput for an unknown feature."""
    off = _OFF.get(feature)
    if off is None:
        raise InvalidInput(f"{feature!r} is not a feature; there are {', '.join(FEATURES)}", param="without")

    return _system_of(
        f"{FULL} without {feature}",
        f"{SYSTEMS[FULL].summary}, {feature} off",
        lambda fleet, goals: off(_config(fleet, goals)),
    )


def with_pipelines(chosen: System, num_nodes: int) -> System:
    """Return the system with `num_nodes` prefill nodes per worker. Raise InvalidInput for a coupled system."""
    return _changed(chosen, f"pipelines of {num_nodes} prefill nodes", pipeline_nodes=num_nodes)


def with_shared_prompts(chosen: System, num_workers: int) -> System:
    """Return the system in which `num_workers` prefill workers compute a long prompt together. Raise InvalidInput for a
    coupled system."""
    return _changed(chosen, f"long prompts at {num_workers} prefill workers", pipeline=num_workers)


def with_conductors(chosen: System, number: int) -> System:
    """Return the system with several conductors, whose workers report as often as real ones do. Raise InvalidInput for
    a coupled system."""
    return _changed(chosen, f"{number} conductors", num_conductors=number, report_every_s=REPORT_EVERY_S)


def with_failures(chosen: System, failures: tuple[Failure, ...]) -> System:
    """Return the system with these failures. Raise InvalidInput for a coupled system."""
    return _changed(chosen, f"failing: {', '.join(map(str, failures))}", failures=failures)


def with_roles(chosen: System, elastic: bool, changes: tuple[RoleChange, ...]) -> System:
    """Return the system with nodes that change their roles. Raise InvalidInput for a coupled system."""
    how = [*(["elastic roles"] if elastic else []), *map(str, changes)]
    return _changed(chosen, f"roles that change: {', '.join(how)}", elastic=elastic, role_changes=changes)


def _changed(chosen: System, how: str, **changes: Any) -> System:
    config = chosen.config
    if config is None:
        raise InvalidInput(f"{chosen.name} has no separate prefill workers: it cannot have {how}")
    return _system_of(
        chosen.name, f"{chosen.summary}; {how}", lambda fleet, goals: replace(config(fleet, goals), **changes)
    )
