"""vLLM's MooncakeConnector on machines without an accelerator: a stand-in for one line of it, for trying things out.

The connector asks torch which accelerator the engine uses, and torch raises when there is none. The answer has no other
use on a CPU. Name this module as `kv_connector_module_path`, with its folder on PYTHONPATH. On a GPU leave it out.
"""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

if not torch.accelerator.is_available():
    torch.accelerator.current_device_index = lambda: 0  # type: ignore[assignment]

__all__ = ["MooncakeConnector"]
