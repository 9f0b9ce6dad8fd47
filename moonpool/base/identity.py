"""What makes KV reusable. Two workers may share a block only when every field here is equal.

The identity's digest goes into every key's root and into every block's header, so KV of another model,
dtype, layout or block size can neither be found nor, if found by accident, be used.
"""

from __future__ import annotations

import hashlib

import msgspec

# How block keys are derived from tokens (base/keys.py). A change there is a new scheme.
HASH_SCHEME = "blake2b-256/le-u32/1"


class CacheIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable description of KV bytes. `weights_digest` is hex of the weight files' own bytes."""

    model_name: str
    weights_digest: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    piece_layout: str  # order of axes inside a piece, e.g. "kv,head,token,dim"
    rope: str  # everything that changes K for the same weights, spelled out
    hash_scheme: str = HASH_SCHEME

    def digest(self) -> bytes:
        """32 bytes; equal if and only if all fields are equal."""
        # Names sorted, strings quoted: no two descriptions share a spelling.
        canonical = msgspec.json.encode(self, order="sorted")
        return hashlib.blake2b(canonical, digest_size=32, person=b"moonpool-ident").digest()
