"""What a plan is for: a model on a kind of node, and where its costs come from. Pure."""

from __future__ import annotations

from typing import NamedTuple

from moonpool.sim.physics.cost import EngineCost
from moonpool.sim.physics.hardware import NodeSpec
from moonpool.sim.physics.model_shape import ModelShape
from moonpool.sim.physics.paper_fit import paper_cost
from moonpool.sim.physics.roofline import roofline_cost

_MEASURED = ("llama3-70b", "a800", 8)


class Machine(NamedTuple):
    """One node runs one instance of the model. `cost_source` says in words where the times come from."""

    shape: ModelShape
    node: NodeSpec
    cost: EngineCost
    cost_source: str


def machine_for(shape: ModelShape, node: NodeSpec) -> Machine:
    """With the paper's measured times for its own model and node; for any other, from operations and bytes."""
    if (shape.name, node.gpu.name, node.num_gpus) == _MEASURED:
        return Machine(shape, node, paper_cost(), "fitted to the paper's Fig 14; batches of decodes are assumed")
    source = "roofline with shares of the peaks fitted to LLaMA3-70B on 8 x A800; not compared with this model or GPU"
    return Machine(shape, node, roofline_cost(shape, node), source)
