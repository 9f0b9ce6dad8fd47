"""The offset of each piece of KV in a worker's flat KV memory. Arithmetic only, no torch and no memory.

    [page][layer][K, V][kv head][token][dim]

A page holds one block of all layers, so a page, and a piece (one layer of a page), is each one run of bytes. Other
processes read and write pages by these offsets; docs/formats.md specifies them.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.engine.config import DTYPE_NBYTES, KvDType, ModelConfig

PIECE_LAYOUT = "kv,head,token,dim"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Sizes and offsets of one KV memory."""

    num_pages: int
    num_layers: int
    num_kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: KvDType

    @classmethod
    def of(cls, model: ModelConfig, *, num_pages: int, block_tokens: int, dtype: KvDType) -> KvLayout:
        return cls(
            num_pages=num_pages,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            block_tokens=block_tokens,
            head_dim=model.head_dim,
            dtype=dtype,
        )

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """Axes: page, layer, K or V, KV head, token, dim."""
        return (
            self.num_pages, self.num_layers, 2, self.num_kv_heads, self.block_tokens, self.head_dim
        )  # fmt: skip

    @property
    def piece_nbytes(self) -> int:
        return 2 * self.num_kv_heads * self.block_tokens * self.head_dim * DTYPE_NBYTES[self.dtype]

    @property
    def page_nbytes(self) -> int:
        return self.num_layers * self.piece_nbytes

    @property
    def total_nbytes(self) -> int:
        return self.num_pages * self.page_nbytes

    def page(self, page: int) -> tuple[int, int]:
        """Return (offset, nbytes) of a whole page."""
        assert 0 <= page < self.num_pages, f"no page {page} among {self.num_pages}"
        return page * self.page_nbytes, self.page_nbytes

    def piece(self, page: int, layer: int) -> tuple[int, int]:
        """Return (offset, nbytes) of one layer of a page."""
        assert 0 <= layer < self.num_layers, f"no layer {layer} among {self.num_layers}"
        return self.page(page)[0] + layer * self.piece_nbytes, self.piece_nbytes
