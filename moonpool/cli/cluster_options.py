"""Options and defaults that `moonpool plan` and `moonpool replay` share: the simulated cluster and its targets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

TTFT_S, TBT_S = 30.0, 0.1
DRAM, SSD = "1TB", "0"

ModelOption: TypeAlias = Annotated[
    str, typer.Option(help="model name, for example llama3-70b, or path of a config.json")
]
GpuOption: TypeAlias = Annotated[str, typer.Option(help="GPU of the nodes: a800, h100, ...")]
GpusOption: TypeAlias = Annotated[int, typer.Option(min=1, help="GPUs per node; they run one model instance together")]
NodesOption: TypeAlias = Annotated[int, typer.Option(min=2, help="number of nodes, prefill and decode together")]
TtftOption: TypeAlias = Annotated[float, typer.Option(help="target for the time to first token, in seconds")]
TbtOption: TypeAlias = Annotated[float, typer.Option(help="target for the time between tokens, in seconds")]
DramOption: TypeAlias = Annotated[str, typer.Option(help="pool memory of each node")]
SsdOption: TypeAlias = Annotated[str, typer.Option(help="pool disk space of each node")]
ProfileOption: TypeAlias = Annotated[Path | None, typer.Option(help="JSON file of measured step times to use")]
BlockTokensOption: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="tokens per block in the trace; default: as stated in the file, or 512")
]
