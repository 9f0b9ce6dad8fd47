"""The machines that a trace is replayed on, from the names that people type, and where their times come from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from moonpool.base.cluster import DecodeSample, PrefillSample
from moonpool.base.errors import InvalidInput
from moonpool.sim.machine import Machine, machine_for
from moonpool.sim.physics.cost import EngineCost, Overhead
from moonpool.sim.physics.hardware import NodeSpec, node
from moonpool.sim.physics.model_config import preset, shape_from_config
from moonpool.sim.physics.model_shape import ModelShape
from moonpool.sim.physics.profile import profile_cost
from moonpool.sim.physics.roofline import kv_capacity_tokens

_FROM_PROFILE = "fitted to the measured steps in {}"


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Equal nodes, each with one instance of the model. Coupled engines take all of them; else `num_prefill` nodes
    prefill and the others decode."""

    machine: Machine
    num_nodes: int = 16
    num_prefill: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.num_prefill < self.num_nodes:
            raise InvalidInput(f"of {self.num_nodes} nodes {self.num_prefill} cannot prefill: some have to decode")
        kv_capacity_tokens(self.shape, self.node)  # refuses a model that does not fit

    @property
    def shape(self) -> ModelShape:
        return self.machine.shape

    @property
    def node(self) -> NodeSpec:
        return self.machine.node

    @property
    def cost(self) -> EngineCost:
        return self.machine.cost

    @property
    def num_decode(self) -> int:
        return self.num_nodes - self.num_prefill

    def facts(self) -> dict[str, str | int | float]:
        """What was assumed, by name; names carry units."""
        spec = self.node
        return {
            "model": self.shape.name,
            "gpu": spec.gpu.name,
            "gpus_per_node": spec.num_gpus,
            "nodes": self.num_nodes,
            "prefill_nodes": self.num_prefill,
            "times": self.machine.cost_source,
            "kv_nbytes_per_token": self.shape.kv_nbytes_per_token,
            "kv_tokens_per_node_gpus": kv_capacity_tokens(self.shape, spec),
            "dram_nbytes_per_node": spec.dram_nbytes,
            "ssd_nbytes_per_node": spec.ssd_nbytes,
            "network_nbytes_per_s": spec.network_bandwidth,
            "h2d_nbytes_per_s": spec.h2d_bandwidth,
        }


def make_fleet(
    *,
    model: str = "llama3-70b",
    gpu: str = "a800",
    num_gpus: int = 8,
    num_nodes: int = 16,
    num_prefill: int | None = None,
    dram_nbytes: float | None = None,
    ssd_nbytes: float = 0.0,
    profile: Path | None = None,
) -> Fleet:
    """`model` is a preset's name or the path of a config.json; half of the nodes prefill unless told."""
    spec = replace(node(gpu, num_gpus), ssd_nbytes=ssd_nbytes)
    if dram_nbytes is not None:
        spec = replace(spec, dram_nbytes=dram_nbytes)
    machine = machine_for(read_shape(model), spec)
    if profile is not None:
        machine = machine._replace(cost=read_profile(profile), cost_source=_FROM_PROFILE.format(profile.name))
    return Fleet(
        machine=machine, num_nodes=num_nodes, num_prefill=num_nodes // 2 if num_prefill is None else num_prefill
    )


def read_shape(model: str) -> ModelShape:
    """A preset, or what a Hugging Face config.json (the file or its folder) says."""
    path = Path(model)
    if path.suffix != ".json" and not path.is_dir():
        return preset(model)
    path = path / "config.json" if path.is_dir() else path
    return shape_from_config(_read_json(path, dict[str, Any]), path.parent.name or "model")


class Profile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Each sample as workers report it: [tokens, cached tokens, seconds] and [sequences, KV tokens, seconds]. What a
    request takes beside them as `Overhead` has it."""

    prefills: list[PrefillSample]
    decodes: list[DecodeSample]
    request_s: float = 0.0
    handoff_s: float = 0.0

    def cost(self) -> EngineCost:
        """InvalidInput where a kind of sample is missing or a time is negative."""
        overhead = Overhead(request_s=self.request_s, handoff_s=self.handoff_s)
        return profile_cost(self.prefills, self.decodes, overhead)


def read_profile(path: Path) -> EngineCost:
    """Costs from a file of measured steps: {"prefills": [[n, p, s], ...], "decodes": [[n, k, s], ...]}, and what
    requests take beside them, where that was measured: "request_s": s, "handoff_s": s."""
    cost: EngineCost = _read_json(path, Profile).cost()
    return cost


def write_profile(path: Path, profile: Profile) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")


def _read_json(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path}: {error}") from error
