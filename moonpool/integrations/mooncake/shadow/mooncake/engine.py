"""`mooncake.engine`, served by Moonpool's transfer engine."""

from moonpool.integrations.mooncake.engine_cuda import has_cuda
from moonpool.integrations.mooncake.engine_types import InnerTransferEngine, TransferNotify, TransferOpcode
from moonpool.integrations.mooncake.transfer_engine import MooncakeTransferEngine as TransferEngine

Read, Write = TransferOpcode.Read, TransferOpcode.Write
SUPPORT_CUDA = has_cuda()
SUPPORT_EFA = SUPPORT_HIP = SUPPORT_INTRA_NVLINK = SUPPORT_MNNVL = SUPPORT_MUSA = False

__all__ = [
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "InnerTransferEngine",
    "Read",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
]
