"""A process with a `mooncake.engine` TransferEngine, which a test starts, asks and kills.

The process takes one JSON list per line, [method, argument, ...], calls the method of its engine, and answers one JSON
value per line. It ends when its input ends, so a test that is killed leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]


class EnginePeer:
    """`memory` is the address of `nbytes` of registered memory: plain memory, a managed buffer, or a GPU's."""

    def __init__(
        self,
        nbytes: int,
        *,
        host: str = "127.0.0.1",
        metadata: str = "P2PHANDSHAKE",
        kind: str = "plain",
        env: dict[str, str] | None = None,
    ) -> None:
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, __file__, host, metadata, str(nbytes), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path} | (env or {}),
            text=True,
        )
        self.memory, port = self._receive()
        self.name = f"{host}:{port}" if metadata == "P2PHANDSHAKE" else host

    def ask(self, method: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self.process.stdin.flush()
        return self._receive()

    def _receive(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the peer ended"
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End the process as a program that just returns, and check that it did."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            assert self.process.wait(20) == 0
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def _main(host: str, metadata: str, nbytes: str, kind: str) -> None:
    import numpy as np

    from moonpool.integrations.mooncake.transfer_engine import MooncakeTransferEngine

    engine = MooncakeTransferEngine()
    assert engine.initialize(host, metadata, "tcp", "") == 0
    plain = np.zeros(int(nbytes), np.uint8)
    if kind == "managed":
        address = engine.allocate_managed_buffer(int(nbytes))
    else:
        address = int(plain.ctypes.data)
        if kind == "gpu":
            import torch

            tensor = torch.zeros(int(nbytes), dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            address = tensor.data_ptr()
        assert engine.register_memory(address, int(nbytes)) == 0
    print(json.dumps([address, engine.get_rpc_port()]), flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        answer = getattr(engine, method)(*arguments)
        if isinstance(answer, bytes):
            answer = answer.hex()
        if method == "get_notifies":
            answer = [[each.name, each.msg] for each in answer]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
