"""Block keys: the same tokens under the same tenant and identity give the same key, in every process and release.

    root   = BLAKE2b(key=tenant secret, identity digest)
    key[i] = BLAKE2b(key[i-1], tokens of block i as little-endian u32)

The chain contains no shard; an object's key is chain key + layer group + head shard. The secret stays in the front end;
workers get the root. Golden vectors fix the formats (docs/formats.md).

A `CacheIdentity` describes the KV bytes. Two workers may share a block only when every field of it is equal. The
identity's digest goes into every key's root and into every block's header, so KV of another model, dtype, layout or
block size can neither be found nor, if found by accident, be used.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import msgspec
import numpy as np

# How block keys are derived from tokens (base/keys.py). A change there is a new scheme.
HASH_SCHEME = "blake2b-256/le-u32/1"
KEY_NBYTES = 32
OBJECT_KEY_NBYTES = KEY_NBYTES + 4
_SUFFIX = struct.Struct("<HH")


class CacheIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable description of KV bytes. `weights_digest` is hex of the weight files' own bytes; for random weights it
    says "random", with seed and shape."""

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


def tenant_root(tenant_secret: bytes, identity_digest: bytes) -> bytes:
    """The chain's start for one tenant and one identity. `tenant_secret` is 16 to 64 bytes."""
    assert 16 <= len(tenant_secret) <= 64, "a tenant secret is 16 to 64 bytes"
    return hashlib.blake2b(identity_digest, key=tenant_secret, digest_size=KEY_NBYTES, person=b"moonpool-root").digest()


def next_key(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the block that follows `previous` and holds exactly these tokens."""
    packed = np.asarray(tokens, dtype="<u4").tobytes()
    return hashlib.blake2b(previous + packed, digest_size=KEY_NBYTES, person=b"moonpool-block").digest()


def chain_keys(root: bytes, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Keys of all full blocks of `tokens`; a partial last block has none."""
    packed = np.asarray(tokens, dtype="<u4").tobytes()
    keys: list[bytes] = []
    previous, step = root, block_tokens * 4
    for start in range(0, len(packed) - step + 1, step):
        block = packed[start : start + step]
        previous = hashlib.blake2b(previous + block, digest_size=KEY_NBYTES, person=b"moonpool-block").digest()
        keys.append(previous)
    return keys


def object_key(chain_key: bytes, layer_group: int = 0, head_shard: int = 0) -> bytes:
    """The store's key of one shard of a block."""
    return chain_key + _SUFFIX.pack(layer_group, head_shard)
