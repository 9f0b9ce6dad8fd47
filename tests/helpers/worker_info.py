"""A worker as tests of the conductor register it: prefill if its name begins with p."""

from __future__ import annotations

import msgspec

from moonpool.base.cluster import WorkerInfo, WorkerRole


def info(name: str, **changes: object) -> WorkerInfo:
    made = WorkerInfo(
        name=name,
        role=WorkerRole.PREFILL if name.startswith("p") else WorkerRole.DECODE,
        address=f"unix:/run/{name}.sock",
        incarnation=1,
        identity=b"\1" * 32,
        model="tiny",
        block_tokens=64,
        num_pages=1000,
        max_num_seqs=8,
        page_nbytes=1 << 20,
    )
    return msgspec.structs.replace(made, **changes)
