"""The machines that a trace is replayed on, from the names that users type, and the source of their step times.

Measured steps become costs by a least-squares fit of the relative error with coefficients >= 0, which uses the solver
of the conductor's estimates. All samples have the same weight; in the conductor's own fit old samples fade. Where
samples cannot tell two coefficients apart, the fit uses as few coefficients as possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from moonpool.base.cluster import DecodeSample, PrefillSample
from moonpool.base.errors import InvalidInput
from moonpool.conductor.costs import nonnegative_minimum
from moonpool.sim import GPU, MODEL, NUM_GPUS, NUM_NODES
from moonpool.sim.physics.cost import DecodeCost, EngineCost, Overhead, PrefillCost
from moonpool.sim.physics.hardware import NodeSpec, node
from moonpool.sim.physics.model_shape import ModelShape, preset, shape_from_config
from moonpool.sim.physics.paper_fit import paper_cost
from moonpool.sim.physics.roofline import kv_capacity_tokens, roofline_cost

_MEASURED = ("llama3-70b", "a800", 8)


class Machine(NamedTuple):
    """A model on a kind of node; one node runs one instance. `cost_source` describes the source of the times."""

    shape: ModelShape
    node: NodeSpec
    cost: EngineCost
    cost_source: str


def machine_for(shape: ModelShape, node: NodeSpec) -> Machine:
    """Return the machine with the paper's measured times for the paper's model and node, else with roofline times."""
    if (shape.name, node.gpu.name, node.num_gpus) == _MEASURED:
        return Machine(shape, node, paper_cost(), "fitted to the paper's Fig 14; decode batches are assumed")
    source = "roofline with shares of the peaks fitted to LLaMA3-70B on 8 x A800; not compared with this model or GPU"
    return Machine(shape, node, roofline_cost(shape, node), source)


_RIDGE = 1e-12  # of a column's length: a feature that no sample has must not make the system singular


def profile_cost(
    prefills: Iterable[PrefillSample], decodes: Iterable[DecodeSample], overhead: Overhead | None = None
) -> EngineCost:
    """Return the costs that fit the samples best. Raise InvalidInput if a kind has no usable sample."""
    return EngineCost(prefill=fit_prefill(prefills), decode=fit_decode(decodes), overhead=overhead or Overhead())


def fit_prefill(samples: Iterable[PrefillSample]) -> PrefillCost:
    """Fit the prefill cost. A cached prefix costs its reading only: workers leave out the time to fetch it."""
    used = [each for each in samples if each.num_tokens > each.prefix_tokens >= 0 and each.seconds > 0]
    features = [_prefill_features(float(each.num_tokens), float(each.prefix_tokens)) for each in used]
    base, per_token, per_square, per_masked, per_context = _fit(features, [each.seconds for each in used], "prefill")
    return PrefillCost(
        base_s=base,
        per_token_s=per_token,
        per_square_s=per_square,
        per_masked_s=per_masked,
        per_context_s=per_context,
    )


def _prefill_features(total: float, prefix: float) -> tuple[float, ...]:
    new = total - prefix
    return 1.0, new, total * total - prefix * prefix, new * new, prefix


def fit_decode(samples: Iterable[DecodeSample]) -> DecodeCost:
    used = [each for each in samples if each.num_seqs > 0 and each.kv_tokens >= 0 and each.seconds > 0]
    features = [(1.0, float(each.num_seqs > 1), each.num_seqs, each.kv_tokens) for each in used]
    base, batched, per_seq, per_kv_token = _fit(features, [each.seconds for each in used], "decode")
    return DecodeCost(base_s=base, batched_s=batched, per_seq_s=per_seq, per_kv_token_s=per_kv_token)


def _fit(features: Sequence[Sequence[float]], seconds: Sequence[float], kind: str) -> list[float]:
    if not features:
        raise InvalidInput(f"the profile has no {kind} sample")
    rows: NDArray[np.float64] = np.asarray(features) / np.asarray(seconds)[:, None]  # the fit of each row should be 1
    lengths = np.linalg.norm(rows, axis=0)
    lengths[lengths == 0] = 1.0
    rows /= lengths
    gram = rows.T @ rows + _RIDGE * np.eye(rows.shape[1])
    fitted = nonnegative_minimum(gram.tolist(), rows.sum(axis=0).tolist())
    return [each / length for each, length in zip(fitted, lengths.tolist(), strict=True)]


_FROM_PROFILE = "fitted to the measured steps in {}"


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Equal nodes, each with one instance of the model. Coupled engines use all of them; otherwise `num_prefill` nodes
    prefill and the others decode."""

    machine: Machine
    num_nodes: int = 16
    num_prefill: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.num_prefill < self.num_nodes:
            raise InvalidInput(f"of {self.num_nodes} nodes {self.num_prefill} cannot prefill: some have to decode")
        kv_capacity_tokens(self.shape, self.node)  # raises InvalidInput for a model that does not fit

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
        """Return the assumptions by name; names carry units."""
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
    model: str = MODEL,
    gpu: str = GPU,
    num_gpus: int = NUM_GPUS,
    num_nodes: int = NUM_NODES,
    num_prefill: int | None = None,
    dram_nbytes: float | None = None,
    ssd_nbytes: float = 0.0,
    profile: Path | None = None,
) -> Fleet:
    """`model` is a preset's name or the path of a config.json. `num_prefill` None: half of the nodes prefill."""
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
    """Return a preset's shape, or that of a Hugging Face config.json (the file or its folder)."""
    path = Path(model)
    if path.suffix != ".json" and not path.is_dir():
        return preset(model)
    path = path / "config.json" if path.is_dir() else path
    return shape_from_config(_read_json(path, dict[str, Any]), path.parent.name or "model")


class Profile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Samples as workers report them: [tokens, cached tokens, seconds] and [sequences, KV tokens, seconds]; and the
    times of `Overhead`."""

    prefills: list[PrefillSample]
    decodes: list[DecodeSample]
    request_s: float = 0.0
    handoff_s: float = 0.0

    def cost(self) -> EngineCost:
        """Fit the costs. Raise InvalidInput if a kind of sample is missing or a time is negative."""
        overhead = Overhead(request_s=self.request_s, handoff_s=self.handoff_s)
        return profile_cost(self.prefills, self.decodes, overhead)


def read_profile(path: Path) -> EngineCost:
    """Return the costs from a file of measured steps: {"prefills": [[n, p, s], ...], "decodes": [[n, k, s], ...]},
    optionally with overheads: "request_s": s, "handoff_s": s."""
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
