"""The baseline of the tcp benchmarks: iperf3 over loopback, in GB/s; nothing where it is not installed."""

from __future__ import annotations

import shutil
import socket
import subprocess

import msgspec

_SECONDS = 1
_STREAMS = (1, 2, 4)


def iperf_gb_s() -> float | None:
    """The best of `iperf3 -l 1M -P 1|2|4`; None without iperf3."""
    program = shutil.which("iperf3")
    if program is None:
        return None
    return max(_measure(program, streams) for streams in _STREAMS)


def _measure(program: str, streams: int) -> float:
    port = str(free_port())
    server_command = [program, "-s", "-1", "-p", port, "--forceflush"]
    with subprocess.Popen(server_command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            while "listening" not in (line := server.stdout.readline()):
                if not line:
                    raise RuntimeError("iperf3 did not start to listen")
            client = [program, "-c", "127.0.0.1", "-p", port, "-l", "1M", "-t", str(_SECONDS), "-P", str(streams), "-J"]
            report = subprocess.run(client, capture_output=True, check=True, timeout=30).stdout
        finally:
            server.kill()
    bits_per_s: float = msgspec.json.decode(report)["end"]["sum_received"]["bits_per_second"]
    return bits_per_s / 8e9


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
