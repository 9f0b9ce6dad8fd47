"""How fast the first GPU multiplies matrices and receives bytes. A process of its own measures it with torch, so that
the doctor needs no torch and holds no memory of the GPU.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

_TIMEOUT_S = 90.0  # torch and the driver start slowly on a large machine
_SIZE = 8192
_COPY_NBYTES = 256 * 1024**2
_REPEATS = 5


class GpuSpeed(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    flops: float  # of a large matrix product in bfloat16
    copy_nbytes_s: float  # from page-locked memory of this machine


def measure_gpu() -> GpuSpeed | None:
    """Return the speed of the first GPU; None if torch cannot use one."""
    try:
        done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, timeout=_TIMEOUT_S, check=True)
        return msgspec.json.decode(done.stdout, type=GpuSpeed)
    except (subprocess.SubprocessError, msgspec.DecodeError):
        return None


def main() -> None:
    import torch

    left, right = (torch.ones(_SIZE, _SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    host = torch.empty(_COPY_NBYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")

    def fastest_s(work: Callable[[], object]) -> float:
        times = []
        for _ in range(_REPEATS):
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started_s)
        return min(times)

    found = GpuSpeed(
        name=torch.cuda.get_device_name(),
        flops=2.0 * _SIZE**3 / fastest_s(lambda: left @ right),
        copy_nbytes_s=_COPY_NBYTES / fastest_s(lambda: device.copy_(host, non_blocking=True)),
    )
    sys.stdout.write(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
