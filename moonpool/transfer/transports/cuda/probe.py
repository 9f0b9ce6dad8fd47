"""Whether GPU memory can pass between processes here: tried with a second process, for `moonpool doctor`."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing

from moonpool.base.errors import DeadlineExceeded, MoonpoolError, Unavailable
from moonpool.transfer.memory.buffers import DeviceSpan
from moonpool.transfer.transports.cuda.driver import Device
from moonpool.transfer.transports.cuda.ipc import Offers, decode_offer, hello, reach
from moonpool.transfer.transports.cuda.segment import DeviceSegment

_PROBE_NBYTES = 4096
_TIMEOUT_S = 10.0


def probe_ipc(device: Device, timeout_s: float) -> None:
    """Raises what stands in the way."""
    asked = os.urandom(16)
    memory = device.allocate(_PROBE_NBYTES)
    span = DeviceSpan(memory.address, memory.nbytes, owner=memory)
    with closing(DeviceSegment("probe", span, device, granule_nbytes=None, incarnation=0)) as segment:
        segment.write_from(0, [asked], generation=0, timeout_s=_TIMEOUT_S)
        offer = Offers(segment).answer(hello("another"))
        command = [sys.executable, "-m", __name__]
        try:
            done = subprocess.run(command, input=offer, capture_output=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise DeadlineExceeded(f"the second process did not answer within {timeout_s:g} s") from error
    if done.stdout != asked:
        raise Unavailable(done.stderr.decode(errors="replace").strip()[-500:] or "the bytes did not arrive")


def main() -> int:
    """The second process: reads through the offer on its standard input."""
    found = bytearray(16)
    try:
        span, device = reach(decode_offer(sys.stdin.buffer.read()))
        with closing(DeviceSegment("probe", span, device, granule_nbytes=None, incarnation=0)) as segment:
            segment.read_into(0, [found], timeout_s=_TIMEOUT_S)
    except MoonpoolError as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
