"""GPUs and nodes: published peak rates, and the measured share of each peak. Pure data.

Rates are bytes or operations per second, one direction, decimal units. Sources:
  [paper]   Mooncake, FAST'25: Table 1, Figs 12 and 14 (shared/facts/paper.md B and D)
  [a100]    NVIDIA A100 80GB SXM data sheet; the A800 is the same chip with 400 instead of 600 GB/s of NVLink
  [h100]    NVIDIA H100 SXM data sheet; the H800 has 400 instead of 900 GB/s of NVLink
  [h200]    NVIDIA H200 SXM data sheet
  [l40s]    NVIDIA L40S data sheet (no NVLink: GPUs talk over PCIe 4.0 x16)
  [b200]    NVIDIA DGX B200 data sheet, an eighth of it
  [nccl]    all-reduce over the 8 GPUs of a node: bus bandwidth about 200 of 300 GB/s on A100 (nccl-tests issue 149);
            370 of 450 GB/s on H100 without in-switch reduction, by a maintainer (nccl-tests issue 212). Taken for
            the other GPUs of their generation too; L40S and B200 are assumed to do as A100 and H100
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moonpool.base.errors import InvalidInput

GB = 1e9
TB = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One GPU. `peer_bandwidth` is the peak rate to the other GPUs of its node."""

    name: str
    bf16_flops: float  # dense
    hbm_nbytes: float
    hbm_bandwidth: float
    peer_bandwidth: float
    peer_share: float  # share of peer_bandwidth that an all-reduce achieves
    h2d_bandwidth: float  # from host memory when all GPUs of the node load at once, peak


def _gpu(
    name: str, tflops: float, hbm_gb: float, hbm_gb_s: float, peer_gb_s: float, peer_share: float, h2d_gb_s: float
) -> GpuSpec:
    return GpuSpec(
        name=name,
        bf16_flops=tflops * 1e12,
        hbm_nbytes=hbm_gb * GB,
        hbm_bandwidth=hbm_gb_s * GB,
        peer_bandwidth=peer_gb_s * GB,
        peer_share=peer_share,
        h2d_bandwidth=h2d_gb_s * GB,
    )


# H2D of the A100 generation: [paper] Table 1 says 128 GB/s for 8 GPUs (two share a switch and its PCIe 4.0 x16).
# Later generations have a PCIe 5.0 x16 (64 GB/s) each.
_A100 = _gpu("a100", 312, 80, 2039, 300, 0.67, 16)  # [a100], [nccl]
_H100 = _gpu("h100", 989.5, 80, 3350, 450, 0.82, 64)  # [h100]; 989.5 as in [paper]
_GPUS = {
    gpu.name: gpu
    for gpu in (
        _A100,
        replace(_A100, name="a800", peer_bandwidth=200 * GB),
        _H100,
        replace(_H100, name="h800", peer_bandwidth=200 * GB),
        _gpu("h200", 989.5, 141, 4800, 450, 0.82, 64),  # [h200]
        _gpu("l40s", 362, 48, 864, 32, 0.67, 32),  # [l40s]
        _gpu("b200", 2250, 180, 8000, 900, 0.82, 64),  # [b200]
    )
}
GPU_NAMES = tuple(_GPUS)


def gpu(name: str) -> GpuSpec:
    try:
        return _GPUS[name]
    except KeyError:
        raise InvalidInput(f"no GPU {name!r}; there are {', '.join(GPU_NAMES)}", param="gpu") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One machine: its GPUs run one model instance together (tensor parallel). Defaults are [paper]'s node."""

    gpu: GpuSpec
    num_gpus: int = 8
    num_nics: int = 4
    nic_bandwidth: float = 25 * GB  # 200 Gbit/s, [paper]
    nic_share: float = 0.86  # [paper] Fig 14: 85 to 86 GB/s of 100; Fig 12: 87
    h2d_share: float = 0.79  # [paper] Fig 14: 101 GB/s of 128
    # Of one all-reduce of few bytes over 8 GPUs, an assumption: tables of nccl-tests show 19 us (Mooncake pull request
    # 3484) to 43 us (over PCIe, NCCL issue 1530).
    peer_latency_s: float = 30e-6
    dram_nbytes: float = 1 * TB  # memory for the pool; [paper] Fig 9: 3M tokens, "1 TB DRAM"
    ssd_nbytes: float = 0.0
    # One enterprise NVMe drive on PCIe 4.0 x4, by its data sheet (Samsung PM9A3): 6.5 GB/s read, 3.5 GB/s write.
    num_ssds: int = 4
    ssd_read_bandwidth: float = 6.5 * GB
    ssd_write_bandwidth: float = 3.5 * GB

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.num_nics < 1:
            raise InvalidInput("a node has at least one GPU and one NIC")
        for field in ("nic_share", "h2d_share"):
            if not 0 < getattr(self, field) <= 1:
                raise InvalidInput(f"{field} must be above 0 and at most 1, not {getattr(self, field)}", param=field)

    @property
    def flops(self) -> float:
        return self.num_gpus * self.gpu.bf16_flops

    @property
    def hbm_nbytes(self) -> float:
        return self.num_gpus * self.gpu.hbm_nbytes

    @property
    def hbm_bandwidth(self) -> float:
        return self.num_gpus * self.gpu.hbm_bandwidth

    @property
    def network_bandwidth(self) -> float:
        """Return the measured rate of all NICs together, each way."""
        return self.num_nics * self.nic_bandwidth * self.nic_share

    @property
    def h2d_bandwidth(self) -> float:
        """Return the measured rate of all GPUs together from host memory, and back."""
        return self.num_gpus * self.gpu.h2d_bandwidth * self.h2d_share

    @property
    def peer_bandwidth(self) -> float:
        """Return the bus bandwidth of an all-reduce over the node's GPUs."""
        return self.gpu.peer_bandwidth * self.gpu.peer_share

    def link_capacities(self, node: str) -> dict[str, float]:
        """Return the capacity of the node's links by name, for `Network`: NICs, PCIe and disks, each way."""
        ssds = self.num_ssds if self.ssd_nbytes else 0
        return {
            f"{node}/nic_out": self.network_bandwidth,
            f"{node}/nic_in": self.network_bandwidth,
            f"{node}/h2d": self.h2d_bandwidth,
            f"{node}/d2h": self.h2d_bandwidth,
            f"{node}/ssd_read": ssds * self.ssd_read_bandwidth,
            f"{node}/ssd_write": ssds * self.ssd_write_bandwidth,
        }


def node(gpu_name: str, num_gpus: int = 8) -> NodeSpec:
    """Return a node of these GPUs with the paper's network; use dataclasses.replace to change it."""
    return NodeSpec(gpu=gpu(gpu_name), num_gpus=num_gpus)
